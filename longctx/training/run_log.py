"""The log of a run, on rank 0: metrics.jsonl and its copies, the console, first and last lines."""

from __future__ import annotations

import shlex
import signal
from typing import Any

import torch
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column

from longctx import attention, files, plugins, system, tables
from longctx.config.data_config import SOURCES
from longctx.parallel.mesh import Parallel
from longctx.runs import metrics, metrics_file
from longctx.runs.metrics import SAMPLE, Metric, Record, Shown, figures, is_step
from longctx.runs.run_folder import checkpoints
from longctx.runs.tracking import Tracker
from longctx.spec.hardware import Machine
from longctx.spec.step import Workload
from longctx.tables import count_of
from longctx.training.memory import predicted, prediction
from longctx.training.run import Run


class RunLog:
    """The log of `run`, silent on ranks other than 0."""

    def __init__(self, run: Run, parallel: Parallel) -> None:
        self.run, self.steps_done = run, run.steps_done
        is_first = parallel.is_first
        self.console = tables.console()
        self.console.quiet = not is_first
        self.bar = Progress(
            TextColumn("step {task.completed:,}/{task.total:,}"),
            BarColumn(16),
            # In a narrow terminal they take several lines, and the steps and the time stay whole
            TextColumn("{task.fields[numbers]}", table_column=Column(no_wrap=False)),
            TimeRemainingColumn(),
            console=self.console,
            disable=not is_first or not self.console.is_terminal,
        )
        done = self.steps_done
        self.task = self.bar.add_task(
            "", total=run.max_steps, completed=done, numbers="first step ..."
        )
        self.figures: dict[str, float] = {}  # of context.check, for the first row
        self.tracker: Tracker | None = None
        self.more = ""  # besides max_steps=, to resume a run that has ended

    def open(self, machine: Machine) -> None:
        """Print the first lines of the run, and begin its metrics.jsonl, on rank 0."""
        if self.console.quiet:
            return
        lines, config = opening(self.run, machine), self.run.config
        keys = (config.wandb, config.tracker, config.plugins or ())
        self.tracker = Tracker(self.run.folder, *keys)
        for line in [*lines, *self.tracker.opening]:
            self.say(line)

    def say(self, text: str) -> None:
        """Print a line, above the bar if there is one.

        Raise SIGHUP if nobody reads stdout any more, as after `| head`: the run saves and ends, as
        it does if its terminal is gone. Print nothing from then on.
        """
        try:
            self.console.print(text, soft_wrap=True)
        except BrokenPipeError:
            self.console.quiet = True
            files.silence_stdout()
            signal.raise_signal(signal.SIGHUP)

    def stepped(self, step: int) -> None:
        """Note that `step` is done."""
        self.steps_done = step
        self.bar.update(self.task, completed=step)

    def checked(self, found: dict[str, float]) -> None:
        """Show what context.check found; its figures are in the next row."""
        off = " and ".join(f"{name} by {value:.0e}" for name, value in found.items())
        self.say(f"check      a step differs from one device's: {off}")
        self.figures = {f"context_check/{name}": value for name, value in found.items()}

    def record(self, row: dict[str, Any]) -> None:
        """Write a row to metrics.jsonl; show it in the bar, or as a line without a terminal."""
        self._write(row | self.figures)
        self.figures = {}
        if is_step(row) and not self.bar.disable:
            self.bar.update(self.task, completed=row["step"], numbers=brief(row))
            return
        # The steps after it take so long at its pace
        steps = self.run.max_steps - row["step"]
        ms = steps * row.get("ms_per_step", 0) if is_step(row) else 0
        ending = f"  {metrics.duration(ms / 1000)} left" if ms else ""
        self.say(f"step {row['step']:,}/{self.run.max_steps:,}  {brief(row)}{ending}")

    def sample(self, step: int, tokens_seen: int, text: str) -> None:
        """Write a sample of text to metrics.jsonl, and show it."""
        self._write({"step": step, "tokens_seen": tokens_seen, SAMPLE: text})
        self.say(f"sample at step {step:,}:\n{text}\n")

    def start_copies(self) -> None:
        """Begin the copies by tracker=; before the first step they have nothing to show."""
        if self.tracker is None:
            return
        run, workload, model = self.run, self.run.workload, self.run.workload.model
        assert run.data is not None
        known = {
            "backend": workload.attention.label,
            "data_fingerprint": run.data.fingerprint,
            "parameters": model.parameters(),
            "trained_parameters": workload.lora.parameters(model) or model.parameters(),
            "data_summary": run.data.summary(),
            "device": torch.cuda.get_device_name() if workload.device == "cuda" else "cpu",
            "torch": torch.__version__,
            "kernel_lock": run.kernel_lock,
            "kernels": self._kernels(),
        }
        self.tracker.start_copies(run.settings() | known | predicted(run))

    def end(self, code: int) -> None:
        """Close bar, file and copies."""
        self.bar.stop()
        if self.tracker is not None:
            self._report(self.tracker.finish(code))

    def summary(self, code: int, stopped_by: str | None) -> None:
        """Print the results and the next commands."""
        if self.tracker is None:
            return
        if stopped_by is not None:
            self.say(f"stopped by {stopped_by} after step {self.steps_done:,}, saved")
        self.say("")
        # The next command depends on how the run ended
        steps, kernels = self.steps_done, self._kernels()
        more = f" max_steps={2 * steps}" if steps >= self.run.max_steps else ""
        for line in closing_lines(self.run, kernels, "" if code else more + self.more, steps):
            self.say(line)

    def _kernels(self) -> dict[str, str]:
        """Return the run's backend → its kernel. Checks may have run other backends."""
        names = {chosen.backend for chosen in self.run.workload.attention.each}
        return {name: kernel for name, kernel in attention.kernels_run().items() if name in names}

    def _write(self, row: dict[str, Any]) -> None:
        if self.tracker is not None:
            self.tracker.log(row)
            self._report(self.tracker.problem())

    def _report(self, problem: str | None) -> None:
        """Print, once, that a copy has failed."""
        if problem:
            self.say(problem)


