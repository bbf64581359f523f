"""A dry run: a few steps on random tokens, to measure their memory and time.

No corpus, no folder, no log; module, step, optimizer and loader are those of training. As a script
it is the child process in which a run may use up memory without harm:

    python -m longctx.training.dry_run REQUEST OUT      both files of JSON

seq_len=max tries the longest sequences that the planner predicts to fit the GPU: two steps on
packed documents of 4,096 tokens. Memory depends on the sequence, so it is that of the run, while
attention costs little. If several GPUs share sequences or weights, they are only predicted: one GPU
cannot show it.
"""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import count, islice
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import Dataset

from longctx import attention, plugins, system
from longctx.attention.communication import Moment, elapsed_ms, now
from longctx.config.train_config import TrainConfig
from longctx.data.preferences import REJECTED, SIDES, UNRELATED
from longctx.data.sequences import IGNORED
from longctx.parallel.devices import is_out_of_memory, within_memory
from longctx.parallel.launch import without_launcher
from longctx.parallel.mesh import Parallel
from longctx.planner import fitting
from longctx.planner.peak_memory import predict
from longctx.spec.hardware import GIB, Chip, Machine
from longctx.spec.step import Workload
from longctx.training.batches import MicroBatch, read_ahead
from longctx.training.memory import measured
from longctx.training.run import Run, run_of, scheduled
from longctx.training.train_step import TrainState, optimizer_step
from longctx.training.validation import scoring

OUT_OF_MEMORY = "out of memory"
PROBES = 3
MULTIPLE = 512  # tokens by which lengths are tried
CLOSE = 0.98  # of the predicted limit: a longer sequence is not worth another probe
DOCUMENT = 4096  # tokens of a probe's documents
SECONDS = 1200  # limit of a probe


@dataclass
class DryRun:
    """The cost of a few steps; `failed` is None, OUT_OF_MEMORY or another line."""

    ms: list[float]  # of each step
    tokens: int = 0  # of one step
    pairs: float = 0  # visible (query, key) pairs of one step and head, the mean over the layers
    memory: dict[str, float] = field(default_factory=dict)  # as in metrics.jsonl
    kernels: dict[str, str] = field(default_factory=dict)
    failed: str | None = None


class Answers(NamedTuple):
    """The second side of a pair, and if the log-probabilities of the reference are cached."""

    other_side: int
    has_reference: bool


