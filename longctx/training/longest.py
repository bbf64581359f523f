"""seq_len=max: the longest sequences that fit the GPU, predicted by the planner, confirmed by dry
runs. If several GPUs share sequences or weights, they are only predicted: one GPU cannot show it.

A dry run is two steps in a child process on packed documents of 4,096 tokens. Memory depends on the
sequence, so it is that of the run, while attention costs little.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from longctx.planner import fitting
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
    steps = [at(DOCUMENT) for at in candidates]
    # One GPU cannot show a step whose sequences or weights are shared
    if any(step.devices > 1 and (step.context > 1 or step.slices > 1) for step in steps):
        return predicted(candidates, gpu, host_memory, say)

    def probe(workload: Workload) -> DryRun:
        run = scheduled(workload)
        # Two micro-batches show what further ones take: gradients add up in place
        short = replace(run.workload, accumulate=min(2, run.workload.accumulate), devices=1)
        return dry_run_in_child(replace(run, workload=short), 2, DOCUMENT, True, SECONDS)

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
    longest = 0  # tokens per sequence that a probe confirmed
    tried: list[int] = []
    scale = 1.0  # of measured to predicted memory
    while len(tried) < PROBES:
        workload = fitting.longest([at], room / scale, host_memory, MULTIPLE)
        if workload is None or longest >= CLOSE * workload.seq_len:
            break
        tried.append(workload.seq_len)
        # A child process: running out of memory there harms nobody
        predicted, measured = predict(workload).peak, probe(workload)
        if measured.failed and not measured.failed.startswith(OUT_OF_MEMORY):
            raise ValueError(
                f"seq_len=max: the probe of {workload.seq_len:,} tokens failed: {measured.failed}"
            )
        fit = measured.failed is None
        longest = max(longest, workload.seq_len if fit else 0)
        peak = measured.memory.get("memory_peak_gib", 0.0) * GIB
        outcome = f"fit in {peak / GIB:.1f} GiB" if fit else "do not fit"
        say(
            f"seq_len=max: {workload.seq_len:,} tokens with memory={workload.memory.policy} "
            f"{outcome} ({predicted / GIB:.1f} GiB predicted)"
        )
        # If memory ran out, the need is not known, but it is more than there is
        at_least = 1.06 * max(scale, room / scale / predicted)
        scale = peak / predicted if fit and peak else at_least
    if not longest:
        lengths = ", ".join(f"{length:,}" for length in tried) or "none"
        raise ValueError(
            f"seq_len=max: no length fits {gpu.memory / GIB:.1f} GiB (tried: {lengths}); use a "
            "smaller model=, or give a length"
        )
    return longest


def predicted(
    candidates: Sequence[Callable[[int], Workload]],
    gpu: Chip,
    host_memory: float,
    say: Callable[[str], None],
) -> int:
    """Return the most tokens per sequence that are predicted to fit in one of the `candidates`, a
    part of the GPU left free; ValueError if none.
    """
    workload = fitting.longest(candidates, fitting.room(gpu), host_memory, MULTIPLE)
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
