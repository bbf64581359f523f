"""seq_len=max: the longest rows that fit the GPU, predicted by the plan and confirmed by probes in
child processes.

A probe is two steps on packed documents of 4,096 tokens: memory goes by the row, so it is that of
the run, while attention costs little. Memory that runs out in a child harms nobody.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace

from longctx.config.train_config import CompleteConfig, TrainConfig, complete
from longctx.planner import fitting
from longctx.planner.hardware import GIB, Chip, host_memory
from longctx.planner.peak_memory import predict
from longctx.training.probe import OUT_OF_MEMORY, Measured, in_child

VARIABLE = "LONGCTX_SEQ_LEN"  # what the first rank found, for the others
PROBES = 3
MULTIPLE = 512  # tokens by which lengths are tried
CLOSE = 0.98  # of what the plan thinks possible: a longer row is not worth another probe
DOCUMENT = 4096  # tokens of a probe's documents
SECONDS = 1200  # that a probe may take
Probe = Callable[[CompleteConfig], Measured]


def find(
    request: TrainConfig, chip: Chip, say: Callable[[str], None], probe: Probe | None = None
) -> int:
    """Tokens per row for `request`, whose seq_len is max and whose vocabulary is known;
    ValueError if none fits.

    The rows of a micro-batch are those that `request` asks for, else one.
    """
    if VARIABLE in os.environ:
        return int(os.environ[VARIABLE])
    host, probe = host_memory(), probe or run_probe
    room = chip.usable - (GIB if request.devices > 1 else 0)  # what NCCL takes
    tried: dict[int, bool] = {}
    scale = 1.0  # of measured to predicted memory
    while len(tried) < PROBES:
        config = longest(request, room / scale, host)
        best = max((n for n, fit in tried.items() if fit), default=0)
        if config is None or config.seq_len <= best:
            break
        if best and best >= CLOSE * config.seq_len:
            break
        predicted = predict(config).peak
        measured = probe(config)
        if measured.failed and not measured.failed.startswith(OUT_OF_MEMORY):
            raise ValueError(
                f"seq_len=max: the probe of {config.seq_len:,} tokens failed: {measured.failed}"
            )
        tried[config.seq_len] = measured.failed is None
        peak = measured.memory.get("memory_peak_gib", 0.0) * GIB
        say(
            f"seq_len=max: {config.seq_len:,} tokens with memory={config.memory.policy} "
            + (f"fit, {peak / GIB:.1f} GiB" if measured.failed is None else "do not fit")
            + f" ({predicted / GIB:.1f} predicted)"
        )
        # Where memory ran out, the real need is not known, but more than there is.
        scale = (
            peak / predicted
            if measured.failed is None and peak
            else 1.06 * max(scale, room / scale / predicted)
        )
    found = max((n for n, fit in tried.items() if fit), default=0)
    if not found:
        lengths = ", ".join(f"{n:,}" for n in tried) or "none"
        raise ValueError(
            f"seq_len=max: no length fits {chip.memory / GIB:.1f} GiB (tried: {lengths}); use a smaller model=, or give a length"
        )
    if request.devices > 1:
        os.environ[VARIABLE] = str(found)
    return found


def longest(request: TrainConfig, gpu: float, host: float) -> CompleteConfig | None:
    """The longest configuration of `request` that is predicted to fit, its memory policy decided."""

    def at(seq_len: int) -> CompleteConfig:
        made = complete(
            replace(request, seq_len=seq_len, batch_size=request.batch_size or 1), "cuda"
        )
        return replace(made, memory=request.memory)

    return fitting.longest(at, gpu, host, MULTIPLE)


def run_probe(config: CompleteConfig) -> Measured:
    """Two steps of one or two micro-batches and a validation batch in a child process."""
    short = replace(config, accumulate=min(2, config.accumulate), devices=1)
    return in_child(short, "cuda", 2, DOCUMENT, True, SECONDS)
