"""The process that copies a run or an evaluation to Weights & Biases (see tracking.py). The only
user of wandb but for the workspace.

It follows metrics.jsonl, which has every row, so nothing but uploads and the end is sent to it.
"""

from __future__ import annotations

import json
import logging
import math
import os
import secrets
import signal
import sys
from collections.abc import Iterator
from contextlib import suppress
from itertools import chain
from pathlib import Path
from queue import Empty, SimpleQueue
from statistics import fmean
from threading import Thread
from typing import Any, NoReturn

from longctx import stop_signal
from longctx.config.train_config import WandbConfig
from longctx.runs import metrics, metrics_file
from longctx.runs.metrics import BY_POSITION, SAMPLE, Row
from longctx.stop_signal import exit_within

# Begins the line on stdout with the name of the run's folder at wandb.
BEGUN = "begun "
# File in a run's wandb/ with its id at the server, once it has gone online.
RUN_ID = "run-id"
# Seconds between two looks for new rows.
PAUSE = 0.2
# Seconds that this process may still send after the end of the run.
LASTS = 600.0


def main(file: Path) -> NoReturn:
    """Copy what the request in `file` says, until the command to finish or the parent's end."""
    # A launcher sends signals to the whole job; the run alone decides what they mean.
    for number in stop_signal.SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    code = 0
    try:
        request = json.loads(file.read_text(encoding="utf-8"))
        file.unlink()
        # wandb records the command: the run's own, not the command of this process.
        sys.argv = request["argv"]
        commands = chain(request["commands"], follow_stdin())
        send = {"run": send_run, "eval": send_evaluation}[request["kind"]]
        send(request, commands)
    except BaseException as error:  # wandb's own errors, the network's, the disk's
        with suppress(OSError):
            print(" ".join(str(error).split()) or type(error).__name__, flush=True)
        code = 1
    # wandb's own end may wait for a core that is gone or stopped.
    os._exit(code)


def follow_stdin() -> Iterator[dict[str, Any]]:
    """Yield the commands of the parent, {} whenever there is none for PAUSE seconds."""
    commands: SimpleQueue[dict[str, Any]] = SimpleQueue()

    def read() -> None:
        for line in sys.stdin:
            commands.put(json.loads(line))
        exit_within(LASTS, 1)  # even if wandb hangs
        commands.put({"finish": 1})  # the last one, unless the parent was killed

    Thread(target=read, daemon=True).start()
    while True:
        try:
            yield commands.get(timeout=PAUSE)
        except Empty:
            yield {}


def send_run(request: dict[str, Any], commands: Iterator[dict[str, Any]]) -> None:
    """Send the rows of a run: online to the run at wandb that its first start began; offline to a
    new run for each start, all in one group.
    """
    config = WandbConfig(**request["config"])
    folder = Path(request["folder"])
    leg = len(offline_runs(folder)) + 1
    name = folder.name
    group = config.group
    if request["mode"] == "offline":
        group = group or name
        identity: dict[str, Any] = {"name": name if leg == 1 else f"{name}-leg{leg}"}
    else:
        identity = {"name": name, "id": run_id(folder), "resume": "allow"}
    about = {"config": request["facts"] | {"leg": leg}, "group": group, "job_type": config.job_type}
    run = init(config, folder, request["mode"], **about, **identity)

    tail = metrics_file.Tail(folder)
    rows_before = request["rows_before"]
    points: list[list[Any]] = []
    texts: list[list[Any]] = []
    for command in commands:
        # Reading rows after the command sends all rows that came before the end.
        for row in tail.rows():
            points += positions(row)
            texts += samples(row)
            # Rows of earlier starts are at wandb already; only the tables show them again.
            if rows_before > 0:
                rows_before -= 1
                continue
            shown = {
                key: math.nan if value is None else value
                for key, value in row.items()
                if key != SAMPLE
            }
            shown |= by_position(points) if positions(row) else {}
            run.log(shown | (sample_table(texts) if samples(row) else {}))
        if "checkpoint" in command:
            upload(run, Path(command["checkpoint"]), command["step"])
        if "finish" in command:
            run.finish(exit_code=command["finish"])
            return


def upload(run: Any, path: Path, step: int) -> None:
    """Upload a checkpoint, unless a newer one has replaced it by now."""
    import wandb

    if not path.exists():
        return
    artifact = wandb.Artifact(run.id, type="model", metadata={"step": step})
    add = artifact.add_dir if path.is_dir() else artifact.add_file
    try:
        add(str(path), name=path.name)
    except (OSError, ValueError):
        if path.exists():
            raise
        return  # a newer one replaced it while it was read
    run.log_artifact(artifact, aliases=["latest", f"step-{step}"])


def by_position(points: list[list[Any]]) -> dict[str, Any]:
    """Return the loss by position as a table and a plot, a line for each validation."""
    title = "loss by position, a line per validation"
    return {"loss_by_position": plot(("tokens seen", "tokens before", "loss"), points, title)}


