"""The copy of a run or an evaluation at Weights & Biases, in a process of its own.

If wandb fails, a line says why, and everything is copied once more: offline.
"""

from __future__ import annotations

import logging
import math
import netrc
import os
import secrets
import shutil
import sys
from pathlib import Path
from statistics import fmean
from typing import Any, NoReturn
from urllib.parse import urlparse

from longctx import system
from longctx.config.train_config import WandbConfig
from longctx.files import one_line
from longctx.runs import metrics, metrics_file
from longctx.runs.metrics import BY_POSITION, SAMPLE, Row
from longctx.runs.tracking import Commands, report

RUN_ID = "run-id"  # file in a run's wandb/ with its id at the server, once it has gone online
AGAIN = "again"  # the argument of the second attempt
ANSWERS = 30.0  # seconds in which the server must answer
TABLE_ROWS = 1000  # rows of an evaluation's table; its JSON has all of them
HOSTS = ("api.wandb.ai", "api.forge.coreweave.com")  # names that `wandb login` writes to .netrc


def opening(config: WandbConfig, folder: Path) -> list[str]:
    """Return lines that show the user the target of the copy; none if wandb is disabled.

    The config.yaml of a resumed run may have decided it.
    """
    mode = wandb_mode(config)
    if mode == "disabled":
        return []
    entity = config.entity or os.environ.get("WANDB_ENTITY") or "your default entity"
    content = "rows and checkpoints" if config.artifacts else "rows"
    lines = [f"{mode}: {content} for {entity}/{config.project}"]
    if config.mode != "offline" and not _has_key():
        lines.append("no API key, which `wandb login` sets: all is copied offline")
    if mode == "offline":
        folder = folder / "wandb"
        lines += [f"look: wandb leet {folder}", f"upload: wandb sync {folder}/offline-run-*"]
    return lines


def copy(request: dict[str, Any], commands: Commands) -> None:
    """Copy the run or the evaluation of `request`, until `commands` end."""
    is_second = AGAIN in request["arguments"]
    mode = "offline" if is_second else wandb_mode(WandbConfig(**request["config"]))
    send = send_evaluation if "content" in request else send_run
    earlier = [path.name for path in offline_runs(Path(request["folder"]))]
    try:
        send(request | {"mode": mode, "earlier": earlier}, commands)
    except BaseException as error:  # wandb's own errors, the network's, the disk's
        if is_second:
            raise
        copy_again_offline(Path(request["folder"]), earlier, one_line(error)[:500])


def copy_again_offline(folder: Path, earlier: list[str], reason: str) -> NoReturn:
    """Print `reason` and replace this process by a second attempt, which copies all rows."""
    # The next copy has all rows of this one, so `wandb sync` must not find both
    for leftover in offline_runs(folder):
        if leftover.name not in earlier:
            shutil.rmtree(leftover, ignore_errors=True)
    uploads = f"wandb sync {folder / 'wandb'}/offline-run-*"
    report(f"wandb      {reason}; all is copied offline; upload: {uploads}")
    environment = system.child_environment()
    environment.pop("WANDB_SERVICE", None)  # the core of the first attempt, which may be gone
    command = system.python_command("longctx.runs.tracking", "wandb", AGAIN)
    os.execve(command[0], command, environment)


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
    identity |= {"group": group, "job_type": config.job_type}
    metadata = request["metadata"] | {"leg": leg}
    run = init(config, folder, request["mode"], config=metadata, **identity)
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
        [tokens, int(key.rpartition("/")[2]), value]
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


def wandb_mode(config: WandbConfig) -> str:
    """Return online, offline or disabled: as configured, else by WANDB_MODE, else by whether there
    is an API key.
    """
    mode = config.mode if config.mode != "auto" else os.environ.get("WANDB_MODE", "auto")
    if mode in ("disabled", "offline", "online"):
        return mode
    return "online" if _has_key() else "offline"


def _has_key() -> bool:
    """Return True if wandb would find an API key, in the environment or in .netrc."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    host = urlparse(os.environ.get("WANDB_BASE_URL", "")).hostname
    file = Path(os.environ.get("NETRC", "~/.netrc")).expanduser()
    try:
        logins = netrc.netrc(file)
    except (OSError, netrc.NetrcParseError):
        return False
    return any(logins.authenticators(name) is not None for name in ([host] if host else HOSTS))


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
        if metric.key != "tokens_seen" and (metric.hidden or metric.summary):
            shown = {"hidden": True} if metric.hidden else {"summary": f"{metric.summary},last"}
            run.define_metric(metric.key, step_metric="tokens_seen", **shown)
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
    plain = {key: x for key, x in content.items() if isinstance(x, str | int | float | None)}
    about = {"name": f"{name}-eval", "group": config.group or name, "job_type": "eval"}
    run = init(config, Path(request["folder"]), request["mode"], config=plain, **about)
    picture = request["picture"]
    media: dict[str, Any] = {} if picture is None else {"eval/picture": wandb.Image(picture)}
    for key, axis in (("position", "first"), ("context", "context")):
        if rows := content.get(f"by_{key}"):
            points = [[name, row[axis], row["loss"]] for row in rows]
            columns = ("run", f"tokens of {key}", "loss")
            media[f"eval/loss_by_{key}"] = plot(columns, points, f"loss by {key}")
    documents = content.get("documents")
    # Of tasks, "documents" is the limit that was asked for
    if isinstance(documents, list) and documents:
        cells = [list(row.values()) for row in documents[:TABLE_ROWS]]
        media["eval/documents"] = wandb.Table(columns=list(documents[0]), data=cells)
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
