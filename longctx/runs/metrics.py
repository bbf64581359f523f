"""The table of metrics: their names, formats and the views that show them.

One line of `METRICS` is a key of metrics.jsonl. The console, the closing table, `compare` and
its page, the metric definitions at wandb and the wandb workspace all read this table, so a new
metric is one more line here, next to the code that computes it. The key `facts_found/*` covers all
keys that begin with `facts_found/`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from enum import Flag, auto
from statistics import median
from typing import Any, Literal, NamedTuple

Record = dict[str, Any]  # of metrics.jsonl

BY_POSITION = "val_loss_by_position"  # key/N: loss of targets with N to 2N - 1 tokens before them
FACTS_FOUND = "facts_found"  # key/kind/N: share of pass keys found in texts of N tokens
SAMPLE = "sample"  # a sample of the model, in a record of its own


class Shown(Flag):
    """Views that show a metric; wandb has a panel for each that is not `hidden`."""

    NOWHERE = 0
    CONSOLE = auto()  # the bar or line of a run that trains
    CLOSING = auto()  # the tables at the end of a run and of a sweep
    COMPARE = auto()  # the table of results
    CURVE = auto()  # the page of `compare`, over tokens or time
    CONTEXT = auto()  # the page and the wandb workspace, over the context length


TABLES = Shown.CLOSING | Shown.COMPARE
ALL = Shown.CONSOLE | TABLES
CURVE = Shown.CURVE
CONTEXT = Shown.CONTEXT
EVERYWHERE = ALL | CURVE | CONTEXT


def duration(seconds: float) -> str:
    """Write seconds for a reader: 3.2 s, 1 min 15 s, 1 h 1 min."""
    minutes, remainder = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {remainder} s" if minutes else f"{seconds:.1f} s"


class Metric(NamedTuple):
    """One metric: `of_run` selects the number for a whole run, `better` the better of two runs.

    For a metric that is `hidden`, wandb makes no panel of its own.
    """

    key: str
    label: str
    spec: str | Callable[[Any], str] = ".4g"  # a format specification, or a function
    unit: str = ""
    shown: Shown = Shown.NOWHERE
    better: Literal["min", "max"] | None = None
    of_run: Literal["last", "median", "max"] = "last"
    hidden: bool = False

    @property
    def heading(self) -> str:
        """Return the name for a column or a chart."""
        return f"{self.label} ({self.unit})" if self.unit else self.label

    @property
    def summary(self) -> Literal["min", "max"] | None:
        """Return the extreme that wandb keeps for a run: its peak, or its best."""
        return "max" if self.of_run == "max" else self.better

    @property
    def prefix(self) -> str | None:
        """Return the beginning of a family's keys; None for a single key."""
        return self.key[:-1] if self.key.endswith("/*") else None

    def format(self, value: Any) -> str:
        """Write the value without its unit."""
        return format(value, self.spec) if isinstance(self.spec, str) else self.spec(value)

    def text(self, value: Any) -> str:
        """Write the value with its unit; null in metrics.jsonl is a number that is not finite."""
        number = self.format(math.nan if value is None else value)
        return f"{number} {self.unit}" if self.unit else number


def preferences(prefix: str, word: str) -> Iterator[Metric]:
    """Yield the metrics of answers that are preferred, named as TRL names them."""
    yield Metric(
        f"{prefix}rewards/accuracies", f"{word}accuracy", ".1%", shown=ALL | CURVE, better="max"
    )
    for key, label, view in (
        ("rewards/margins", "margin", Shown.CONSOLE | CURVE),
        ("rewards/chosen", "chosen reward", Shown.NOWHERE),
        ("rewards/rejected", "rejected reward", Shown.NOWHERE),
        ("logps/chosen", "chosen log p", Shown.NOWHERE),
        ("logps/rejected", "rejected log p", Shown.NOWHERE),
        ("kl", "KL from the reference", CURVE),
    ):
        yield Metric(f"{prefix}{key}", f"{word}{label}", ".3f", shown=view)