class RandomSequences(Dataset[dict[str, Tensor]]):
    """Sequences of random tokens in documents of `document` tokens.

    Attention takes time by the document, memory by the sequence. With `answers`, two documents are
    the sides of a pair, without prompts: all tokens are learned.
    """

    def __init__(
        self, vocab_size: int, seq_len: int, document: int, answers: Answers | None = None
    ) -> None:
        self.vocab_size, self.seq_len, self.document = vocab_size, seq_len, document
        self.answers = answers

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(number)
        tokens = torch.randint(self.vocab_size, (self.seq_len + 1,), generator=generator)
        doc_ids = torch.arange(self.seq_len) // self.document
        row = {"tokens": tokens[:-1], "targets": tokens[1:], "doc_ids": doc_ids}
        row["padding"] = torch.tensor(0)
        if self.answers is None:
            return row
        is_last = doc_ids.diff(append=torch.tensor([-1])) != 0
        pairs = torch.arange(int(doc_ids[-1]) // 2 + 1)
        row["doc_ids"] = doc_ids // 2 * SIDES + doc_ids % 2 * self.answers.other_side
        row |= {"targets": row["targets"].masked_fill(is_last, IGNORED), "documents": pairs}
        if self.answers.has_reference:
            row["reference"] = torch.zeros(len(pairs), SIDES)
        return row


def dry_run(
    run: Run,
    steps: int,
    document: int | None = None,
    validate: bool = False,
    after: Callable[[int], None] | None = None,
) -> DryRun:
    """Measure `steps` optimizer steps of `run` on sequences of random tokens.

    Each sequence is one document, or a pair of answers if the objective compares them, or documents
    of `document` tokens. `validate` adds one batch of validation. `after` is called with the number
    of each step once the device has it. Memory is that of this call on a GPU, of the process on a
    CPU. Running out of memory is an answer, not an error.
    """
    run = replace(run, max_steps=steps)
    workload = run.workload
    # Memory of an earlier call must not count
    result, on_gpu = DryRun([]), workload.device == "cuda"
    times: list[Moment] = []  # before the first step, and after each
    gc.collect()
    if on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    parallel = Parallel.of(run.config, workload.device)
    parallel.launch()
    # The first steps compile, so each step has its own time
    try:
        with within_memory(workload.device):
            state = TrainState(run, parallel)
            times.append(now(on_gpu))
            for step, batch in enumerate(islice(random_batches(run, document), steps), start=1):
                optimizer_step(state, batch, parallel)
                times.append(now(on_gpu))
                result.tokens = sum(micro.tokens.numel() for micro in batch)
                result.pairs = sum(micro.pairs for micro in batch)
                if after is not None:
                    after(step)
            # The loss of answers alone, without gradient, takes less than a step
            if validate and run.config.objective.traits.losses is not None:
                with scoring(state.module, parallel):
                    state.module.validation_step(batch[0].to(parallel.device))
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        result.failed = OUT_OF_MEMORY
    # Steps before the memory ran out have their figures, too
    if on_gpu:
        torch.cuda.synchronize()
    result.ms = list(map(elapsed_ms, times, times[1:]))
    result.memory = measured(torch.device(workload.device))
    result.kernels = attention.kernels_run()
    return result


def random_batches(run: Run, document: int | None) -> Iterator[list[MicroBatch]]:
    """Return steps of random tokens, by the loader of training."""
    workload, kind, answers = run.workload, run.config.objective.traits.data, None
    assert workload.model.vocab_size is not None
    if kind is not None:
        answers = Answers(REJECTED if kind == "pairs" else UNRELATED, run.caches_reference)
    length = document or workload.seq_len // (1 if kind is None else 2)
    sequences = RandomSequences(workload.model.vocab_size, workload.seq_len, length, answers)
    size = workload.batch_size * workload.accumulate
    order = (list(range(first, first + size)) for first in count(0, size))
    # One process draws random tokens faster than a step takes them
    return read_ahead(run, sequences, order, min(run.config.workers, 1))


def dry_run_in_child(
    run: Run, steps: int, document: int | None, validate: bool, seconds: float
) -> DryRun:
    """Return the `dry_run` of a child process, which ends after `seconds`; whatever happens to it
    is `failed`, in one line.
    """
    request = {"settings": run.settings(), "device": run.workload.device, "steps": steps}
    request |= {"document": document, "validate": validate}
    with tempfile.TemporaryDirectory() as scratch:
        request_file, out = Path(scratch, "request.json"), Path(scratch, "out.json")
        request_file.write_text(json.dumps(request))
        command = system.python_command("longctx.training.dry_run", str(request_file), str(out))
        env = without_launcher(system.child_environment())
        try:
            done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=seconds)
        except subprocess.TimeoutExpired:
            return DryRun([], failed=f"took longer than {seconds:.0f} s")
        if out.exists():
            return DryRun(**json.loads(out.read_text()))
    # The kernel kills a process if the machine has no memory left
    if done.returncode == -9:
        return DryRun([], failed=f"{OUT_OF_MEMORY}: the process was killed")
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    return DryRun([], failed=lines[-1] if lines else f"exit code {done.returncode}")