def brief(row: Record) -> str:
    """Return a row of metrics.jsonl in one line."""
    # A window may have no target token: pieces of conversations without an answer
    has_loss = "loss" in row or "val_loss" in row
    parts = [
        "" if is_step(row) else "validation",
        "" if has_loss else "nothing scored",
        metrics.line(row, Shown.CONSOLE),
    ]
    return "  ".join(part for part in parts if part)


def closing_lines(run: Run, kernels: dict[str, str], more: str, steps: int) -> list[str]:
    """Return the results of a run after `steps`, its folder, and the next commands: `more` goes to
    the one that resumes it.
    """
    folder, config = run.folder, run.config
    rows = metrics_file.read(folder)
    numbers = figures(rows)
    if numbers.get("step") != steps:  # it was stopped after steps that no row has counted
        numbers.pop("tokens_seen", None)
        numbers["step"] = steps
    lines = {
        metric.label: summary(metric, rows, numbers)
        for metric in metrics.shown(Shown.CLOSING)
        if metric.key in numbers
    }
    ran = ", ".join(f"{backend}: {kernel}" for backend, kernel in kernels.items())
    lines |= {"attention": ran or "did not run", "run": str(folder)}
    if checkpoints(folder):
        named = [plugins.as_typed(config.plugins)] if config.plugins else []
        path = " ".join([shlex.quote(str(folder)), *named])
        text = f"chat {path}" if config.data.chat else f"generate {path} prompt='Once upon a time'"
        commands = {"evaluate": f"eval {path}", "write text": text}
        commands["train on"] = f"resume {path}{more}"
        longctx = system.typed_command()
        lines |= {name: f"{longctx} {command}" for name, command in commands.items()}
    width = max(map(len, lines))
    return [f"{name:<{width}}  {line}" for name, line in lines.items()]


def summary(metric: Metric, rows: list[Record], numbers: Record) -> str:
    """Return the figure of a whole run; with its first value, if training improves it."""
    text = metric.text(numbers[metric.key])
    if metric.of_run == "median":
        return f"{text} (median)"
    column = metrics.values(rows, metric.key)
    if metric.of_run == "last" and metric.better is not None and len(column) > 1:
        return f"{metric.text(column[0])} → {text}"
    return text


