"""The command `longctx plan`: its keys, the GPU that they describe, and the model of init=."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

from longctx import hub_snapshot
from longctx.attention.description import AUTO, DESCRIPTIONS, AttentionConfig
from longctx.cli.options import PRICE, PRICES
from longctx.cli.parse import compose, split_own
from longctx.config import presets
from longctx.config.fields import key, positive
from longctx.config.presets import Request, with_model
from longctx.config.train_config import TrainConfig
from longctx.runs import run_folder
from longctx.spec import hardware
from longctx.spec.hardware import GIB, Chip, is_named
from longctx.spec.model_config import GPTConfig

BACKENDS = ("naive", "sdpa", "flash")  # that are compared, unless attention= names one


@dataclass
class PlanOptions:
    """Predict memory, time and the longest context that fits.

    longctx plan model=1b seq_len=262144
    longctx plan model=1b seq_len=262144 gpu=H200
    longctx plan init=OWNER/NAME lora.rank=16 seq_len=128k gpu=rtx4090
    longctx plan model=8b seq_len=262144 gpu=8xH100 max_tokens=1B price=2.5
    """

    gpu: str = key(
        "auto", "such as H100, rtx4090 or 2xH100 (devices=2); auto: the one here, else an H200"
    )
    gpu_memory: float | None = key(None, "GiB of it; null: the usual", between=(1e-3, 1e6))
    host_memory: float | None = key(
        None, "GiB of the host; null: as here, else 128 for each GPU", between=(1e-3, 1e6)
    )
    gpus_per_machine: int = positive(8, "beyond them, GPUs reach each other by network", limit=4096)
    network: float = key(400.0, "Gbit/s from each GPU to other machines", between=(1.0, 1e5))
    price: float | None = key(None, PRICE, between=PRICES)


def plan(argv: list[str], libraries: Callable[[], AbstractContextManager[None]]) -> None:
    """Print the plan; import torch in a block of `libraries` if transformers computes the model."""
    own, training = split_own(PlanOptions, argv)
    chosen: PlanOptions = compose(PlanOptions, own).config
    count, _, gpu = chosen.gpu.partition("x")
    if count.isdigit() and gpu:
        chosen.gpu = gpu
        training.append(f"devices={count}")
    for argument in training:
        if argument.startswith("device="):
            raise ValueError(f"{argument}: plan is of GPUs; leave it out")
    request = with_model(with_init(compose("train", training)), gpu=True)
    # The table shows every degree unless one is given
    if "context.degree" not in request.overrides:
        request.config.context.degree = "auto"
    backends = [request.overrides.get("attention", AUTO)]
    # A run refuses backends that lack a part of the model
    if backends == [AUTO]:
        parts = request.config.model.block(0).attention.required()["scores"]
        backends = [name for name in BACKENDS if not DESCRIPTIONS[name].lacks(parts)]
    from longctx.planner import overview

    model = request.config.model
    request = request._replace(config=model.accepted(request.config))
    requests = {backend: with_backend(request, backend) for backend in backends}
    step = overview.each_layout(requests[backends[-1]], chosen.gpus_per_machine)[0]
    with libraries() if not model.has_kernels else nullcontext():
        model.prove("cpu", "fp32", step.seq_len, request.config.data.packing)
        measured = model.measured(step, print)
    asked = request.overrides.get("attention", AttentionConfig().backend)
    place = machine(chosen, request.config.devices)
    overview.run(requests, asked, *place, chosen.gpus_per_machine, chosen.price, measured)


def with_backend(request: Request[TrainConfig], backend: str) -> TrainConfig:
    """Return its configuration with another backend; overrides of attention.options stay."""
    prefix, attention = "attention.options.", AttentionConfig(**presets.read("attention", backend))
    overridden = [key.removeprefix(prefix) for key in request.overrides if key.startswith(prefix)]
    attention.options |= {key: request.config.attention.options[key] for key in overridden}
    return replace(request.config, attention=attention)


def with_init(request: Request[TrainConfig]) -> Request[TrainConfig]:
    """Return `request` with the model of its init=, from config.json or config.yaml alone.

    torch is imported only for a model that transformers computes.
    """
    config = request.config
    if config.init is None:
        return request
    # Every family, which --help does not need
    from longctx.hf.families import read_config

    for name in request.overrides:
        if name.partition(".")[0] == "model":
            raise ValueError(f"{name}: init={config.init} brings its own model; leave one out")
    path = hub_snapshot.folder(hub_snapshot.pinned(config.init, "init"), "init")
    if not run_folder.is_hugging_face(path):
        if config.transformers != "auto":
            raise ValueError(f"transformers={config.transformers}: the run {path} decides that")
        # Its plugins may be missing: they are no part of the shape
        run = run_folder.checkpoint_of(path, "init").parent.parent
        run_folder.read_config(run, needed=["model.layers"])
        model = GPTConfig.of_saved(run_folder.read_keys(run / "config.yaml").get("model", {}))
    else:
        model = read_config(path, config.transformers)
    return request._replace(
        config=replace(config, model=model), choices=request.choices | {"model": path.name}
    )


def machine(options: PlanOptions, devices: int) -> tuple[Chip, float, str]:
    """Return the GPU to plan for, the bytes of its host's memory, and their source if assumed."""
    # if the named GPU is not here, its host's memory is assumed
    there = hardware.here()
    assumed = hardware.chip(hardware.ASSUMED[0], hardware.ASSUMED[1] * GIB)
    base = (there or assumed) if options.gpu == "auto" else hardware.chip(options.gpu)
    base = replace(base, network=options.network / 8 * 1e9)
    if options.gpu_memory is not None:
        base = replace(base, memory=options.gpu_memory * GIB)
    if options.gpu != "auto" and base.flops is None:
        raise ValueError(
            f"gpu={options.gpu}: not a known GPU; one of {', '.join(hardware.cards())}"
        )
    if not base.memory:
        raise ValueError(f"gpu={options.gpu}: say how much memory it has, such as gpu_memory=80")
    if options.host_memory is not None:
        return base, options.host_memory * GIB, ""
    is_here = there is not None and (options.gpu == "auto" or is_named(there.name, options.gpu))
    if is_here:
        return base, hardware.host_memory(), ", this machine: host_memory= says another"
    host = hardware.ASSUMED_HOST * min(devices, options.gpus_per_machine)
    return base, host, " assumed, 128 for each GPU: host_memory= says another"