def longest_of(
    config: TrainConfig,
    machine: Machine,
    say: Callable[[str], None],
    candidates: Sequence[Callable[[int], Workload]],
) -> Workload:
    """Return the step of the longest sequences that fit in one of `candidates`, functions from
    tokens per sequence to the step of a division; ValueError if none fit.
    """
    gpu, host_memory = machine.gpu, machine.host_memory
    assert gpu is not None
    steps = [at(DOCUMENT) for at in candidates]
    # One GPU cannot show a step whose sequences or weights are shared
    if any(step.devices > 1 and (step.context > 1 or step.slices > 1) for step in steps):
        step = fitting.longest(candidates, fitting.room(gpu), host_memory, MULTIPLE, chip=gpu)
        if step is None:
            problem = f"seq_len=max: no length is predicted to fit {gpu.memory / GIB:.1f} GiB"
            raise ValueError(f"{problem}; use a smaller model=, more devices=, or give a length")
        found = f"{step.seq_len:,} tokens on {step.devices} GPUs, predicted to fit"
        say(f"seq_len=max: {found} with {fitting.LEFT_FREE:.0%} left free, not tried")
        return step

    def probe(workload: Workload) -> DryRun:
        run = scheduled(replace(config, attention=workload.attention), workload)
        # Two micro-batches show what further ones take: gradients add up in place
        short = replace(run.workload, accumulate=min(2, run.workload.accumulate), devices=1)
        return dry_run_in_child(replace(run, workload=short), 2, DOCUMENT, True, SECONDS)

    return longest_probed(candidates[0], probe, gpu, host_memory, say)


def longest_probed(
    at: Callable[[int], Workload],
    probe: Callable[[Workload], DryRun],
    gpu: Chip,
    host_memory: float,
    say: Callable[[str], None],
) -> Workload:
    """Return the step at(tokens) with the most tokens per sequence for which `probe` of it fits;
    ValueError if none does.
    """
    # Each probe tries the limit that the planner predicts, corrected by the memory of the last one
    # NCCL's buffers are outside of torch's allocator
    room = gpu.usable - (GIB if at(MULTIPLE).devices > 1 else 0)
    longest: Workload | None = None  # that a probe confirmed
    tried: list[int] = []
    scale = 1.0  # of measured to predicted memory
    while len(tried) < PROBES:
        workload = fitting.longest([at], room / scale, host_memory, MULTIPLE, chip=gpu)
        if workload is None or (longest and longest.seq_len >= CLOSE * workload.seq_len):
            break
        tried.append(workload.seq_len)
        # A child process: running out of memory there harms nobody
        predicted, measured = predict(workload).peak, probe(workload)
        if measured.failed and not measured.failed.startswith(OUT_OF_MEMORY):
            problem = f"the probe of {workload.seq_len:,} tokens failed: {measured.failed}"
            raise ValueError(f"seq_len=max: {problem}")
        fit = measured.failed is None
        if fit and (longest is None or longest.seq_len < workload.seq_len):
            longest = workload
        peak = measured.memory.get("memory_peak_gib", 0.0) * GIB
        outcome = f"fit in {peak / GIB:.1f} GiB" if fit else "do not fit"
        outcome += f" ({predicted / GIB:.1f} GiB predicted)"
        say(f"seq_len=max: {workload.seq_len:,} tokens with memory={workload.memory} {outcome}")
        # If memory ran out, the need is not known, but it is more than there is
        at_least = 1.06 * max(scale, room / scale / predicted)
        scale = peak / predicted if fit and peak else at_least
    if longest is None:
        lengths = ", ".join(f"{length:,}" for length in tried) or "none"
        problem = f"seq_len=max: no length fits {gpu.memory / GIB:.1f} GiB (tried: {lengths})"
        raise ValueError(f"{problem}; use a smaller model=, or give a length")
    return longest


def main(argv: list[str]) -> None:
    """Answer `dry_run_in_child`, as its child."""
    request: dict[str, Any] = json.loads(Path(argv[0]).read_text())
    plugins.load(request["settings"]["plugins"] or [])  # as the parent did
    run = run_of(request.pop("settings"), request.pop("device"))
    Path(argv[1]).write_text(json.dumps(asdict(dry_run(run, **request))))


if __name__ == "__main__":
    main(sys.argv[1:])
