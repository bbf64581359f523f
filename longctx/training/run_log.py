"""The log of a run, on rank 0: metrics.jsonl and wandb, the console, first and last lines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from longctx import attention
from longctx.parallel.mesh import Parallel
from longctx.planner.hardware import GIB
from longctx.planner.overview import count_of
from longctx.planner.peak_memory import predict
from longctx.planner.workload import Workload
from longctx.runs import metrics_file
from longctx.runs.metrics import SAMPLE
from longctx.runs.tracking import Tracker
from longctx.training.console import Display, closing_table, loss_curve
from longctx.training.context_check import Finding
from longctx.training.run import Run

FEW = 10_000  # tokens to validate on; the standard error of their mean loss is some 0.03 nats


class RunLog:
    """The log of `run`, silent on ranks other than 0."""

    def __init__(self, run: Run, parallel: Parallel) -> None:
        self.run, self.steps_done = run, run.steps_done
        self.display = Display(run.max_steps, run.steps_done, silent=not parallel.is_first)
        self.tracker = Tracker(run.folder, run.config.wandb) if parallel.is_first else None
        self.out_of_patience = False
        self.figures: dict[str, float] = {}  # of context.check, for the first row
        if self.tracker is not None:
            for line in [*opening(run), self.tracker.opening()]:
                if line:
                    self.say(line)

    def say(self, text: str) -> None:
        """Print a line."""
        self.display.say(text)

    def checked(self, finding: Finding) -> None:
        """Show what context.check found; its figures are in the next row."""
        self.say(f"check      {finding}")
        self.figures = finding.figures()

    def begin(self) -> None:
        """Show the progress bar."""
        self.display.start()

    def stepped(self, step: int) -> None:
        """Note that `step` is done."""
        self.steps_done = step
        self.display.stepped(step)

    def record(self, row: dict[str, Any]) -> None:
        """Write a row to metrics.jsonl and wandb, and show it."""
        self._write(row | self.figures)
        self.figures = {}
        self.display.show(row)

    def sample(self, step: int, tokens_seen: int, text: str) -> None:
        """Write a sample of text to metrics.jsonl and wandb, and show it."""
        self._write({"step": step, "tokens_seen": tokens_seen, SAMPLE: text})
        self.say(f"sample at step {step:,}:\n{text}\n")

    def start_wandb(self, kernels: dict[str, str]) -> None:
        """Begin the copy at wandb, once."""
        if self.tracker is not None:
            self.tracker.start_wandb(run_metadata(self.run) | {"kernels": kernels})

    def saved(self, path: Path, step: int, size: int, seconds: float) -> None:
        """Print that the checkpoint after `step` is on disk, and upload it if asked to."""
        self.say(f"saved      after step {step:,}, {size_of(size)} in {seconds:.1f} s")
        if self.tracker is not None:
            self.tracker.checkpoint(path, step)

    def deleting(self, size: int) -> None:
        """Print that the run ends once `size` bytes of older checkpoints are deleted."""
        self.say(f"deleting   {size_of(size)} of older checkpoints")

    def end(self, code: int) -> None:
        """Close bar, file and wandb."""
        self.display.stop()
        if self.tracker is not None:
            self.tracker.finish(code)
            self._report_wandb()

    def summary(self, code: int, stopped_by: str | None) -> None:
        """Print the loss curve, the results and the next commands."""
        if self.tracker is None:
            return
        if stopped_by is not None:
            self.say(f"stopped by {stopped_by} after step {self.steps_done:,}, saved")
        for line in ["", *loss_curve(metrics_file.read(self.run.folder)), ""]:
            self.say(line)
        finished = code == 0 and self.steps_done >= self.run.max_steps
        table = closing_table(
            self.run.folder,
            attention.kernels_run(),
            finished,
            self.steps_done,
            self.out_of_patience,
        )
        self.display.print(table)

    def _write(self, row: dict[str, Any]) -> None:
        if self.tracker is not None:
            self.tracker.log(row)
            self._report_wandb()

    def _report_wandb(self) -> None:
        """Print, once, that the copy at wandb has failed."""
        if self.tracker is not None and (problem := self.tracker.problem()):
            self.say(problem)


def size_of(count: int) -> str:
    """Return a number of bytes as text, such as 14.8 GB."""
    return f"{count / 1e9:.1f} GB" if count >= 1e8 else f"{count / 1e6:.1f} MB"


def run_metadata(run: Run) -> dict[str, Any]:
    """Return the settings of a run and their results, which wandb shows."""
    workload, model, data = run.workload, run.workload.model, run.data
    assert data is not None
    return run.settings() | {
        "backend": workload.attention.backend,
        "data_fingerprint": data.fingerprint,
        "parameters": model.parameters(),
        "trained_parameters": workload.lora.parameters(workload.model)
        or workload.model.parameters(),
        "data_summary": data.summary(),
        "device": torch.cuda.get_device_name() if workload.device == "cuda" else "cpu",
        "torch": torch.__version__,
        "kernel_lock": run.kernel_lock,
        "memory_predicted_gib": predict(workload).peak / GIB,
    }


def spread_of(workload: Workload) -> str:
    """Return how a step is spread over devices, empty for one."""
    if workload.devices == 1:
        return ""
    shared = f", {workload.context} share each row" if workload.context > 1 else ""
    groups = f" × {workload.data_ranks} groups" if workload.data_ranks > 1 else ""
    return f"{groups} on {workload.devices} devices ({workload.strategy}{shared})"


def learned_turns(counts: dict[str, Any]) -> list[str]:
    """Return a line about conversations that are learned in their last turn only, if any are."""
    shortened = counts["conversations_shortened"]
    if not shortened:
        return []
    return [
        f"turns      only the last of {count_of(shortened, 'conversation')} is learned: the chat "
        "template writes earlier answers differently once others follow; data.turns=all learns all"
    ]


def validates(counts: dict[str, Any]) -> list[str]:
    """Return the line about validation with these `counts`, and a warning if it is little."""
    documents, tokens = counts["val_documents"], counts["val_tokens"]
    if not documents:
        return ["validate   nothing: no document is left for it"]
    ends = counts["val_ends"]
    of_documents = f"{documents:,} documents" if documents > 1 else "1 document"
    if ends == documents:
        of_documents = f"the ends of {of_documents}" if documents > 1 else "the end of 1 document"
    elif ends:
        of_documents += f" (of {ends:,} the ends)"
    line = f"validate   {tokens:,} tokens of {of_documents}, {tokens / counts['tokens']:.1%}"
    if tokens >= FEW:
        return [line]
    return [
        line,
        f"warning: {tokens:,} tokens are few to validate on; see the standard error of val_loss, "
        "give more text, or a larger data.val_fraction",
    ]


def short_on_cpu(run: Run) -> str:
    """Return a remark on a length that nobody asked for, empty for others."""
    is_own = run.config.max_steps is not None or run.config.max_tokens is not None
    if is_own or run.workload.device == "cuda" or run.steps_done:
        return ""
    return ", under 5 minutes on most CPUs; max_steps= sets more"


def beyond_trained(run: Run) -> list[str]:
    """Return a warning if sequences reach beyond the positions that the weights of init know."""
    model, seq_len = run.workload.model, run.workload.seq_len
    trained = model.context or seq_len
    is_kept = run.config.init is not None and run.config.rope.type == "keep"
    stretches_itself = model.rope_scaling.get("rope_type") == "dynamic"
    if not is_kept or stretches_itself or run.steps_done or seq_len <= trained:
        return []
    return [
        f"warning: seq_len={seq_len:,} is {seq_len / trained:,.1f} times the "
        f"{trained:,} tokens that the weights were trained for; at positions beyond them the "
        "loss starts far higher, and training first has to undo that. rope=auto stretches positions"
    ]


def opening(run: Run) -> list[str]:
    """Return the lines that a run begins with."""
    workload, config, data = run.workload, run.config, run.data
    assert data is not None
    device = f"CPU, {count_of(torch.get_num_threads(), 'thread')}"
    if workload.device == "cuda":
        device = torch.cuda.get_device_name()
    # Parts that say nothing for the usual run are empty
    several = f"{workload.devices} × " if workload.devices > 1 else ""
    compiled = ", torch.compile" if workload.compile else ""
    compiled += ", CUDA graphs" if workload.captured else ""
    continued = f", continued after step {run.steps_done:,}" if run.steps_done else ""
    source = f"{run.model_source}, " if run.model_source else ""
    adapters = workload.lora.parameters(workload.model)
    lora = ""
    if adapters:
        lora = f", frozen; LoRA of rank {workload.lora.rank} trains {adapters:,} more"
    options = "".join(f", {key}={value}" for key, value in workload.attention.options.items())
    # Documents without text are named: many of them hint at a wrong column
    counts = data.summary()
    empty = counts["documents_dropped"]
    documents = count_of(counts["documents"], "document") + (
        f" ({empty:,} without text left out)" if empty else ""
    )
    pieces = "micro-batch" if workload.accumulate == 1 else "micro-batches"
    shorter = ", ".join(
        f"{steps:,} steps with rows of {seq_len:,}"
        for seq_len, steps in config.seq_len_schedule or []
    )
    # One line per decision, in the order in which they were made
    lines = [
        f"run        {run.folder}{continued}",
        f"device     {several}{device}, {workload.precision}{compiled}",
        f"model      {source}{workload.model.parameters():,} parameters{lora}",
        *beyond_trained(run),
        f"attention  {workload.attention.backend}{options}",
        f"memory     {workload.memory}",
        f"data       {config.data.source}, {documents}, {counts['tokens']:,} tokens, "
        f"{count_of(len(data.train), 'row')} of {workload.seq_len:,}",
        *learned_turns(counts),
        *validates(counts),
        f"step       {workload.tokens_per_step:,} tokens = "
        f"{count_of(workload.batch_size, 'row')} × {workload.accumulate} {pieces}"
        f"{spread_of(workload)}",
        f"length     {run.max_steps:,} steps, {run.max_steps * workload.tokens_per_step:,} tokens"
        + (f", {shorter} first" if shorter else "")
        + short_on_cpu(run),
    ]
    if workload.graphs == "auto" and workload.is_host_bound and workload.not_captured is not None:
        lines.append(f"graphs     off: {workload.not_captured}")
    lines += [f"layout     {run.layout_note}"] if run.layout_note else []
    return [*lines, f"kernels    {run.lock_note}"] if run.lock_note else lines
