"""seq_len=max: the longest sequences that fit the GPU, predicted by the planner, confirmed by dry
runs. If several GPUs share sequences or weights, they are only predicted: one GPU cannot show it.

A dry run is two steps in a child process on packed documents of 4,096 tokens. Memory depends on the
sequence, so it is that of the run, while attention costs little.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from longctx.planner import fitting, layouts
from longctx.planner.hardware import GIB, Chip
from longctx.planner.peak_memory import predict
from longctx.planner.workload import Workload
from longctx.training.dry_run import OUT_OF_MEMORY, DryRun, dry_run_in_child
from longctx.training.run import Run

PROBES = 3
MULTIPLE = 512  # tokens by which lengths are tried
CLOSE = 0.98  # of the predicted limit: a longer sequence is not worth another probe
DOCUMENT = 4096  # tokens of a probe's documents
SECONDS = 1200  # limit of a probe


def longest_of(
    candidates: Sequence[Callable[[int], Workload]],
    scheduled: Callable[[Workload], Run],
    gpu: Chip,
    host_memory: float,
    say: Callable[[str], None],
) -> int:
    """Return the tokens of the longest sequences that fit in a layout; ValueError if none fit.

    candidates: for each layout, tokens per sequence → its step.
    """
    if any(is_shared(at(DOCUMENT)) for at in candidates):
        return predicted(candidates, gpu, host_memory, say)

    def probe(workload: Workload) -> DryRun:
        return two_steps(scheduled(workload))

    return find(candidates[0], probe, gpu, host_memory, say)


def find(
    at: Callable[[int], Workload],
    probe: Callable[[Workload], DryRun],
    gpu: Chip,
    host_memory: float,
    say: Callable[[str], None],
) -> int:
    """Return the most tokens per sequence for which `probe` of the step at(tokens) fits; ValueError
    if none does.

    Each probe tries the limit that the planner predicts, corrected by the memory of the last one.
    """
    # NCCL's buffers are outside of torch's allocator
    nccl = GIB if at(MULTIPLE).devices > 1 else 0
    room = gpu.usable - nccl
    fits: dict[int, bool] = {}  # length tried → whether it fit
    scale = 1.0  # of measured to predicted memory
    while len(fits) < PROBES:
        workload = fitting.longest(at, room / scale, host_memory, MULTIPLE)
        best = max((length for length, fit in fits.items() if fit), default=0)
        if (
            workload is None
            or workload.seq_len <= best
            or (best and best >= CLOSE * workload.seq_len)
        ):
            break
        # A child process: running out of memory there harms nobody
        predicted, measured = predict(workload).peak, probe(workload)
        if measured.failed and not measured.failed.startswith(OUT_OF_MEMORY):
            raise ValueError(
                f"seq_len=max: the probe of {workload.seq_len:,} tokens failed: {measured.failed}"
            )
        fit = fits[workload.seq_len] = measured.failed is None
        peak = measured.memory.get("memory_peak_gib", 0.0) * GIB
        outcome = f"fit in {peak / GIB:.1f} GiB" if fit else "do not fit"
        say(
            f"seq_len=max: {workload.seq_len:,} tokens with memory={workload.memory.policy} "
            f"{outcome} ({predicted / GIB:.1f} GiB predicted)"
        )
        # If memory ran out, the need is not known, but it is more than there is
        at_least = 1.06 * max(scale, room / scale / predicted)
        scale = peak / predicted if fit and peak else at_least
    longest = max((length for length, fit in fits.items() if fit), default=0)
    if not longest:
        lengths = ", ".join(f"{length:,}" for length in fits) or "none"
        raise ValueError(
            f"seq_len=max: no length fits {gpu.memory / GIB:.1f} GiB (tried: {lengths}); use a "
            "smaller model=, or give a length"
        )
    return longest


def is_shared(workload: Workload) -> bool:
    """Return True if GPUs share sequences or weights."""
    return workload.devices > 1 and (workload.context > 1 or workload.sharing.shards_weights)


def predicted(
    candidates: Sequence[Callable[[int], Workload]],
    gpu: Chip,
    host_memory: float,
    say: Callable[[str], None],
) -> int:
    """Return the most tokens per sequence that are predicted to fit in one of the `candidates`, a
    part of the GPU left free; ValueError if none.
    """
    workload = layouts.longest(candidates, gpu, host_memory, MULTIPLE)
    if workload is None:
        raise ValueError(
            f"seq_len=max: no length is predicted to fit {gpu.memory / GIB:.1f} GiB; use a smaller "
            "model=, more devices=, or give a length"
        )
    say(
        f"seq_len=max: {workload.seq_len:,} tokens on {workload.devices} GPUs, predicted to fit "
        f"with {fitting.LEFT_FREE:.0%} left free, not tried"
    )
    return workload.seq_len


def two_steps(run: Run) -> DryRun:
    """Take two steps of one or two micro-batches and a validation batch in a child process."""
    workload = replace(run.workload, accumulate=min(2, run.workload.accumulate), devices=1)
    short = replace(run, workload=workload)
    return dry_run_in_child(short, 2, DOCUMENT, True, SECONDS)
