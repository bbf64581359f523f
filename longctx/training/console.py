"""What a run prints: a bar while it trains, plain lines where nobody watches, a table at the end."""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table

from longctx.runs.run_folder import checkpoints, read_metrics

Row = dict[str, Any]
UNSCORED = "nothing scored"  # of conversations, pieces in which the assistant says nothing


def console(silent: bool = False) -> Console:
    """Where to print; wide where it is no terminal, so that nothing is cut for a screen that is not
    there.
    """
    made = Console(quiet=silent, highlight=False)
    if not made.is_terminal:
        made.width = 240
    return made


class Display:
    """Shows the rows of a run as they come; says nothing on ranks other than the first."""

    def __init__(self, steps: int, first_step: int, silent: bool = False) -> None:
        self.console = console(silent)
        self.steps = steps
        self._bar: Progress | None = None
        self._task = TaskID(0)
        if self.console.is_terminal and not silent:
            counter, said = (
                TextColumn("step {task.completed:,}/{task.total:,}"),
                TextColumn("{task.fields[said]}"),
            )
            self._bar = Progress(
                counter, BarColumn(16), said, TimeRemainingColumn(), console=self.console
            )
            self._task = self._bar.add_task(
                "", total=steps, completed=first_step, said="first step ..."
            )

    def say(self, text: str) -> None:
        """Print a line, above the bar if there is one."""
        self.console.print(text, soft_wrap=True, markup=False)

    def start(self) -> None:
        """Show the bar."""
        if self._bar is not None:
            self._bar.start()

    def stop(self) -> None:
        """Leave the bar where it is."""
        if self._bar is not None:
            self._bar.stop()

    def stepped(self, step: int) -> None:
        """Move the bar."""
        if self._bar is not None:
            self._bar.update(self._task, completed=step)

    def show(self, row: Row) -> None:
        """Show a logged row: in the bar, or as a line where the output is no terminal."""
        said = brief(row)
        if "tokens_per_second" not in row:
            self.say(f"step {row['step']:,}/{self.steps:,}  {said}")
        elif self._bar is not None:
            self._bar.update(self._task, completed=row["step"], said=said)
        else:
            self.say(f"step {row['step']:,}/{self.steps:,}  {said}")


def brief(row: Row) -> str:
    """A row of metrics.jsonl in one line."""
    if "tokens_per_second" not in row:
        found = {
            key.split("/", 1)[1]: share
            for key, share in row.items()
            if key.startswith("facts_found/")
        }
        facts = "".join(f"  {key.replace('/', ' at ')} {share:.0%}" for key, share in found.items())
        scored = (
            f"loss {row['val_loss']:.4f}  perplexity {row['val_perplexity']:,.1f}"
            if "val_loss" in row
            else UNSCORED
        )
        return f"validation  {scored}{facts}"
    speed = f"{row['tokens_per_second']:,.0f} tokens/s  {row['ms_per_step']:,.0f} ms/step"
    parts = [f"loss {row['loss']:.4f}" if "loss" in row else UNSCORED, speed]
    if "mfu" in row:
        parts.append(f"MFU {row['mfu']:.1%}")
    return "  ".join([*parts, gib(row)])


def gib(row: Row) -> str:
    """Peak memory of a row, and whose it is."""
    if "memory_peak_gib" in row:
        return f"{row['memory_peak_gib']:.1f} GiB"
    return f"{row['process_peak_gib']:.1f} GiB of the process"


