"""A recipe of examples/, run by the command of its header: its curve, speed and memory, for
results/examples.
"""

from __future__ import annotations

import os
import re
import shlex
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from matplotlib.figure import Figure

from benchmarks.process_group import ROOT, train
from benchmarks.report import machine, save_figure, write_json
from longctx import cli
from longctx.config.fields import key
from longctx.runs import metrics_file
from longctx.tables import grid

TAKES_TRAINING_KEYS = True
FIELD = re.compile(r"^# (Command|Hardware|Minutes|Memory|Numbers|Then): +(.*)$", re.MULTILINE)
CURVE = ("step", "loss", "tokens_per_second", "ms_per_step", "memory_peak_gib", "lr", "seconds")
MARGINS = "val_rewards/margins"
COLUMNS = ("run", "minutes", "tokens_per_second", "memory_peak_gib", "val_loss")


@dataclass(frozen=True)
class Options:
    """Which recipe; keys of train.py may follow, and replace those of its command."""

    name: str = key("", "of examples/NAME.yaml")
    note: str = key("", "written into the file, such as: random weights")
    runs: str = key("runs/recipes", "folder of the runs")
    out: str = key("results/examples", "folder of NAME.json and NAME.png")


def run(options: Options, command: str, overrides: list[str]) -> None:
    """Run every job of the recipe, write its file and picture; ValueError for an unknown name, or
    where a run fails.
    """
    known = {path.stem: path for path in sorted((ROOT / "examples").glob("*.yaml"))}
    if options.name not in known:
        raise ValueError(f"name={options.name}: no recipe; choose from {', '.join(known)}")
    recipe = known[options.name]
    result: dict[str, Any] = {"command": command, "note": options.note, "versions": machine()}
    result["runs"] = {
        label: trained(label, [*words, f"runs={options.runs}", f"name={label}"])
        for label, words in jobs(recipe, overrides).items()
    }
    out = Path(options.out) / options.name
    write_json(out.with_suffix(".json"), result)
    draw(result["runs"], out.with_suffix(".png"))
    rows = [{"run": label, **one, **one["curve"][-1]} for label, one in result["runs"].items()]
    grid(options.name, COLUMNS, rows)
    print(f"wrote {out}.json, {out}.png")


def header(recipe: Path) -> dict[str, str]:
    """The fields of a recipe's first lines, such as Command and Memory."""
    return dict(FIELD.findall(recipe.read_text()))


def jobs(recipe: Path, overrides: list[str]) -> dict[str, list[str]]:
    """What a run is called → the arguments of train.py, of each run that the recipe's command
    starts. `overrides` take the place of its keys.
    """
    _, _, *words = shlex.split(header(recipe)["Command"])
    is_sweep = words[0] == "-m"
    mine = {word.partition("=")[0] for word in overrides}
    kept = [word for word in words[is_sweep:] if word.partition("=")[0] not in mine]
    started = cli.jobs([*kept, *overrides]) if is_sweep else [[*kept, *overrides]]
    swept = [
        [word.partition("=")[2] for word in one if any(word not in other for other in started)]
        for one in started
    ]
    labels = ["-".join(values) or recipe.stem for values in swept]
    return dict(zip(labels, started, strict=True))


def trained(label: str, words: list[str]) -> dict[str, Any]:
    """What one run measured, in a child process; ValueError where it fails."""
    begun = time.monotonic()
    train(words)
    minutes = (time.monotonic() - begun) / 60
    config = cli.compose("train", words).config
    rows = metrics_file.read(Path(config.runs) / config.name)
    memory = [row.get("memory_peak_gib") or row.get("process_peak_gib", 0.0) for row in rows]
    # The first steps compile
    steady = [row for row in rows if "ms_per_step" in row and row["step"] > rows[-1]["step"] / 3]
    if not steady:
        raise ValueError(f"{label}: it took no step; leave dry_run= out")
    return {
        "command": f"python train.py {shlex.join(words)}",
        "minutes": minutes,
        "processor": f"{os.cpu_count()} CPU cores",
        "tokens_per_second": median(row["tokens_per_second"] for row in steady),
        "memory_peak_gib": max(memory),
        "memory_predicted_gib": steady[-1].get("memory_predicted_gib"),
        "curve": [
            {name: x for name, x in row.items() if name in CURVE or name.startswith("val_")}
            for row in rows
        ],
    }


def draw(runs: dict[str, Any], path: Path) -> None:
    """Draw the losses of the runs over steps; beside them the speeds of several runs, or the
    margins of preferences.
    """
    has_margins = any(MARGINS in row for one in runs.values() for row in one["curve"])
    is_wide = len(runs) > 1 or has_margins
    figure = Figure(figsize=(9 if is_wide else 5.5, 3.6))
    left, *right = figure.subplots(1, 1 + is_wide, squeeze=False)[0]
    for number, (label, one) in enumerate(runs.items()):
        color = f"C{number}"
        left.plot(*points(one, "loss"), color=color, label=label)
        left.plot(*points(one, "val_loss"), "o--", color=color)
        if has_margins:
            right[0].plot(*points(one, MARGINS), "o--", color=color)
        elif is_wide:
            right[0].barh(label, one["tokens_per_second"] / 1000, color=color)
    left.set_xlabel("step")
    left.set_ylabel("loss (dashed: validation)")
    left.legend(frameon=False)
    if has_margins:
        right[0].set_xlabel("step")
        right[0].set_ylabel("margin of held-out pairs, nats")
    elif is_wide:
        right[0].set_xlabel("thousand tokens per second")
    for axis in (left, *right):
        axis.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    save_figure(figure, path)


def points(one: dict[str, Any], name: str) -> tuple[list[int], list[float]]:
    """Steps and values of a column of a run's curve."""
    rows = [row for row in one["curve"] if name in row]
    return [row["step"] for row in rows], [row[name] for row in rows]
