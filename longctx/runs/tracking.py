"""Where a run's numbers go: metrics.jsonl, the truth, and Weights & Biases, a copy. The only user
of wandb.

A row of metrics.jsonl is a row at wandb, drawn over `tokens_seen`; tables and plots travel in the
row that they show.
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
from longctx.runs import run_folder

POSITIONS = "val_loss_by_position/"  # keys that go into one table and plot
HOSTS = ("api.wandb.ai", "api.forge.coreweave.com")  # under which `wandb login` has kept keys
BEST = {
    "min": ("loss", "val_loss", "val_perplexity"),
    "max": ("tokens_per_second", "mfu", "memory_peak_gib"),
}


class Tracker:
    """Appends rows to metrics.jsonl in `folder` and, from `start_wandb` on, sends the same rows to
    wandb.
    """

    def __init__(self, folder: Path, config: WandbConfig) -> None:
        self.folder, self.config = folder, config
        self.mode: Any = wandb_mode(config)
        self._file = open(folder / "metrics.jsonl", "a", encoding="utf-8")  # noqa: SIM115
        self._waiting: list[dict[str, Any]] = []
        before = run_folder.read_metrics(folder) if (folder / "metrics.jsonl").is_file() else []
        self._positions = [line for row in before for line in positions(row)]
        self._run: Any = None

    def log(self, row: dict[str, Any]) -> None:
        """Record one row; `step` and `tokens_seen` are among its keys. In the file what is no
        finite number is null.
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
        """Begin the copy at wandb, configured as `facts`; returns what went wrong, for that does
        not end a run.

        Called after the first step: wandb takes a second to start, on a slow network many, and
        until then it has nothing to show.
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
        artifact.add_file(str(path), name=path.name)
        self._run.log_artifact(artifact, aliases=["latest", f"step-{step}"])

    def finish(self, exit_code: int) -> None:
        """Close the file, and wandb once it has everything."""
        with suppress(OSError):  # what could not be written has been said by `log`
            self._file.close()
        if self._run is not None:
            self._run.finish(exit_code=exit_code)

    def how_to_look(self) -> str | None:
        """For a run without wandb's server: how to see it all the same."""
        if self.mode != "offline":
            return None
        why = "" if self.config.mode == "offline" or _has_key() else " (no API key)"
        where = self.folder / "wandb"
        return f"wandb  offline{why}; look: wandb leet {where}   upload: wandb sync {where}/offline-run-*"

    def _init_wandb(self, facts: dict[str, Any]) -> Any:
        """A run of wandb's: online the one that this run began; offline a new leg of it, in its
        group.
        """
        leg = len(list((self.folder / "wandb").glob("offline-run-*"))) + 1
        offline = self.mode == "offline"
        named = {"name": self.folder.name} if leg == 1 else {"name": f"{self.folder.name}-leg{leg}"}
        return init(
            self.config,
            self.folder,
            self.mode,
            config=facts | {"commit": commit(), "leg": leg},
            group=self.config.group or (self.folder.name if offline else None),
            job_type=self.config.job_type,
            **(
                named
                if offline
                else {"name": self.folder.name, "id": self._run_id(), "resume": "allow"}
            ),
        )

    def _media(self, row: dict[str, Any]) -> dict[str, Any]:
        """Loss by position as a table and a plot, a line for each validation up to this row;
        nothing for other rows.
        """
        now = [line for line in self._positions if line[0] <= row["tokens_seen"]]
        if not positions(row):
            return {}
        title = "loss by position, a line per validation"
        return {"loss_by_position": plot(("tokens seen", "tokens before", "loss"), now, title)}

    def _run_id(self) -> str:
        """The id under which the server knows this run, kept so that a resumed run continues its
        curves.
        """
        file = self.folder / "wandb" / "run-id"
        if not file.exists():
            file.parent.mkdir(exist_ok=True)
            swept = (
                os.environ.get("WANDB_RUN_ID") if os.environ.get("WANDB_SWEEP_ID") else None
            )  # `wandb agent` chose it
            file.write_text(swept or f"{self.folder.name[:100]}-{secrets.token_hex(3)}")
        return file.read_text()


