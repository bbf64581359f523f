"""Tracking: metrics.jsonl, the truth, and Weights & Biases, a copy. The only user of wandb.

A row of metrics.jsonl is a row at wandb, drawn over `tokens_seen`. A table or plot is sent with the
row that it shows. wandb is imported when a run first needs it, for that takes a second.
"""

from __future__ import annotations

import json
import logging
import math
import netrc
import os
import secrets
import subprocess
from contextlib import suppress
from pathlib import Path
from statistics import fmean
from typing import Any
from urllib.parse import urlparse

from longctx.config.train_config import WandbConfig
from longctx.runs import metrics, run_folder
from longctx.runs.metrics import BY_POSITION, Row

HOSTS = ("api.wandb.ai", "api.forge.coreweave.com")  # in .netrc: `wandb login` wrote either


class Tracker:
    """Appends rows to metrics.jsonl in `folder` and, from `start_wandb` on, sends the same rows to
    wandb.
    """

    def __init__(self, folder: Path, config: WandbConfig) -> None:
        self.folder, self.config = folder, config
        self.mode: Any = wandb_mode(config)
        path = folder / "metrics.jsonl"
        self._file = open(path, "a", encoding="utf-8")  # noqa: SIM115 (`finish` closes it)
        self._waiting: list[Row] = []
        earlier = run_folder.read_metrics(folder) if path.is_file() else []
        self._positions = [point for row in earlier for point in positions(row)]
        self._run: Any = None

    def log(self, row: Row) -> None:
        """Record one row, `step` and `tokens_seen` among its keys; null in the file stands for what
        is no finite number.
        """
        finite = {
            key: None if isinstance(x, float) and not math.isfinite(x) else x
            for key, x in row.items()
        }
        try:
            self._file.write(json.dumps(finite, allow_nan=False) + "\n")
            self._file.flush()
        except OSError as error:
            raise OSError(f"{self._file.name}: cannot be written: {error.strerror}") from error
        self._positions += positions(row)
        if self._run is not None:
            self._run.log(row | self._media(row))
        elif self.mode != "disabled":
            self._waiting.append(row)

    def start_wandb(self, facts: dict[str, Any]) -> str | None:
        """Begin the copy at wandb, configured as `facts`; returns what went wrong, because that
        does not end a run.

        Called after the first step: wandb takes a second to start, on a slow network many, and
        has nothing to show until then.
        """
        if self.mode == "disabled" or self._run is not None:
            return None
        try:
            self._run = self._init_wandb(facts)
        except Exception as error:  # wandb's own errors, the network's, the disk's
            self.mode = "disabled"
            return f"wandb is off: {' '.join(str(error).split())}"
        for row in self._waiting:
            self._run.log(row | self._media(row))
        self._waiting.clear()
        return None

    def checkpoint(self, path: Path, step: int) -> None:
        """Upload a checkpoint, with wandb.artifacts=true."""
        if self._run is None or not self.config.artifacts:
            return
        import wandb

        artifact = wandb.Artifact(self._run.id, type="model", metadata={"step": step})
        add = artifact.add_dir if path.is_dir() else artifact.add_file
        add(str(path), name=path.name)
        self._run.log_artifact(artifact, aliases=["latest", f"step-{step}"])

    def finish(self, exit_code: int) -> None:
        """Close the file, and wandb once it has everything."""
        with suppress(OSError):  # `log` has raised it already
            self._file.close()
        if self._run is not None:
            self._run.finish(exit_code=exit_code)

    def how_to_look(self) -> str | None:
        """How to see a run that does not go to wandb's server; None for others."""
        if self.mode != "offline":
            return None
        why = "" if self.config.mode == "offline" or _has_key() else " (no API key)"
        folder = self.folder / "wandb"
        return (
            f"wandb  offline{why}; look: wandb leet {folder}   "
            f"upload: wandb sync {folder}/offline-run-*"
        )

    def _init_wandb(self, facts: dict[str, Any]) -> Any:
        """Online, the one run at wandb that this run began; offline, a new run for each leg, in
        one group.
        """
        leg = len(list((self.folder / "wandb").glob("offline-run-*"))) + 1
        name, group = self.folder.name, self.config.group
        identity: dict[str, Any] = {"name": name, "id": self._run_id(), "resume": "allow"}
        if self.mode == "offline":
            group = group or name
            identity = {"name": name if leg == 1 else f"{name}-leg{leg}"}
        return init(
            self.config,
            self.folder,
            self.mode,
            config=facts | {"commit": commit(), "leg": leg},
            group=group,
            job_type=self.config.job_type,
            **identity,
        )

    def _media(self, row: Row) -> dict[str, Any]:
        """Loss by position as a table and a plot, a line for each validation up to this row; {} for
        rows of steps.
        """
        if not positions(row):
            return {}
        points = [point for point in self._positions if point[0] <= row["tokens_seen"]]
        title = "loss by position, a line per validation"
        return {"loss_by_position": plot(("tokens seen", "tokens before", "loss"), points, title)}

    def _run_id(self) -> str:
        """The id of this run at the server, in a file so that a resumed run continues its curves.

        In a sweep, `wandb agent` has chosen it.
        """
        file = self.folder / "wandb" / "run-id"
        if not file.exists():
            file.parent.mkdir(exist_ok=True)
            chosen = os.environ.get("WANDB_RUN_ID") if "WANDB_SWEEP_ID" in os.environ else None
            file.write_text(chosen or f"{self.folder.name[:100]}-{secrets.token_hex(3)}")
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
        settings=wandb.Settings(silent=True, console="off", quiet=True, show_errors=False),
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


