"""Memory of a run: predicted before it starts, measured while it runs, explained if it runs out."""

from __future__ import annotations

import resource
import sys
from contextlib import suppress

import torch

from longctx.model.offload import HostBuffers
from longctx.planner import plans
from longctx.runs.metrics import duration
from longctx.spec.hardware import GIB, Machine
from longctx.spec.step import Workload
from longctx.training.run import Run


def explain(workload: Workload, steps_done: int, machine: Machine) -> str:
    """Return the line for a step that ran out of memory."""
    used = torch.cuda.max_memory_allocated() if workload.device == "cuda" else None
    return plans.explain(workload, steps_done, machine, used)


def prediction(run: Run, machine: Machine) -> list[str]:
    """Return lines with the predicted memory and, on a known GPU, the time of a run."""
    assert run.plan is not None
    is_gpu = run.workload.device == "cuda" and machine.gpu is not None
    # A CPU's kernels and libraries take more than the formulas, which are of a GPU, count
    process, least = (0.0, "") if is_gpu else (of_process("VmRSS:"), "at least ")
    peak, step = (run.plan.memory.peak + process) / GIB, run.plan.time
    total = (machine.gpu.memory if is_gpu and machine.gpu else machine.host_memory) / GIB
    advice = "; too much: give memory=auto or a shorter seq_len" if peak > total else ""
    lines = [f"predicted  {least}{peak:.2f} of {total:.1f} GiB of memory{advice}"]
    if step is not None:
        whole = duration((run.max_steps - run.steps_done) * step.total)
        speed = step.tokens / step.total
        lines.append(f"           {step.total:.2f} s a step, {speed:,.0f} tokens/s, {whole} in all")
    return [*lines, "dry run    nothing is trained; leave out dry_run=true to start"]


def predicted(run: Run) -> dict[str, float]:
    """Return the predicted peak of a GPU; a CPU's is not known."""
    if run.workload.device == "cpu":
        return {}
    assert run.plan is not None, "only `resolve` predicts"
    return {"memory_predicted_gib": run.plan.memory.peak / GIB}


def measured(device: torch.device) -> dict[str, float]:
    """Return the peak memory in GiB: of torch's allocator on a GPU (in use, and reserved), of the
    whole process on a CPU.
    """
    if device.type == "cuda":
        return {
            "memory_peak_gib": torch.cuda.max_memory_allocated(device) / GIB,
            "memory_reserved_gib": torch.cuda.max_memory_reserved(device) / GIB,
        }
    return {"process_peak_gib": of_process("VmHWM:") / GIB}


def of_process(line: str) -> float:
    """Return the bytes that /proc/self/status has in `line`; without it those at the peak."""
    with suppress(OSError, StopIteration), open("/proc/self/status", encoding="ascii") as file:
        return 1024.0 * next(int(row.split()[1]) for row in file if row.startswith(line))
    # On Linux it would begin at the peak of the process that started this one
    unit = 1 if sys.platform == "darwin" else 1024
    return float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit)


def free(device: str) -> None:
    """Give back a GPU's memory and page-locked memory while the last checkpoint is written: the
    exit of the process would take that time.
    """
    if device == "cuda":
        torch.cuda.synchronize()  # copies from and to page-locked memory may be under way
        HostBuffers.free()
        torch.cuda.empty_cache()