def init(asked: WandbConfig, folder: Path, mode: str, **about: Any) -> Any:
    """wandb.init, silent, for a run in `folder`, with every metric over tokens_seen and the best of
    some in its summary.
    """
    import wandb

    logging.getLogger("wandb").setLevel(logging.ERROR)
    run = wandb.init(
        project=asked.project,
        entity=asked.entity,
        tags=asked.tags,
        notes=asked.notes,
        dir=str(folder),
        mode=mode,  # type: ignore[arg-type]
        allow_val_change=True,  # a resumed run may be longer than it was
        settings=wandb.Settings(silent=True, console="off", quiet=True, show_errors=False),
        **about,
    )
    run.define_metric("tokens_seen", hidden=True)
    for best, keys in BEST.items():
        for key in keys:
            run.define_metric(key, step_metric="tokens_seen", summary=f"{best},last")
    run.define_metric(POSITIONS + "*", step_metric="tokens_seen", hidden=True)
    run.define_metric("*", step_metric="tokens_seen")
    return run


def positions(row: dict[str, Any]) -> list[list[Any]]:
    """(tokens seen, tokens before, loss) for each bucket of a validation; [] for other rows."""
    return [
        [row["tokens_seen"], int(key.removeprefix(POSITIONS)), value]
        for key, value in row.items()
        if key.startswith(POSITIONS) and value is not None
    ]


def plot(columns: tuple[str, str, str], rows: list[list[Any]], title: str) -> Any:
    """wandb's plot of the third column over the second, a line for each value of the first, and the
    table of all three.
    """
    import wandb

    table = wandb.Table(columns=list(columns), data=[[str(row[0]), *row[1:]] for row in rows])
    return wandb.plot.line(table, columns[1], columns[2], stroke=columns[0], title=title)


def log_evaluation(
    config: WandbConfig, folder: Path, found: dict[str, Any], picture: Path | None
) -> str:
    """Send what eval.py found about `folder` (its JSON, its PNG) to wandb as a run of job type
    eval, in the group of the run; its files lie in eval/. Returns the mode that it went in.
    """
    import wandb

    mode = wandb_mode(config)
    about = {
        key: value for key, value in found.items() if isinstance(value, str | int | float | None)
    }
    name = f"{folder.name}-eval"
    run = init(
        config,
        folder / "eval",
        mode,
        config=about,
        name=name,
        group=config.group or folder.name,
        job_type="eval",
    )
    media: dict[str, Any] = {} if picture is None else {"eval/picture": wandb.Image(str(picture))}
    for key, x in (("position", "first"), ("context", "context")):
        if rows := found.get(f"by_{key}"):
            lines = [[folder.name, row[x], row["loss"]] for row in rows]
            media[f"eval/loss_by_{key}"] = plot(
                ("run", f"tokens of {key}", "loss"), lines, f"loss by {key}"
            )
    for key in ("gains", "documents"):
        if isinstance(found.get(key), list) and (rows := found[key][:1000]):
            media[f"eval/{key}"] = wandb.Table(
                columns=list(rows[0]), data=[list(row.values()) for row in rows]
            )
    run.log(evaluated(found) | media)
    run.finish()
    return mode


def evaluated(found: dict[str, Any]) -> dict[str, float]:
    """The numbers of an evaluation's JSON: of a perplexity, of facts found again, of lm-eval's
    tasks.
    """
    total = {f"eval/{key}": value for key, value in found.get("total", {}).items()}
    facts = {
        f"eval/{kind}/{length}": fmean(shares)
        for kind, grid in found.get("kinds", {}).items()
        for length, shares in zip(grid["lengths"], grid["accuracy"], strict=True)
    }
    tasks = {
        f"eval/{task}/{key.removesuffix(',none')}": value
        for task, values in found.get("results", {}).items()
        for key, value in values.items()
    }
    return {key: x for key, x in (total | facts | tasks).items() if isinstance(x, int | float)}


def commit() -> str | None:
    """The commit of the checkout that this code lies in, `-dirty` where it was changed since; None
    where it is none.
    """
    command = [
        "git",
        "-C",
        str(Path(__file__).parent),
        "describe",
        "--always",
        "--dirty",
        "--abbrev=40",
        "--exclude=*",
    ]
    try:
        return subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=10
        ).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def wandb_mode(config: WandbConfig) -> str:
    """online, offline or disabled: as configured, else as WANDB_MODE says, else by whether there is
    an API key.
    """
    asked = config.mode if config.mode != "auto" else os.environ.get("WANDB_MODE", "auto")
    if asked in ("disabled", "offline", "online"):
        return asked
    return "online" if _has_key() else "offline"


def _has_key() -> bool:
    if os.environ.get("WANDB_API_KEY"):
        return True
    named = urlparse(os.environ.get("WANDB_BASE_URL", "")).hostname
    file = Path(os.environ.get("NETRC", "~/.netrc")).expanduser()
    try:
        known = netrc.netrc(file)
    except (OSError, netrc.NetrcParseError):
        return False
    return any(known.authenticators(host) is not None for host in ([named] if named else HOSTS))
