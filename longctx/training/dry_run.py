"""A dry run: a few steps on random tokens, to measure their memory and time.

No corpus, no folder, no log; module, step, optimizer and loader are those of training. As a script
it is the child process in which a run may use up memory without harm:

    python -m longctx.training.dry_run REQUEST OUT      both files of JSON, see `in_child`
"""

from __future__ import annotations

import dataclasses
import gc
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import Dataset

from longctx import attention, plugins, system
from longctx.attention.communication import Laps
from longctx.data.preferences import REJECTED, SIDES, UNRELATED
from longctx.data.rows import IGNORED
from longctx.parallel.devices import is_out_of_memory, within_memory
from longctx.parallel.launch import without_launcher
from longctx.parallel.mesh import Parallel
from longctx.training.batches import StepBatch, read_ahead
from longctx.training.memory import measured
from longctx.training.run import Run, run_of
from longctx.training.train_step import TrainState, optimizer_step
from longctx.training.validation import validation_losses

OUT_OF_MEMORY = "out of memory"


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


class RandomRows(Dataset[dict[str, Tensor]]):
    """Rows of random tokens in documents of `document` tokens.

    Attention takes time by the document, memory by the row. With `answers`, two documents are the
    sides of a pair, without prompts: all tokens are learned.
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
        row = {
            "tokens": tokens[:-1],
            "targets": tokens[1:],
            "doc_ids": doc_ids,
            "padding": torch.tensor(0),
        }
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
    run = dataclasses.replace(run, max_steps=steps)
    workload = run.workload
    # Memory of an earlier call must not count
    result, laps = DryRun([]), Laps(workload.device == "cuda")
    gc.collect()
    if workload.device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    parallel = Parallel(run.config, workload.device)
    parallel.launch()
    # The first steps compile, so each step has its own time
    try:
        with within_memory(workload.device):
            state = TrainState(run, parallel)
            laps.begin()
            for step, batch in zip(
                range(1, steps + 1), random_batches(run, document), strict=False
            ):
                batch = batch.to(parallel.device)
                optimizer_step(state, batch, parallel)
                laps.end()
                result.tokens = sum(micro.tokens.numel() for micro in batch.micro)
                result.pairs = sum(micro.pairs for micro in batch.micro)
                if after is not None:
                    after(step)
                laps.begin()
            # The loss of answers alone, without gradient, takes less than a step
            if validate and run.config.objective.traits.losses is not None:
                validation_losses(state.module, batch.micro[0], parallel)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        result.failed = OUT_OF_MEMORY
    # Steps before the memory ran out have their figures, too
    result.ms = laps.ms()
    result.memory = measured(torch.device(workload.device))
    result.kernels = attention.kernels_run()
    return result


def random_batches(run: Run, document: int | None) -> Iterator[StepBatch]:
    """Return steps of random tokens, by the loader of training."""
    workload, kind, answers = run.workload, run.config.objective.traits.data, None
    assert workload.model.vocab_size is not None
    if kind is not None:
        answers = Answers(REJECTED if kind == "pairs" else UNRELATED, run.caches_reference)
    length = document or workload.seq_len // (1 if kind is None else 2)
    rows = RandomRows(workload.model.vocab_size, workload.seq_len, length, answers)
    size = workload.batch_size * workload.accumulate
    order = (list(range(first, first + size)) for first in count(0, size))
    # One process draws random tokens faster than a step takes them
    return read_ahead(run, rows, order, min(run.config.workers, 1))


def dry_run_in_child(
    run: Run, steps: int, document: int | None, validate: bool, seconds: float
) -> DryRun:
    """Return the `dry_run` of a child process, which ends after `seconds`.

    Whatever happens to it is `failed`, in one line.
    """
    request = {"settings": run.settings(), "device": run.workload.device, "steps": steps}
    request |= {"document": document, "validate": validate}
    answer = in_child("longctx.training.dry_run", request, seconds)
    return DryRun([], failed=answer) if isinstance(answer, str) else DryRun(**answer)


def in_child(module: str, request: dict[str, Any], seconds: float) -> dict[str, Any] | str:
    """Return the JSON that `python -m module REQUEST OUT` writes to OUT; one line if it writes none
    within `seconds`.
    """
    with tempfile.TemporaryDirectory() as scratch:
        request_file, out = Path(scratch, "request.json"), Path(scratch, "out.json")
        request_file.write_text(json.dumps(request))
        try:
            process = subprocess.run(
                system.python_command(module, str(request_file), str(out)),
                env=without_launcher(system.child_environment()),
                capture_output=True,
                text=True,
                timeout=seconds,
            )
        except subprocess.TimeoutExpired:
            return f"took longer than {seconds:.0f} s"
        if out.exists():
            answer: dict[str, Any] = json.loads(out.read_text())
            return answer
    # The kernel kills a process if the machine has no memory left
    if process.returncode == -9:
        return f"{OUT_OF_MEMORY}: the process was killed"
    lines = [line for line in process.stderr.splitlines() if line.strip()]
    return lines[-1] if lines else f"exit code {process.returncode}"


def main(argv: list[str]) -> None:
    """Answer `dry_run_in_child`, as its child."""
    request: dict[str, Any] = json.loads(Path(argv[0]).read_text())
    plugins.load(request["settings"]["plugins"] or [])  # those that the parent runs
    run = run_of(request.pop("settings"), request.pop("device"))
    Path(argv[1]).write_text(json.dumps(dataclasses.asdict(dry_run(run, **request))))


if __name__ == "__main__":
    main(sys.argv[1:])
