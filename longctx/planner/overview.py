"""What a configuration takes of memory and time, per policy and backend, and the longest context
that fits: predicted.

Nothing is run and torch is not imported, so the answer comes in a moment on any machine, for any
GPU: `python -m benchmarks plan model=1b seq_len=262144 gpu_memory=80`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

from benchmarks.report import grid
from benchmarks.words import check_backends, check_unused, filled, request
from longctx.config.train_config import CompleteConfig
from longctx.planner import fitting, hardware
from longctx.planner.hardware import GIB, Chip
from longctx.planner.peak_memory import (
    ATTENTION,
    GRADIENTS,
    KEPT,
    MLP,
    PARAMETERS,
    TERMS,
    predict,
)

TAKES_TRAINING_KEYS = True
BACKENDS = ("naive", "sdpa", "flash")
SPEED = ("s/step", "tokens/s", "MFU")
SHORT = {
    PARAMETERS: "weights",
    GRADIENTS: "grads",
    KEPT: "kept",
    ATTENTION: "attention",
    MLP: "MLP",
}


@dataclass(frozen=True)
class Options:
    """For which machine; every key of train.py may follow."""

    gpu: str = field(
        default="auto", metadata={"help": "such as H100; auto: the one here, else an H200"}
    )
    gpu_memory: str = field(
        default="auto", metadata={"help": "GiB of it, such as 80; auto: the GPU's"}
    )
    host_memory: str = field(
        default="auto", metadata={"help": "GiB of host memory; auto: this machine's"}
    )
    backends: tuple[str, ...] = field(default=BACKENDS, metadata={"help": "attention backends"})


def run(options: Options, command: str, words: list[str]) -> None:
    """Print memory by term and time by policy, and the longest context, for every backend."""
    check_backends(options.backends)
    chip, host = machine(options)
    check_unused(words, {"device": "it is a GPU"})
    chosen = next((word.partition("=")[2] for word in words if word.startswith("attention=")), None)
    if chosen and options.backends != BACKENDS:
        raise ValueError(
            f"attention={chosen}: backends={','.join(options.backends)} is given too; leave one of them out"
        )
    configs = {
        backend: each_policy([*words, f"attention={backend}"], chip, host)
        for backend in ((chosen,) if chosen else options.backends)
    }
    first = next(iter(configs.values()))[0]
    count = f"{first.rows_per_step} row{'s' if first.rows_per_step > 1 else ''}"
    print(
        f"{first.model.parameters() / 1e6:,.0f} million parameters, {count} of {first.seq_len:,} tokens a step, "
        f"{first.precision}"
    )
    print(
        f"{chip.name}, {chip.memory / GIB:.1f} GiB, {chip.usable / GIB:.1f} of them for tensors; host {host / GIB:.0f} GiB"
        f"{', this machine: host_memory= says another' if options.host_memory == 'auto' else ''}\n"
    )
    rows = [
        row(backend, config, chip, host)
        for backend, policies in configs.items()
        for config in policies
    ]
    terms = (SHORT.get(term, term) for term in TERMS)
    columns: tuple[str, ...] = (
        "backend",
        "memory",
        "rows",
        *terms,
        "GPU GiB",
        "host GiB",
        "fits",
        *SPEED,
    )
    grid("Predicted peak by term, GiB", columns, rows)
    rows = [
        longest(backend, config, chip, host)
        for backend, policies in configs.items()
        for config in policies
    ]
    columns = ("backend", "memory", "tokens", "rows", "GPU GiB", "host GiB", *SPEED)
    grid("The longest row that fits, in about as many tokens a step", columns, rows)


def each_policy(words: list[str], chip: Chip, host: float) -> list[CompleteConfig]:
    """What a GPU run with `words` of train.py takes, with the policy that they name or with each
    where that is auto.
    """
    asked = request(words, "cuda")
    merge = asked.batch_size is None and asked.accumulate is None
    return [
        fitting.decide(chosen, chip, host, merge)
        for chosen in fitting.policies(filled(asked, "cuda"))
    ]


def machine(options: Options) -> tuple[Chip, float]:
    """The GPU and the bytes of host memory to plan for."""
    there = hardware.here()
    if options.gpu != "auto":
        if hardware.known(options.gpu) is None:
            raise ValueError(
                f"gpu={options.gpu}: not a known GPU; one of {', '.join(hardware.CHIPS)}"
            )
        if options.gpu_memory == "auto":
            raise ValueError(
                f"gpu={options.gpu}: say how much memory it has, such as gpu_memory=80"
            )
    assumed = hardware.chip(hardware.ASSUMED[0], hardware.ASSUMED[1] * GIB)
    base = (there or assumed) if options.gpu == "auto" else hardware.chip(options.gpu, 0)
    memory = base.memory if options.gpu_memory == "auto" else gib("gpu_memory", options.gpu_memory)
    host = (
        hardware.host_memory()
        if options.host_memory == "auto"
        else gib("host_memory", options.host_memory)
    )
    return replace(base, memory=memory), host


def gib(key: str, text: str) -> float:
    """Bytes of a number of GiB, written 80 or 139.8GiB."""
    try:
        size = float(text.removesuffix("GiB"))
    except ValueError:
        size = 0.0
    if not 0 < size < 2**20:
        raise ValueError(f"{key}={text}: a number of GiB above 0, such as 80 or 139.8GiB")
    return size * GIB


def row(backend: str, config: CompleteConfig, chip: Chip, host: float) -> dict[str, Any]:
    """One line of the table of terms."""
    memory = predict(config)
    fit = "yes" if fitting.fits(config, chip.usable, host) else "no"
    if fit == "no" and fitting.fits(config, chip.usable, math.inf):
        fit = "no: host"
    terms = {SHORT.get(term, term): f"{memory.gpu[term] / GIB:.2f}" for term in TERMS}
    return _chosen(backend, config) | {**terms, "fits": fit} | _sizes(config) | _speed(config, chip)


def longest(backend: str, config: CompleteConfig, chip: Chip, host: float) -> dict[str, Any]:
    """One line of the table of longest contexts."""
    found = fitting.longest(fitting.one_row(config), chip.usable, host)
    if found is None:
        return {"backend": backend, "memory": config.memory.policy, "tokens": "none"}
    return _chosen(backend, found) | {"tokens": found.seq_len} | _sizes(found) | _speed(found, chip)


def _chosen(backend: str, config: CompleteConfig) -> dict[str, str]:
    return {
        "backend": backend,
        "memory": config.memory.policy,
        "rows": f"{config.batch_size} × {config.accumulate}",
    }


def _sizes(config: CompleteConfig) -> dict[str, str]:
    return {
        "GPU GiB": f"{predict(config).peak / GIB:.1f}",
        "host GiB": f"{fitting.on_host(config) / GIB:.1f}",
    }


def _speed(config: CompleteConfig, chip: Chip) -> dict[str, str]:
    time = fitting.seconds(config, chip)
    if time is None:
        return {}
    return {
        "s/step": f"{time.total:,.2f}",
        "tokens/s": f"{time.tokens / time.total:,.0f}",
        "MFU": f"{time.mfu:.1%}",
    }