def opening(run: Run, machine: Machine) -> list[str]:
    """Return the lines that a run begins with: one for each decision, and warnings. A dry run's end
    with what is predicted of it on `machine`.
    """
    workload, config, data = run.workload, run.config, run.data
    assert data is not None
    counts, memory = data.summary(), workload.memory
    device = f"CPU, {count_of(torch.get_num_threads(), 'thread')}"
    if workload.device == "cuda":
        device = torch.cuda.get_device_name()
    moves = memory.offload or memory.offload_weights or memory.optimizer_state == "host"
    added = workload.lora.parameters(workload.model)
    base = f" in {workload.lora.base}" if workload.lora.base else ""
    # Documents without text are counted: many of them hint at a wrong column
    left_out, documents = counts["left_out"], count_of(counts["documents"], "document")
    stages = [f"{count_of(n, 'step')} at {length:,}" for length, n in config.seq_len_schedule or []]
    # CUDA graphs are explained only if the GPU would have gained by them
    explains = workload.graphs == "auto" and workload.is_host_bound and workload.not_captured
    shortened, cut = counts["conversations_shortened"], counts["prompts_cut"]
    validating, tokens = counts["val_documents"], counts["val_tokens"]
    # A line is left out if its text is empty
    lines = {
        "run": listed(run.folder, run.steps_done and f"continued after step {run.steps_done:,}"),
        "device": listed(
            f"{workload.devices} × {device}" if workload.devices > 1 else device,
            workload.precision,
            workload.compile and "torch.compile",
            workload.captured and "CUDA graphs",
        ),
        "model": listed(
            run.model_source,
            f"{workload.model.parameters():,} parameters",
            added and f"frozen{base}; LoRA of rank {workload.lora.rank} trains {added:,} more",
        ),
        "attention": listed(
            workload.attention.label,
            *(f"{key}={value}" for key, value in workload.attention.options.items()),
        ),
        "memory": listed(
            memory, workload.device == "cpu" and moves and "a CPU moves nothing to host memory"
        ),
        "data": listed(
            config.data.source,
            documents + (f" ({left_out} left out)" if left_out else ""),
            f"{counts['tokens']:,} tokens",
            f"{count_of(len(data.train), 'sequence')} of {workload.seq_len:,}",
        ),
        "far back": counts["far_back"],
        "turns": shortened
        and f"only the last of {count_of(shortened, 'conversation')} is learned: the chat template "
        "writes earlier answers differently once others follow; data.turns=all learns all",
        "prompts": cut
        and f"the beginnings of {count_of(cut, 'prompt')} are left out, so that the answers fit "
        f"seq_len={counts['seq_len']}; a longer one keeps them",
        "validate": f"{tokens:,} tokens of {count_of(validating, 'document')}, "
        f"{tokens / counts['tokens']:.1%}"
        if validating
        else "nothing: no document is left for it",
        "step": step_of(workload),
        "length": listed(
            count_of(run.max_steps, "step"),
            f"{run.max_steps * workload.tokens_per_step:,} tokens",
            stages and f"first {listed(*stages)} tokens per sequence",
        ),
        "graphs": explains and f"off: {explains}",
        "lr": run.rate_note,
        "layout": run.plan.note if run.plan else "",
        "kernels": run.lock_note,
    }
    shown = [f"{name:<10} {text}" for name, text in lines.items() if text]
    shown += [f"warning: {text}" for text in warnings(run, counts)]
    return [*shown, *prediction(run, machine)] if config.dry_run else shown


def listed(*parts: object) -> str:
    """Return the parts that are not empty, with commas between them."""
    return ", ".join(str(part) for part in parts if part)


def step_of(workload: Workload) -> str:
    """Return the size of a step, and how it is spread over devices."""
    batches = "micro-batch" if workload.accumulate == 1 else "micro-batches"
    tokens, sequences = workload.tokens_per_step, count_of(workload.batch_size, "sequence")
    text = f"{tokens:,} tokens = {sequences} × {workload.accumulate} {batches}"
    if workload.devices == 1:
        return text
    groups = f" × {workload.data_ranks} groups" if workload.data_ranks > 1 else ""
    shared = workload.context > 1 and f"{workload.context} share each sequence"
    return f"{text}{groups} on {workload.devices} devices ({listed(workload.strategy, shared)})"


def warnings(run: Run, counts: dict[str, Any]) -> list[str]:
    """Return warnings: files not read, endless answers, much padding, keys and patience
    without effect, or positions beyond those of init's weights.
    """
    config, is_new, seq_len = run.config, not run.steps_done, run.workload.seq_len
    unread_files = SOURCES[config.data.source].left_out(config.data)
    unread_keys, trackers = config.unread(), ",".join(config.tracker)
    # The first validation only sets the loss, and the last step ends the run anyway
    validations, patience = (run.max_steps - 1) // run.val_every, config.patience
    model = run.workload.model
    trained = model.context or seq_len
    is_kept = config.init is not None and config.rope.type == "keep"
    is_kept = is_kept and model.rope_scaling.get("rope_type") != "dynamic"  # stretches itself
    # A model that transformers computes keeps its positions whatever rope= says
    remedy = "" if hasattr(model, "transformers") else ". rope=auto stretches positions"
    rows = {
        f"not read: {unread_files}": unread_files,
        counts["without_target"]: counts["without_target"],
        # Such a model writes on until it has written all tokens that it may
        "no target is a token at which generation stops, so answers will not end; the chat "
        "template can put one between {% generation %} and {% endgeneration %}": (
            counts["sources_without_end"]
        ),
        f"{1 - counts['train_efficiency']:.0%} of the sequences is padding, since there is little "
        "text, or data.packing=false; give a smaller seq_len": counts["train_efficiency"] < 0.5,
        f"{', '.join(unread_keys)}: not read by tracker=[{trackers}]": unread_keys,
        f"patience={patience} cannot end this run: between first and last step it validates "
        f"{count_of(validations, 'time')}; give a smaller patience or val_every": (
            is_new and patience is not None and patience >= validations
        ),
        # A resumed run has said so when it began
        f"seq_len={seq_len:,} is {seq_len / trained:,.1f} times the {trained:,} tokens that the "
        "weights were trained for; at positions beyond them the loss starts far higher, and "
        f"training first has to undo that{remedy}": (is_new and is_kept and seq_len > trained),
    }
    return [text for text, holds in rows.items() if holds]
