"""Where a run's numbers go: metrics.jsonl, the truth, and Weights & Biases, a copy. The only user of wandb."""

from __future__ import annotations

import json
import logging
import netrc
import os
import secrets
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

from longctx.training.config import WandbConfig


class Tracker:
    """Appends rows to metrics.jsonl in `folder` and, from `start_wandb` on, sends the same rows to wandb."""

    def __init__(self, folder: Path, config: WandbConfig, resumed: bool) -> None:
        self.folder, self.config, self.resumed = folder, config, resumed
        self.mode: Any = wandb_mode(config)
        self._file = open(folder / "metrics.jsonl", "a", encoding="utf-8")  # noqa: SIM115
        self._waiting: list[dict[str, Any]] = []
        self._run: Any = None

    def log(self, row: dict[str, Any]) -> None:
        """Record one row; `step` and `tokens_seen` are among its keys."""
        try:
            self._file.write(json.dumps(row) + "\n")
            self._file.flush()
        except OSError as error:
            raise OSError(f"{self._file.name}: cannot be written: {error.strerror}") from error
        if self._run is not None:
            self._run.log(row)
        elif self.mode != "disabled":
            self._waiting.append(row)

    def start_wandb(self, facts: dict[str, Any]) -> str | None:
        """Begin the copy at wandb, configured as `facts`; returns what went wrong, for that does not end a run.

        Called after the first step: wandb takes a second to start, on a slow network many, and until then it has
        nothing to show.
        """
        if self.mode == "disabled" or self._run is not None:
            return None
        try:
            self._run = self._init_wandb(facts)
        except Exception as error:  # wandb's own errors, the network's, the disk's
            self.mode = "disabled"
            return f"wandb is off: {' '.join(str(error).split())}"
        for row in self._waiting:
            self._run.log(row)
        self._waiting.clear()
        return None

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
        import wandb

        logging.getLogger("wandb").setLevel(logging.ERROR)
        continued: dict[str, Any] = {"id": self._run_id(), "resume": "allow"} if self.mode == "online" else {}
        run = wandb.init(
            project=self.config.project,
            entity=self.config.entity,
            name=self.folder.name,
            group=self.config.group or (self.folder.name if self.resumed else None),
            tags=self.config.tags,
            notes=self.config.notes,
            dir=str(self.folder),
            mode=self.mode,
            config=facts,
            settings=wandb.Settings(silent=True, console="off", quiet=True, show_errors=False),
            **continued,
        )
        run.define_metric("tokens_seen", hidden=True)
        run.define_metric("*", step_metric="tokens_seen")
        return run

    def _run_id(self) -> str:
        """The id under which the server knows this run, kept so that a resumed run continues its curves."""
        file = self.folder / "wandb" / "run-id"
        if not file.exists():
            file.parent.mkdir(exist_ok=True)
            file.write_text(f"{self.folder.name[:100]}-{secrets.token_hex(3)}")
        return file.read_text()


def wandb_mode(config: WandbConfig) -> str:
    """online, offline or disabled: as configured, else as WANDB_MODE says, else by whether there is an API key."""
    asked = config.mode if config.mode != "auto" else os.environ.get("WANDB_MODE", "auto")
    if asked in ("disabled", "offline", "online"):
        return asked
    return "online" if _has_key() else "offline"


def _has_key() -> bool:
    if os.environ.get("WANDB_API_KEY"):
        return True
    host = urlparse(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    file = Path(os.environ.get("NETRC", "~/.netrc")).expanduser()
    try:
        return netrc.netrc(file).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False