def plot(columns: tuple[str, str, str], rows: list[list[Any]], title: str) -> Any:
    """wandb's plot of the third column over the second, a line for each value of the first, and the
    table of all three.
    """
    import wandb

    table = wandb.Table(columns=list(columns), data=[[str(row[0]), *row[1:]] for row in rows])
    return wandb.plot.line(table, columns[1], columns[2], stroke=columns[0], title=title)


def log_evaluation(
    config: WandbConfig, folder: Path, content: dict[str, Any], picture: Path | None
) -> str:
    """Send an evaluation of the run in `folder` (its JSON, its PNG) to wandb; returns the mode of
    the copy.

    It is a run of its own, of job type eval and in the group of the run; its files lie in eval/.
    """
    import wandb

    mode = wandb_mode(config)
    run = init(
        config,
        folder / "eval",
        mode,
        config={
            key: value
            for key, value in content.items()
            if isinstance(value, str | int | float | None)
        },
        name=f"{folder.name}-eval",
        group=config.group or folder.name,
        job_type="eval",
    )
    media: dict[str, Any] = {} if picture is None else {"eval/picture": wandb.Image(str(picture))}
    for key, x in (("position", "first"), ("context", "context")):
        if rows := content.get(f"by_{key}"):
            points = [[folder.name, row[x], row["loss"]] for row in rows]
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
    return mode


def evaluated(content: dict[str, Any]) -> dict[str, float]:
    """The numbers of an evaluation's JSON: perplexities, shares of facts found, scores of tasks."""
    total = {f"eval/{key}": value for key, value in content.get("total", {}).items()}
    facts = {
        f"eval/{kind}/{length}": fmean(shares)
        for kind, grid in content.get("kinds", {}).items()
        for length, shares in zip(grid["lengths"], grid["accuracy"], strict=True)
    }
    tasks = {
        f"eval/{task}/{key.removesuffix(',none')}": value
        for task, values in content.get("results", {}).items()
        for key, value in values.items()
    }
    return {key: x for key, x in (total | facts | tasks).items() if isinstance(x, int | float)}


def commit() -> str | None:
    """The commit of the checkout that holds this code, `-dirty` where it was changed since; None
    outside of a checkout.
    """
    folder = str(Path(__file__).parent)
    describe = ["describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        return subprocess.run(
            ["git", "-C", folder, *describe], capture_output=True, text=True, check=True, timeout=10
        ).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def wandb_mode(config: WandbConfig) -> str:
    """online, offline or disabled: as configured, else by WANDB_MODE, else by whether there is an
    API key.
    """
    mode = config.mode if config.mode != "auto" else os.environ.get("WANDB_MODE", "auto")
    if mode in ("disabled", "offline", "online"):
        return mode
    return "online" if _has_key() else "offline"


def _has_key() -> bool:
    """Whether wandb would find an API key, in the environment or in .netrc."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    host = urlparse(os.environ.get("WANDB_BASE_URL", "")).hostname
    file = Path(os.environ.get("NETRC", "~/.netrc")).expanduser()
    try:
        logins = netrc.netrc(file)
    except (OSError, netrc.NetrcParseError):
        return False
    return any(logins.authenticators(name) is not None for name in ([host] if host else HOSTS))