METRICS: tuple[Metric, ...] = (
    # Progress
    Metric("step", "steps", ",", shown=TABLES),
    Metric("tokens_seen", "tokens", ",", shown=TABLES, hidden=True),
    Metric("seconds", "time", duration, shown=Shown.CLOSING),
    Metric("device_seconds", "seconds of all devices", ",.0f", hidden=True),
    Metric("epoch", "epoch"),
    # Learning
    Metric("loss", "loss", ".4f", "", ALL | CURVE, "min"),
    Metric("loss_spikes", "loss spikes", ",", "", ALL),
    Metric("val_loss", "val loss", ".4f", "", Shown.CONSOLE | CONTEXT, "min"),
    Metric("val_loss_error", "±", ".4f", shown=Shown.CONSOLE),
    Metric("val_perplexity", "val perplexity", ",.2f", "", ALL | CURVE, "min"),
    Metric("grad_norm", "gradient norm", ".3g", "", CURVE),
    # Preferences
    *preferences("", ""),
    *preferences("val_", "val "),
    Metric("z_loss", "z-loss", ".3f"),
    Metric("aux_loss", "balancing loss", ".3f"),
    Metric("expert_load", "busiest expert", ".2f"),
    Metric("lr", "learning rate", ".3g", "", CURVE),
    # Speed: the first step compiles, so a run shows medians
    Metric("tokens_per_second", "speed", ",.0f", "tokens/s", EVERYWHERE, "max", "median"),
    Metric("ms_per_step", "time per step", ",.0f", "ms/step", Shown.CONSOLE, None, "median"),
    Metric("mfu", "MFU", ".1%", "", ALL | CURVE, "max", "median"),
    # Several devices
    Metric(
        "tokens_per_second_per_device",
        "speed of a device",
        ",.0f",
        "tokens/s/device",
        ALL,
        "max",
        "median",
    ),
    Metric(
        "communication_ms", "communication", ",.0f", "ms/step communicating", ALL, "min", "median"
    ),
    # Parts of a step
    Metric("forward_ms", "forward", unit="ms", of_run="median"),
    Metric("backward_ms", "backward", unit="ms", of_run="median"),
    Metric("optimizer_ms", "optimizer", unit="ms", of_run="median"),
    Metric("data_wait_ms", "data wait", unit="ms", of_run="median"),
    Metric("padding_share", "padding", ".1%"),
    # Memory: of the GPU, or of the process on a CPU
    Metric("memory_peak_gib", "peak memory", ".2f", "GiB", EVERYWHERE, "min", "max"),
    Metric("memory_reserved_gib", "reserved memory", unit="GiB", of_run="max"),
    Metric("memory_predicted_gib", "predicted memory", ".2f", "GiB", TABLES, None, "max"),
    Metric(
        "process_peak_gib", "peak memory", ".2f", "GiB of the process", EVERYWHERE, "min", "max"
    ),
    # Context. longctx.training.context_check writes its record before the first step
    Metric("context_check/*", "context.check:", hidden=True),
    Metric(f"{BY_POSITION}/*", "val loss at", ".4f", hidden=True),
    # No label: the kind and the length are enough, as in "needle at 4096"
    Metric(f"{FACTS_FOUND}/*", "", ".0%", "", Shown.CONSOLE),
)


def is_step(record: Record) -> bool:
    """Return True if a record is of training steps, not of a validation."""
    return "ms_per_step" in record


def shown(view: Shown) -> list[Metric]:
    """Return the metrics that `view` shows, without families."""
    return [metric for metric in METRICS if metric.shown & view and metric.prefix is None]


def present(record: Record, view: Shown) -> Iterator[tuple[Metric, str, float]]:
    """Yield metric, label and value of every number of a record that `view` shows, in the table's
    order.
    """
    for metric in (x for x in METRICS if x.shown & view):
        prefix = metric.prefix or metric.key
        for key in record if metric.prefix else [prefix]:
            if key.startswith(prefix) and isinstance(record.get(key), int | float):
                member = key.removeprefix(prefix).replace("/", " at ")
                yield metric, f"{metric.label} {member}".strip(), record[key]


def line(record: Record, view: Shown) -> str:
    """Write a record in one line; a number with a unit needs no label."""
    return "  ".join(
        metric.text(value) if metric.unit else f"{label} {metric.text(value)}"
        for metric, label, value in present(record, view)
    )


def values(records: Iterable[Record], key: str) -> list[Any]:
    """Return the values of the records under `key`, null included."""
    return [record[key] for record in records if key in record]


def figures(records: list[Record]) -> Record:
    """Return one number for a whole run of each metric in its records."""
    # The median leaves out the first value: that step compiles and warms up. The last loss of a
    # diverged run is nan.
    result: Record = {}
    held: set[str] = set().union(*records)
    for metric in (x for x in METRICS if x.key in held):
        key, column = metric.key, values(records, metric.key)
        is_median = metric.of_run == "median"
        if metric.of_run == "last":
            result[key] = math.nan if column[-1] is None else column[-1]
        elif numbers := finite((is_median and column[1:]) or column):
            result[key] = median(numbers) if is_median else max(numbers)
    return result


def number(record: Record, key: str, default: float = 0.0) -> float:
    """Return the finite number of a record under `key`, or else `default`."""
    return next(iter(finite([record.get(key)])), default)


def finite(column: Iterable[Any]) -> list[float]:
    """Return the finite numbers among the values."""
    return [value for value in column if isinstance(value, int | float) and math.isfinite(value)]