def offline_runs(folder: Path) -> set[Path]:
    """Return the copies that were written offline, one for each start of the run in `folder`."""
    return set((folder / "wandb").glob("offline-run-*"))


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
    # One line of the tracker replaces everything that wandb would print.
    run = wandb.init(
        project=settings.project,
        entity=settings.entity,
        tags=settings.tags,
        notes=settings.notes,
        dir=str(folder),
        mode=mode,  # type: ignore[arg-type]
        allow_val_change=True,  # a resumed run may be longer than it was
        settings=wandb.Settings(
            program=sys.argv[0], silent=True, console="off", quiet=True, show_errors=False
        ),
        **about,
    )
    define_metrics(run)
    print(f"{BEGUN}{Path(run.dir).parent.name}", flush=True)
    return run


def define_metrics(run: Any) -> None:
    """Draw every metric over tokens_seen; keep the last and the best of some in the summary."""
    # Runs of different batch sizes are compared by tokens, not by steps.
    run.define_metric("tokens_seen", hidden=True)
    for metric in metrics.METRICS:
        if metric.key == "tokens_seen":
            continue
        if metric.hidden:
            run.define_metric(metric.key, step_metric="tokens_seen", hidden=True)
        elif metric.summary is not None:
            run.define_metric(
                metric.key, step_metric="tokens_seen", summary=f"{metric.summary},last"
            )
    run.define_metric("*", step_metric="tokens_seen")


def positions(row: Row) -> list[list[Any]]:
    """Return (tokens seen, tokens before, loss) of each bucket in a row of a validation."""
    return [
        [row["tokens_seen"], int(key.removeprefix(f"{BY_POSITION}/")), value]
        for key, value in row.items()
        if key.startswith(f"{BY_POSITION}/") and value is not None
    ]


def samples(row: Row) -> list[list[Any]]:
    """Return (tokens seen, text) of a sample; [] of other rows."""
    return [[row["tokens_seen"], row[SAMPLE]]] if SAMPLE in row else []


def sample_table(texts: list[list[Any]]) -> dict[str, Any]:
    """Return all samples of text so far as a table."""
    import wandb

    return {"samples": wandb.Table(columns=["tokens seen", "text"], data=list(texts))}


def plot(columns: tuple[str, str, str], rows: list[list[Any]], title: str) -> Any:
    """Return wandb's plot of the third column over the second, with a line for each value of the
    first, and its table.
    """
    import wandb

    table = wandb.Table(columns=list(columns), data=[[str(row[0]), *row[1:]] for row in rows])
    return wandb.plot.line(table, columns[1], columns[2], stroke=columns[0], title=title)


def send_evaluation(request: dict[str, Any], commands: Iterator[dict[str, Any]]) -> None:
    """Send one evaluation."""
    import wandb

    config = WandbConfig(**request["config"])
    content = request["content"]
    name = request["run"]
    run = init(
        config,
        Path(request["folder"]),
        request["mode"],
        config={
            key: value
            for key, value in content.items()
            if isinstance(value, str | int | float | None)
        },
        name=f"{name}-eval",
        group=config.group or name,
        job_type="eval",
    )
    # A thousand lines of a table are as many as anybody reads; the JSON has all.
    picture = request["picture"]
    media: dict[str, Any] = {} if picture is None else {"eval/picture": wandb.Image(picture)}
    for key, x in (("position", "first"), ("context", "context")):
        if rows := content.get(f"by_{key}"):
            points = [[name, row[x], row["loss"]] for row in rows]
            media[f"eval/loss_by_{key}"] = plot(
                ("run", f"tokens of {key}", "loss"), points, f"loss by {key}"
            )
    for key in ("gains", "documents"):
        if isinstance(content.get(key), list) and (rows := content[key][:1000]):
            media[f"eval/{key}"] = wandb.Table(
                columns=list(rows[0]), data=[list(row.values()) for row in rows]
            )
    run.log(evaluated(content) | media)
    run.finish()


def evaluated(content: dict[str, Any]) -> dict[str, float]:
    """Return the numbers of an evaluation: perplexities, shares of facts found, task scores."""
    total = {f"eval/{key}": value for key, value in content.get("total", {}).items()}
    facts = {
        f"eval/{kind}/{length}": fmean(shares)
        for kind, grid in content.get("kinds", {}).items()
        for length, shares in zip(grid["lengths"], grid["accuracy"], strict=True)
    }
    ruler = content.get("ruler", {})
    facts |= {
        f"eval/ruler/{task}/{length}": score
        for task, scores in ruler.get("scores", {}).items()
        for length, score in zip(ruler["lengths"], scores, strict=True)
    }
    tasks = {
        f"eval/{task}/{key.removesuffix(',none')}": value
        for task, values in content.get("results", {}).items()
        for key, value in values.items()
    }
    return {key: x for key, x in (total | facts | tasks).items() if isinstance(x, int | float)}


if __name__ == "__main__":
    main(Path(sys.argv[1]))
