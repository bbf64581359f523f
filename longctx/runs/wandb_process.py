"""The process that copies a run or an evaluation to Weights & Biases (see tracking.py).

It follows metrics.jsonl, which has every row, so its parent sends only uploads and the end. If
wandb fails, a line on stdout says why, and everything is copied once more: offline.
"""

from __future__ import annotations

import json
import logging
import math
import os
import secrets
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from threading import Thread
from typing import Any, NoReturn

from longctx import system
from longctx.config.train_config import WandbConfig
from longctx.runs import metrics, metrics_file
from longctx.runs.metrics import BY_POSITION, SAMPLE, Row

RUN_ID = "run-id"  # file in a run's wandb/ with its id at the server, once it has gone online
AGAIN = "again"  # the argument of the second attempt
PAUSE = 0.2  # seconds between two looks for new rows
ANSWERS = 30.0  # seconds in which the server must answer
LASTS = 600.0  # seconds that this process may still send after the end of its parent
TABLE_ROWS = 1000  # rows of an evaluation's table; its JSON has all of them
Commands = Iterator[dict[str, Any]]


def main(is_second: bool) -> NoReturn:
    """Copy the run or evaluation in the first line on stdin, until the parent finishes or ends."""
    # A launcher sends signals to the whole job; the run alone decides what they mean
    for number in system.SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    commands = follow_stdin()
    request = next(commands)
    Thread(target=end_after, args=(request["parent"],), daemon=True).start()
    # wandb records the command of the run instead of the command of this process
    sys.argv = request["argv"]
    send = send_evaluation if "content" in request else send_run
    try:
        send(request | ({"mode": "offline"} if is_second else {}), commands)
    except BaseException as error:  # wandb's own errors, the network's, the disk's
        reason = (" ".join(str(error).split()) or type(error).__name__)[:500]
        if is_second:
            print(f"wandb is off: {reason}; metrics.jsonl has every row", flush=True)
            os._exit(1)
        copy_again_offline(Path(request["folder"]), request["earlier"], reason)
    # The interpreter's own end would wait for a core that is gone or stopped
    os._exit(0)


def copy_again_offline(folder: Path, earlier: list[str], reason: str) -> NoReturn:
    """Print `reason` and replace this process by a second attempt, which copies all rows."""
    # The next copy has all rows of this one, so `wandb sync` must not find both
    for leftover in offline_runs(folder):
        if leftover.name not in earlier:
            shutil.rmtree(leftover, ignore_errors=True)
    uploads = f"wandb sync {folder / 'wandb'}/offline-run-*"
    print(f"wandb      {reason}; all is copied offline; upload: {uploads}", flush=True)
    environment = system.child_environment()
    environment.pop("WANDB_SERVICE", None)  # the core of the first attempt, which may be gone
    command = system.python_command("longctx.runs.wandb_process", AGAIN)
    os.execve(command[0], command, environment)


def follow_stdin() -> Commands:
    """Yield the commands in the file on stdin; {} after PAUSE seconds without a new one.

    The parent appends to the file. After the parent's end comes {"finish": 1}.
    """
    position, parent = 0, 0
    while True:
        is_orphan = parent not in (0, os.getppid())
        # Only whole lines: the parent may be writing the last one
        size = os.fstat(0).st_size
        *lines, _ = os.pread(0, size - position, position).split(b"\n")
        for line in lines:
            position += len(line) + 1
            command = json.loads(line)
            parent = command.get("parent", parent)
            yield command
        if is_orphan:
            yield {"finish": 1}
        if not lines:
            time.sleep(PAUSE)
            yield {}


def end_after(parent: int) -> None:
    """End this process LASTS seconds after its parent, even if wandb hangs."""
    while os.getppid() == parent:
        time.sleep(PAUSE)
    system.exit_within(LASTS, 1)


