"""The process that sends to Weights & Biases what a run or an evaluation writes to a file (see
tracking.py): its rows, checkpoints and results. The only user of wandb but for the workspace.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from statistics import fmean
from typing import Any, NoReturn

from longctx import stop_signal
from longctx.config.train_config import WandbConfig
from longctx.runs import metrics
from longctx.runs.metrics import BY_POSITION, SAMPLE, Row
from longctx.stop_signal import exit_within

SENT, BEGUN, PROBLEM = "sent.jsonl", "begun", "problem"  # the files of a copy
RUN_ID = "run-id"  # in a run's wandb/: its id at the server, once it has gone online
PAUSE = 0.05  # seconds between two looks for something to send
LASTS = 600.0  # seconds after which a process that still sends ends itself


def main(scratch: Path, mode: str, parent: int) -> NoReturn:
    """Send what a Copy writes to `scratch`, to its end or that of the process `parent`."""
    for number in stop_signal.SIGNALS:  # which the whole job gets; the run decides
        signal.signal(number, signal.SIG_IGN)
    messages = follow(scratch / SENT, parent)
    code = 0
    try:
        request = next(messages)
        sys.argv = request["argv"]  # wandb records it: the run's own command, not this process's
        send = {"run": send_run, "eval": send_evaluation}[request["kind"]]
        send(request, mode, messages, scratch / BEGUN)
    except BaseException as error:  # wandb's own errors, the network's, the disk's
        problem = " ".join(str(error).split()) or type(error).__name__
        with suppress(OSError):
            (scratch / PROBLEM).write_text(problem[:500], encoding="utf-8")
        code = 1
    if code == 0 or os.getppid() != parent:
        shutil.rmtree(scratch, ignore_errors=True)
    os._exit(code)  # wandb's own end may wait for what is gone


def follow(path: Path, parent: int) -> Iterator[dict[str, Any]]:
    """The messages in a file as they come, the last one `finish`."""
    with open(path, encoding="utf-8") as file:
        line = ""
        while True:
            line += file.readline()
            if line.endswith("\n"):
                message = json.loads(line)
                if "finish" in message:
                    exit_within(LASTS, 1)
                yield message
                line = ""
            elif os.getppid() != parent:
                return exit_within(LASTS, 1)
            else:
                time.sleep(PAUSE)


def send_run(
    request: dict[str, Any], mode: str, messages: Iterator[dict[str, Any]], begun: Path
) -> None:
    """Send the rows of a run: online, to the one run at wandb that it began; offline, a new run for
    each leg, in one group.
    """
    config, folder = WandbConfig(**request["config"]), Path(request["folder"])
    leg = len(offline_runs(folder)) + 1
    name, group = folder.name, config.group
    if mode == "offline":
        group = group or name
        identity: dict[str, Any] = {"name": name if leg == 1 else f"{name}-leg{leg}"}
    else:
        identity = {"name": name, "id": run_id(folder), "resume": "allow"}
    about = {"config": request["facts"] | {"leg": leg}, "group": group, "job_type": config.job_type}
    run = init(config, folder, mode, **about, **identity)
    begun.write_text(Path(run.dir).parent.name, encoding="utf-8")
    points, texts, exit_code = request["positions"], request["samples"], 1
    for message in messages:
        if "row" in message:
            row = message["row"]
            points += positions(row)
            texts += samples(row)
            shown = {key: value for key, value in row.items() if key != SAMPLE}
            shown |= by_position(points) if positions(row) else {}
            run.log(shown | (sample_table(texts) if samples(row) else {}))
        elif "checkpoint" in message:
            upload(run, Path(message["checkpoint"]), message["step"])
        else:
            exit_code = message["finish"]
            break
    run.finish(exit_code=exit_code)


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
        return  # replaced while it was read
    run.log_artifact(artifact, aliases=["latest", f"step-{step}"])


def by_position(points: list[list[Any]]) -> dict[str, Any]:
    """Loss by position as a table and a plot, a line for each validation."""
    title = "loss by position, a line per validation"
    return {"loss_by_position": plot(("tokens seen", "tokens before", "loss"), points, title)}


def offline_runs(folder: Path) -> set[Path]:
    """Return the copies that were written offline, one for each start of the run in `folder`."""
    return set((folder / "wandb").glob("offline-run-*"))


def run_id(folder: Path) -> str:
    """The id of this run at the server, in a file so that a resumed run continues its curves.

    In a sweep, `wandb agent` has chosen it.
    """
    file = folder / "wandb" / RUN_ID
    if not file.exists():
        file.parent.mkdir(exist_ok=True)
        chosen = os.environ.get("WANDB_RUN_ID") if "WANDB_SWEEP_ID" in os.environ else None
        file.write_text(chosen or f"{folder.name[:100]}-{secrets.token_hex(3)}")
    return file.read_text()


def init(settings: WandbConfig, folder: Path, mode: str, **about: Any) -> Any:
    """wandb.init, silent, for a run in `folder`, with the definitions of its metrics."""
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
            program=sys.argv[0], silent=True, console="off", quiet=True, show_errors=False
        ),
        **about,
    )
    define_metrics(run)
    return run


def define_metrics(run: Any) -> None:
    """Every metric over tokens_seen, with the last and the best value of some in the summary."""
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
    """(tokens seen, tokens before, loss) for each bucket of a validation; [] for other rows."""
    return [
        [row["tokens_seen"], int(key.removeprefix(f"{BY_POSITION}/")), value]
        for key, value in row.items()
        if key.startswith(f"{BY_POSITION}/") and value is not None
    ]


def samples(row: Row) -> list[list[Any]]:
    """(tokens seen, text) of a sample; [] for other rows."""
    return [[row["tokens_seen"], row[SAMPLE]]] if SAMPLE in row else []


def sample_table(texts: list[list[Any]]) -> dict[str, Any]:
    """All samples of text so far, as a table."""
    import wandb

    return {"samples": wandb.Table(columns=["tokens seen", "text"], data=list(texts))}


def plot(columns: tuple[str, str, str], rows: list[list[Any]], title: str) -> Any:
    """wandb's plot of the third column over the second, a line for each value of the first, and the
    table of all three.
    """
    import wandb

    table = wandb.Table(columns=list(columns), data=[[str(row[0]), *row[1:]] for row in rows])
    return wandb.plot.line(table, columns[1], columns[2], stroke=columns[0], title=title)


def send_evaluation(
    request: dict[str, Any], mode: str, messages: Iterator[dict[str, Any]], begun: Path
) -> None:
    """Send one evaluation."""
    import wandb

    config, content, name = WandbConfig(**request["config"]), request["content"], request["run"]
    run = init(
        config,
        Path(request["folder"]),
        mode,
        config={
            key: value
            for key, value in content.items()
            if isinstance(value, str | int | float | None)
        },
        name=f"{name}-eval",
        group=config.group or name,
        job_type="eval",
    )
    begun.write_text(Path(run.dir).parent.name, encoding="utf-8")
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
    """The numbers of an evaluation's JSON: perplexities, shares of facts found, scores of tasks."""
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
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
