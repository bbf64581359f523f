"""The command `longctx plan`: its keys, the GPU that they describe, and the model of init=."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, replace

from longctx import hub_snapshot, system
from longctx.attention.description import AUTO, DESCRIPTIONS, AttentionConfig
from longctx.cli.options import PRICE, PRICES
from longctx.cli.parse import compose
from longctx.config import presets
from longctx.config.fields import Group, key, positive, refuse_all, refuse_first
from longctx.config.presets import Request, with_model
from longctx.config.train_config import TrainConfig
from longctx.runs import run_folder
from longctx.spec import hardware
from longctx.spec.hardware import GIB, Chip, is_named
from longctx.spec.model_config import GPTConfig

BACKENDS = ("naive", "sdpa", "flash")  # that are compared, unless attention= names one


@dataclass
class PlanOptions(Group):
    """Predict memory, time and the longest context that fits.

    longctx plan model=1b seq_len=262144
    longctx plan model=1b seq_len=262144 gpu=H200
    longctx plan init=OWNER/NAME lora.rank=16 seq_len=128k gpu=rtx4090
    longctx plan model=8b seq_len=262144 gpu=8xH100 max_tokens=1B price=2.5

    gpu: such as H100, rtx4090 or 2xH100 (devices=2); auto: the one here, else an H200
    host_memory: GiB of the host; null: this machine's, or 128 for each GPU if gpu= is not here
    """

    gpu: str = key("auto")
    gpu_memory: float | None = key(None, "GiB of it; null: the usual", between=(1e-3, 1e6))
    host_memory: float | None = key(None, between=(1e-3, 1e6))
    gpus_per_machine: int = positive(8, "beyond them, GPUs reach each other by network", limit=4096)
    network: float = key(400.0, "Gbit/s from each GPU to other machines", between=(1.0, 1e5))
    price: float | None = key(None, PRICE, between=PRICES)


def plan(request: Request[PlanOptions], training: list[str]) -> None:
    """Print the plan; torch is imported only for a model that transformers computes."""
    options = request.config
    count, _, gpu = options.gpu.partition("x")
    if count.isdigit() and gpu:
        options.gpu = gpu
        training.append(f"devices={count}")
    # A file of a run on a CPU may have device=cpu
    refuse_all(f"{x}: plan is of GPUs; leave it out" for x in training if x.startswith("device="))
    asked = with_model(with_init(compose("train", training)), gpu=True)
    # The table shows every degree unless one is given
    if "context.degree" not in asked.overrides:
        asked.config.context.degree = "auto"
    from longctx.planner import overview

    config, model = asked.config.model.accepted(asked.config), asked.config.model
    requests = {config.attention.label: config}
    if AUTO in requests or not any(name.startswith("attention") for name in asked.overrides):
        # A run refuses backends that lack a part of the model
        parts = model.block(0).attention.required()["scores"]
        requests = {
            name: replace(config, attention=AttentionConfig(**presets.read("attention", name)))
            for name in BACKENDS
            if not DESCRIPTIONS[name].lacks(parts)
        }
    step = overview.each_layout([*requests.values()][-1], options.gpus_per_machine)[0]
    with system.libraries() if not model.has_kernels else nullcontext():
        model.prove("cpu", "fp32", step.seq_len, config.data.packing)
        measured = model.measured(step, print)
    place, backend = machine(options, config.devices), config.attention.label
    overview.run(requests, backend, *place, options.gpus_per_machine, options.price, measured)


def with_init(request: Request[TrainConfig]) -> Request[TrainConfig]:
    """Return `request` with the model of its init=, from config.json or config.yaml alone."""
    config = request.config
    if config.init is None:
        return request
    # Every family, which --help does not need
    from longctx.hf.families import asked_of, read_config

    brings = f"init={config.init} brings its own model; leave one out"
    refuse_first(f"{x}: {brings}" for x in request.overrides if x.partition(".")[0] == "model")
    path = hub_snapshot.folder(hub_snapshot.pinned(config.init, "init"), "init")
    if run_folder.is_hugging_face(path):
        model = read_config(path, asked_of(config))
    else:
        asked_of(config, path)
        # Its plugins may be missing: they are no part of the shape
        run = run_folder.checkpoint_of(path, "init").parent.parent
        run_folder.read_config(run, needed=["model.layers"])
        model = GPTConfig.of_saved(run_folder.read_keys(run / "config.yaml").get("model", {}))
    choices = request.choices | {"model": path.name}
    return request._replace(config=replace(config, model=model), choices=choices)


def machine(options: PlanOptions, devices: int) -> tuple[Chip, float, str]:
    """Return the GPU to plan for, the bytes of its host's memory, and their source if assumed."""
    there, gpu = hardware.here(), hardware.chip(options.gpu)
    if options.gpu == "auto":
        gpu = there or hardware.chip(hardware.ASSUMED[0], hardware.ASSUMED[1] * GIB)
    elif gpu.flops is None:
        raise ValueError(f"gpu={options.gpu}: unknown; one of {', '.join(hardware.cards())}")
    memory = gpu.memory if options.gpu_memory is None else options.gpu_memory * GIB
    gpu = replace(gpu, memory=memory, network=options.network / 8 * 1e9)
    if options.host_memory is not None:
        return gpu, options.host_memory * GIB, ""
    if there is not None and (options.gpu == "auto" or is_named(there.name, options.gpu)):
        return gpu, hardware.host_memory(), ", this machine: host_memory= says another"
    # If the named GPU is not here, its host's memory is assumed
    host = hardware.ASSUMED_HOST * min(devices, options.gpus_per_machine)
    return gpu, host, " assumed, 128 for each GPU: host_memory= says another"