def send_run(request: dict[str, Any], commands: Commands) -> None:
    """Send the rows of a run: online to the run at wandb that its first start began; offline to a
    new run for each start, all in one group.
    """
    config, folder = WandbConfig(**request["config"]), Path(request["folder"])
    leg, name, group = len(request["earlier"]) + 1, folder.name, config.group
    if request["mode"] == "offline":
        group = group or name
        identity: dict[str, Any] = {"name": name if leg == 1 else f"{name}-leg{leg}"}
    else:
        identity = {"name": name, "id": run_id(folder), "resume": "allow"}
    about = {"config": request["facts"] | {"leg": leg}, "group": group, "job_type": config.job_type}
    run = init(config, folder, request["mode"], **about, **identity)
    tail, rows_before = metrics_file.Tail(folder), request["rows_before"]
    tables: dict[str, list[list[Any]]] = {BY_POSITION: [], SAMPLE: []}
    for command in commands:
        # Reading rows after the command sends all rows that came before the end
        for row in tail.rows():
            media = extend_tables(tables, row)
            # Rows of earlier starts are at wandb already; only the tables show them again
            if rows_before > 0:
                rows_before -= 1
                continue
            numbers = {key: math.nan if x is None else x for key, x in row.items() if key != SAMPLE}
            run.log(numbers | media)
        if "checkpoint" in command:
            upload(run, Path(command["checkpoint"]), command["step"])
        if "finish" in command:
            run.finish(exit_code=command["finish"])
            return


def extend_tables(tables: dict[str, list[list[Any]]], row: Row) -> dict[str, Any]:
    """Add a row's losses by position and its sample to `tables`, which hold all of them so far;
    return the tables that have grown, as wandb's.
    """
    import wandb

    tokens, media = row["tokens_seen"], dict[str, Any]()
    losses = [
        [tokens, int(key.removeprefix(f"{BY_POSITION}/")), value]
        for key, value in row.items()
        if key.startswith(f"{BY_POSITION}/") and value is not None
    ]
    if losses:
        tables[BY_POSITION] += losses
        title = "loss by position, a line per validation"
        axes = ("tokens seen", "tokens before", "loss")
        media["loss_by_position"] = plot(axes, tables[BY_POSITION], title)
    if SAMPLE in row:
        tables[SAMPLE].append([tokens, row[SAMPLE]])
        columns: list[str | int] = ["tokens seen", "text"]
        media["samples"] = wandb.Table(columns, data=list(tables[SAMPLE]))
    return media


def upload(run: Any, path: Path, step: int) -> None:
    """Upload a checkpoint, unless a newer one has replaced it by now."""
    import wandb

    artifact = wandb.Artifact(run.id, type="model", metadata={"step": step})
    try:
        artifact.add_dir(str(path), name=path.name)
    except (OSError, ValueError):
        if path.exists():
            raise
        return
    run.log_artifact(artifact, aliases=["latest", f"step-{step}"])


def offline_runs(folder: Path) -> list[Path]:
    """Return the copies that were written offline, one for each start of the run in `folder`."""
    return sorted((folder / "wandb").glob("offline-run-*"))


def run_id(folder: Path) -> str:
    """Return the id of this run at the server, from a file so that a resumed run continues its
    curves. In a sweep, `wandb agent` has chosen it.
    """
    file = folder / "wandb" / RUN_ID
    if not file.exists():
        file.parent.mkdir(exist_ok=True)
        chosen = os.environ.get("WANDB_RUN_ID") if "WANDB_SWEEP_ID" in os.environ else None
        file.write_text(chosen or f"{folder.name[:100]}-{secrets.token_hex(3)}")
    return file.read_text()