def summarize(rows: list[Row]) -> Row:
    """What a run's rows come to; keys are absent where there is nothing to say."""
    steps = [row for row in rows if row.get("loss") is not None]
    validations = [row for row in rows if row.get("val_perplexity") is not None]
    summary: Row = {}
    if steps:
        settled = steps[1:] or steps
        summary |= {key: steps[-1][key] for key in ("step", "tokens_seen", "loss", "seconds")}
        summary["tokens_per_second"] = median(row["tokens_per_second"] for row in settled)
        summary["memory"] = gib(
            max(
                steps,
                key=lambda row: float(
                    row.get("memory_peak_gib") or row.get("process_peak_gib") or 0.0
                ),
            )
        )
        if "memory_predicted_gib" in steps[-1]:
            summary["memory_predicted_gib"] = steps[-1]["memory_predicted_gib"]
        if mfu := [row["mfu"] for row in settled if "mfu" in row]:
            summary["mfu"] = median(mfu)
    if validations:
        summary["validations"] = len(validations)
        summary["val_perplexity"] = (
            validations[0]["val_perplexity"],
            validations[-1]["val_perplexity"],
        )
    return summary


def predicted(summary: Row) -> str:
    """What the plan expected, beside a summary's peak."""
    return (
        f" ({summary['memory_predicted_gib']:.1f} predicted)"
        if "memory_predicted_gib" in summary
        else ""
    )


def closing_table(folder: Path, kernels: dict[str, str], finished: bool) -> Table:
    """The end of a run: what it did, where it is, what to type next."""
    summary = summarize(read_metrics(folder))
    table = Table(show_header=False, box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    if "loss" in summary:
        table.add_row("steps", f"{summary['step']:,}")
        table.add_row("tokens", f"{summary['tokens_seen']:,} in {duration(summary['seconds'])}")
        table.add_row("loss", f"{summary['loss']:.4f}")
    if "val_perplexity" in summary:
        first, last = summary["val_perplexity"]
        table.add_row(
            "val perplexity",
            f"{first:,.1f} → {last:,.1f}" if summary["validations"] > 1 else f"{last:,.1f}",
        )
    if "tokens_per_second" in summary:
        table.add_row("tokens/s", f"{summary['tokens_per_second']:,.0f} (median)")
    if "mfu" in summary:
        table.add_row("MFU", f"{summary['mfu']:.1%} (median)")
    if "memory" in summary:
        table.add_row("peak memory", summary["memory"] + predicted(summary))
    ran = ", ".join(f"{backend}: {kernel}" for backend, kernel in kernels.items())
    table.add_row("attention", ran or "did not run")
    table.add_row("run", str(folder))
    if checkpoints(folder):
        more = f" max_steps={2 * summary['step']}" if finished else ""
        table.add_row("evaluate", f"python eval.py checkpoint={folder}")
        table.add_row("train on", f"python train.py resume={folder}{more}")
    return table


class Job(NamedTuple):
    """One job of a sweep: its words, how its process ended, its folder (if it came so far)."""

    words: list[str]
    code: int
    folder: Path | None


def sweep_table(jobs: list[Job]) -> Table:
    """One line per job: the words in which the jobs differ, what came out, how it ended."""
    table = Table(
        "job",
        "steps",
        "loss",
        "val perplexity",
        "tokens/s",
        "MFU",
        "peak memory",
        "ended",
        "run",
        box=None,
    )
    endings = {
        0: "well",
        2: "mistake",
        130: "stopped",
        143: "stopped",
        -9: "killed: out of memory?",
    }
    for job in jobs:
        differs = [word for word in job.words if not all(word in other.words for other in jobs)]
        summary = summarize(read_metrics(job.folder)) if job.folder else {}
        table.add_row(
            " ".join(differs or job.words),
            f"{summary.get('step', 0):,}",
            f"{summary['loss']:.4f}" if "loss" in summary else "",
            f"{summary['val_perplexity'][1]:,.1f}" if "val_perplexity" in summary else "",
            f"{summary['tokens_per_second']:,.0f}" if "tokens_per_second" in summary else "",
            f"{summary['mfu']:.1%}" if "mfu" in summary else "",
            summary.get("memory", ""),
            endings.get(job.code, f"failed ({job.code})"),
            str(job.folder or ""),
        )
    return table


def duration(seconds: float) -> str:
    """Seconds as a person says them."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return (
        f"{hours} h {minutes} min"
        if hours
        else f"{minutes} min {rest} s"
        if minutes
        else f"{seconds:.1f} s"
    )
