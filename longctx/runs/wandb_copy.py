"""The copy of a run or an evaluation at Weights & Biases, in a process of its own.

If its server does not take the run, a line says why, and the copy is offline.
"""

from __future__ import annotations

import logging
import math
import netrc
import os
import secrets
import sys
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

from longctx.config.train_config import WandbConfig
from longctx.files import one_line
from longctx.runs import metrics
from longctx.runs.evaluations import scores
from longctx.runs.metrics import SAMPLE
from longctx.runs.tracking import Commands, follow, report

RUN_ID = "run-id"  # file in a run's wandb/ with its id at the server, once it has gone online
ANSWERS = 30.0  # seconds in which the server must answer
TABLE_ROWS = 1000  # of an evaluation's table; its JSON has all of them
HOSTS = ("api.wandb.ai", "api.forge.coreweave.com")  # names that `wandb login` writes to .netrc


def opening(config: WandbConfig, folder: Path) -> list[str]:
    """Return lines that show the user the target of the copy; none if wandb is disabled."""
    mode = wandb_mode(config)
    if mode == "disabled":
        return []
    entity = config.entity or os.environ.get("WANDB_ENTITY") or "your default entity"
    if config.mode != "offline" and not _has_key():
        mode = "offline (no API key, which `wandb login` sets)"
    lines = [f"{mode}: records for {entity}/{config.project}"]
    if mode != "online":
        folder = folder / "wandb"
        lines += [f"look: wandb leet {folder}; upload: wandb sync {folder}/offline-run-*"]
    return lines


def copy(request: dict[str, Any], commands: Commands) -> None:
    """Copy the run or the evaluation of `request`, until `commands` end."""
    request["mode"] = wandb_mode(WandbConfig(**request["config"]))
    send = send_evaluation if "content" in request else send_run
    send(request, commands)


def send_run(request: dict[str, Any], commands: Commands) -> None:
    """Send the records of a run: online to the run at wandb that its first start began; offline to
    a new run for each start, all in one group.
    """
    import wandb

    folder, before = Path(request["folder"]), request["records_before"]
    mode = request["mode"] if _has_key() else "offline"  # as the first lines say
    try:
        run = begin(request, mode)
    except Exception as error:  # wandb's own errors, the network's
        if mode == "offline":
            raise
        uploads = f"wandb sync {folder}/wandb/offline-run-*"
        report(f"wandb      {one_line(error)[:500]}; all is copied offline; upload: {uploads}")
        run = begin(request, "offline")
    samples = list[list[Any]]()
    for record in follow(request, commands):
        before -= 1
        media = {}
        if SAMPLE in record:
            samples.append([record["tokens_seen"], record.pop(SAMPLE)])
            media = {"samples": wandb.Table(["tokens seen", "text"], data=list(samples))}
        # Records of earlier starts are at wandb already; only the table shows them again
        if before < 0:
            run.log({key: math.nan if x is None else x for key, x in record.items()} | media)
    run.finish(exit_code=request["exit_code"])


def begin(request: dict[str, Any], mode: str) -> Any:
    """Begin the run of `request` at wandb, or continue it there."""
    config, folder = WandbConfig(**request["config"]), Path(request["folder"])
    leg = 1 + len([*folder.glob("wandb/offline-run-*")])  # one of each start of the run
    about = {"job_type": config.job_type, "group": config.group, "name": folder.name}
    if mode != "offline":
        about |= {"id": run_id(folder), "resume": "allow"}
    else:
        about["group"] = config.group or folder.name
        about["name"] = folder.name if leg == 1 else f"{folder.name}-leg{leg}"
    return init(config, folder, mode, config=request["metadata"] | {"leg": leg}, **about)


def wandb_mode(config: WandbConfig) -> str:
    """Return online, offline or disabled: as configured, else by WANDB_MODE, else by whether there
    is an API key.
    """
    mode = config.mode if config.mode != "auto" else os.environ.get("WANDB_MODE", "auto")
    is_known = mode in ("disabled", "offline", "online")
    return mode if is_known else "online" if _has_key() else "offline"


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


def send_evaluation(request: dict[str, Any], _: Commands) -> None:
    """Send one evaluation, as a run of its own."""
    import wandb

    config, content, name = WandbConfig(**request["config"]), request["content"], request["run"]
    plain = {key: x for key, x in content.items() if isinstance(x, str | int | float | None)}
    about = {"name": f"{name}-eval", "group": config.group or name, "job_type": "eval"}
    run = init(config, Path(request["folder"]), request["mode"], config=plain, **about)
    row: dict[str, Any] = {f"eval/{key}": x for key, x in scores(content).items()}
    documents = content.get("documents")
    # Of tasks, "documents" is the limit that was asked for
    if isinstance(documents, list) and documents:
        cells = [list(document.values()) for document in documents[:TABLE_ROWS]]
        row["eval/documents"] = wandb.Table(columns=list(documents[0]), data=cells)
    run.log(row)
    run.finish()