def init(settings: WandbConfig, folder: Path, mode: str, **about: Any) -> Any:
    """Begin a run at wandb, silently, for the run in `folder`, and define its metrics."""
    import wandb

    logging.getLogger("wandb").setLevel(logging.ERROR)
    run = wandb.init(
        project=settings.project,
        entity=settings.entity,
        tags=settings.tags,
        notes=settings.notes,
        dir=str(folder),
        mode=mode,  # type: ignore[arg-type]
        allow_val_change=True,  # a resumed run may be longer than it was
        settings=wandb.Settings(
            program=sys.argv[0],
            init_timeout=ANSWERS,
            # One line of the tracker replaces everything that wandb would print
            silent=True,
            console="off",
            quiet=True,
            show_errors=False,
        ),
        **about,
    )
    define_metrics(run)
    return run


def define_metrics(run: Any) -> None:
    """Draw every metric over tokens_seen; keep the last and the best of some in the summary."""
    # Runs of different batch sizes are compared by tokens instead of by steps
    run.define_metric("tokens_seen", hidden=True)
    for metric in metrics.METRICS:
        if metric.key == "tokens_seen":
            continue
        if metric.hidden:
            run.define_metric(metric.key, step_metric="tokens_seen", hidden=True)
        elif metric.summary is not None:
            summary = f"{metric.summary},last"
            run.define_metric(metric.key, step_metric="tokens_seen", summary=summary)
    run.define_metric("*", step_metric="tokens_seen")


def plot(columns: tuple[str, str, str], rows: list[list[Any]], title: str) -> Any:
    """Return wandb's plot of the third column over the second, with a line for each value of the
    first, and its table.
    """
    import wandb

    table = wandb.Table(columns=list(columns), data=[[str(row[0]), *row[1:]] for row in rows])
    return wandb.plot.line(table, columns[1], columns[2], stroke=columns[0], title=title)


def send_evaluation(request: dict[str, Any], _: Commands) -> None:
    """Send one evaluation, as a run of its own."""
    import wandb

    config, content, name = WandbConfig(**request["config"]), request["content"], request["run"]
    about = {
        "config": {
            key: value
            for key, value in content.items()
            if isinstance(value, str | int | float | None)
        },
        "name": f"{name}-eval",
        "group": config.group or name,
        "job_type": "eval",
    }
    run = init(config, Path(request["folder"]), request["mode"], **about)
    picture = request["picture"]
    media: dict[str, Any] = {} if picture is None else {"eval/picture": wandb.Image(picture)}
    for key, axis in (("position", "first"), ("context", "context")):
        if rows := content.get(f"by_{key}"):
            points = [[name, row[axis], row["loss"]] for row in rows]
            columns = ("run", f"tokens of {key}", "loss")
            media[f"eval/loss_by_{key}"] = plot(columns, points, f"loss by {key}")
    for key in ("gains", "documents"):
        if isinstance(content.get(key), list) and (rows := content[key][:TABLE_ROWS]):
            cells = [list(row.values()) for row in rows]
            media[f"eval/{key}"] = wandb.Table(columns=list(rows[0]), data=cells)
    run.log(numbers_of(content) | media)
    run.finish()


def numbers_of(content: dict[str, Any]) -> dict[str, float]:
    """Return the numbers of an evaluation: perplexities, shares of facts found, task scores."""
    numbers: dict[str, Any] = {f"eval/{key}": x for key, x in content.get("total", {}).items()}
    for kind, grid in content.get("kinds", {}).items():
        for length, shares in zip(grid["lengths"], grid["accuracy"], strict=True):
            numbers[f"eval/{kind}/{length}"] = fmean(shares)
    ruler = content.get("ruler", {})
    for task, scores in ruler.get("scores", {}).items():
        for length, score in zip(ruler["lengths"], scores, strict=True):
            numbers[f"eval/ruler/{task}/{length}"] = score
    for task, values in content.get("results", {}).items():
        for key, value in values.items():
            numbers[f"eval/{task}/{key.removesuffix(',none')}"] = value
    return {key: x for key, x in numbers.items() if isinstance(x, int | float)}


if __name__ == "__main__":
    main(is_second=AGAIN in sys.argv)
