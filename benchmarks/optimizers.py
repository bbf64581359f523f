"""Tokens to the same validation loss with each optimizer, each tuned over the same learning rates.

Each pair of optimizer and rate is one run of train.py: same model, documents, order, schedule and
steps. The best run of an optimizer is the one that ends with the lowest loss. The loss to reach is
the higher of the best runs' last losses, so that every optimizer reaches it; between validations
the loss is interpolated linearly. A finished run in `runs` is read, not repeated: other keys need
another folder.
"""

from __future__ import annotations

import statistics
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.process_group import train
from benchmarks.report import machine, save_figure, write_json
from benchmarks.words import check_unused
from longctx import cli
from longctx.config.fields import key
from longctx.runs import metrics_file
from longctx.tables import grid

TAKES_TRAINING_KEYS = True
TAKEN = {"optimizer": "use optimizers=", "lr": "use rates=", "max_steps": "use steps="} | {
    name: "it is one of the benchmark's own" for name in ("max_tokens", "name", "resume")
}
COLUMNS = (
    "optimizer",
    "lr",
    "last_loss",
    "tokens_to_target",
    "ms_per_step",
    "optimizer_ms",
    "note",
)


@dataclass(frozen=True)
class Options:
    """Which runs; every key of train.py may follow, such as model=124m seq_len=4096."""

    optimizers: tuple[str, ...] = key(("adamw", "muon"), "names that optimizer= may have")
    rates: tuple[float, ...] = key((0.001, 0.002, 0.004), "peak learning rates of each")
    steps: int = key(600, "of each run")
    val_every: int = key(20, "steps between validations")
    runs: str = key("runs/optimizers", "folder of the runs")
    out: str = key("results/optimizers.json", "file of the result; the .png beside")


def run(options: Options, command: str, overrides: list[str]) -> None:
    """Train every pair, print the table and write it; ValueError where no run of one ends well."""
    check_unused(overrides, TAKEN)
    for name in options.optimizers:
        if name not in cli.names("optimizer"):
            known = ", ".join(sorted(cli.names("optimizer")))
            raise ValueError(f"optimizers={name}: choose from {known}")
    pairs = [(name, rate) for name in options.optimizers for rate in options.rates]
    for name, rate in pairs:
        cli.compose("train", of_run(options, name, rate, overrides))
    rows = [trained(options, name, rate, overrides) for name, rate in pairs]
    target = shared_target(rows)
    for row in rows:
        row["tokens_to_target"] = tokens_to(row["validations"], target)
    result = {
        "command": command,
        "versions": machine(),
        "options": asdict(options),
        "target_loss": target,
        "best": {name: best(rows, name) for name in options.optimizers},
        "runs": rows,
    }
    out = Path(options.out)
    write_json(out, result)
    draw(result, out.with_suffix(".png"))
    grid(f"Tokens to a validation loss of {target:.4f}", COLUMNS, rows)
    print(f"{out}, {out.with_suffix('.png')}")


def of_run(options: Options, name: str, rate: float, overrides: list[str]) -> list[str]:
    """The overrides of train.py for one run."""
    own = [f"optimizer={name}", f"lr={rate}", f"name={name}-lr{rate}", f"runs={options.runs}"]
    own += [f"max_steps={options.steps}", f"val_every={options.val_every}", "wandb.mode=disabled"]
    return [*overrides, *own]


def trained(options: Options, name: str, rate: float, overrides: list[str]) -> dict[str, Any]:
    """What one run measured, trained in a child process unless it is there already."""
    folder = Path(options.runs) / f"{name}-lr{rate}"
    row: dict[str, Any] = {"optimizer": name, "lr": rate}
    if not validations(folder, options.steps):
        if code := train(of_run(options, name, rate, overrides), may_fail=True):
            row["note"] = f"failed, exit code {code}"
    else:
        row["note"] = "was there already"
    measured = metrics_file.read(folder)
    row["validations"] = validations(folder, options.steps)
    row["last_loss"] = row["validations"][-1][1] if row["validations"] else None
    for column in ("ms_per_step", "optimizer_ms"):
        later = measured[len(measured) // 4 :]
        values = [x[column] for x in later if x.get(column) is not None]
        row[column] = statistics.median(values) if values else None
    return row


def validations(folder: Path, steps: int) -> list[tuple[int, float]]:
    """Tokens and validation loss of a run, empty unless it has come to its end."""
    rows = [row for row in metrics_file.read(folder) if row.get("val_loss") is not None]
    ended = rows and rows[-1]["step"] == steps
    return [(row["tokens_seen"], row["val_loss"]) for row in rows] if ended else []


def best(rows: list[dict[str, Any]], name: str) -> dict[str, Any]:
    """Rate, last loss and tokens to the target of the run of `name` that ends lowest."""
    ended = [row for row in rows if row["optimizer"] == name and row["validations"]]
    if not ended:
        raise ValueError(f"optimizers={name}: none of its runs ended well; give smaller rates=")
    row = min(ended, key=lambda row: row["last_loss"])
    return {key: row.get(key) for key in ("lr", "last_loss", "tokens_to_target")}


def shared_target(rows: list[dict[str, Any]]) -> float:
    """The loss that the best run of every optimizer reaches: the highest of their last ones."""
    names = dict.fromkeys(row["optimizer"] for row in rows)
    return max(float(best(rows, name)["last_loss"]) for name in names)


def tokens_to(validations: list[tuple[int, float]], target: float) -> float | None:
    """Tokens at which the loss first falls to `target`, on straight lines; None if it does not."""
    before: tuple[int, float] | None = None
    for tokens, loss in validations:
        if loss <= target:
            if before is None or loss == before[1]:
                return float(tokens)
            share = (before[1] - target) / (before[1] - loss)
            return before[0] + share * (tokens - before[0])
        before = tokens, loss
    return None


def draw(result: dict[str, Any], path: Path) -> None:
    """Validation loss over tokens: each optimizer's best run bold, its other rates thin."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, 4.5), layout="constrained")
    axes = figure.subplots()
    for number, (name, chosen) in enumerate(result["best"].items()):
        for row in (row for row in result["runs"] if row["optimizer"] == name):
            is_best = row["lr"] == chosen["lr"]
            points = [(tokens / 1e6, loss) for tokens, loss in row["validations"] if tokens]
            if points:
                axes.plot(
                    *zip(*points, strict=True),
                    color=f"C{number}",
                    linewidth=2 if is_best else 0.7,
                    alpha=1 if is_best else 0.5,
                    label=f"{name}, lr={row['lr']:g}" if is_best else None,
                )
    axes.axhline(result["target_loss"], color="gray", linestyle=":", linewidth=1)
    axes.set(xlabel="million tokens", ylabel="validation loss")
    axes.legend(frameon=False)
    save_figure(figure, path)
