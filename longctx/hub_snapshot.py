"""Models of the Hugging Face Hub by name, owner/name or owner/name@revision, as folders here.

A revision becomes a commit once, and a run records it. Only settings, tokenizer and safetensors are
downloaded, into the cache of huggingface_hub. A path that exists always wins over a name.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from longctx import files

NAME = re.compile(r"([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@([\w.-]+))?", re.ASCII)
COMMIT = re.compile(r"[0-9a-f]{40}")
SETTINGS = ("*.json", "*.jinja")  # tokenizer.json among them


class ModelName(NamedTuple):
    """A model of the Hub; revision: a commit, branch or tag, None: the newest."""

    repo: str
    revision: str | None

    @property
    def name(self) -> str:
        """Return its name without the owner's."""
        return self.repo.partition("/")[2]


def model_name(text: str) -> ModelName | None:
    """Return the model of the Hub that `text` names, or None if it is a path.

    A name without a revision is a misspelt path if a folder `owner` is here, or it is runs/NAME.
    """
    match = NAME.fullmatch(text)
    if match is None or os.path.lexists(text):
        return None
    owner = text.partition("/")[0]
    is_misspelt_path = match[2] is None and (owner == "runs" or os.path.isdir(owner))
    return None if is_misspelt_path else ModelName(*match.groups())


def pinned(text: str, key: str) -> str:
    """Return `text`, given as `key`, with the commit that its revision means now; a path as it is.

    Brings the settings and the tokenizer into the cache. Raises OSError if neither Hub nor cache
    has the model.
    """
    from huggingface_hub import HfApi, constants

    name = model_name(text)
    if name is None:
        return text
    if not COMMIT.fullmatch(name.revision or ""):
        try:
            HfApi().model_info(name.repo, revision=name.revision, timeout=10)
        except Exception as error:  # transports and library raise their own
            branch = _cache(name.repo) / "refs" / (name.revision or "main")
            if is_refused(error) or not branch.is_file():
                raise failure(f"{key}={text}", error) from error
            # The user asked for HF_HUB_OFFLINE, and needs no notice of it
            if not constants.HF_HUB_OFFLINE:
                print(f"{key}={text}: {files.one_line(error)}; using the cache", file=sys.stderr)
            return f"{name.repo}@{branch.read_text()}"
    return f"{name.repo}@{_download(name, f'{key}={text}', SETTINGS).name}"


def folder(text: str, key: str, weights: Iterable[str] = ()) -> Path:
    """Return the folder that `text` means, a path or a name with its commit, with the settings and
    the files `weights`; downloads the missing ones. Raises as `pinned`.
    """
    name = model_name(text)
    if name is None:
        return Path(text).expanduser().resolve()
    snapshot = _cache(name.repo) / "snapshots" / str(name.revision)
    missing = [file for file in ("config.json", *weights) if not (snapshot / file).exists()]
    if missing:
        # Another machine than this one may have pinned it
        _download(name, f"{key}={text}", [*SETTINGS, *missing])
    return snapshot


def is_snapshot(path: Any, text: Any) -> bool:
    """Return True if `path` is the folder, on some machine, of `text`, a name with its commit."""
    commit = str(text).partition("@")[2]
    return bool(COMMIT.fullmatch(commit)) and str(path).endswith(f"/snapshots/{commit}")


def _cache(repo: str) -> Path:
    from huggingface_hub import constants

    cache = Path(constants.HF_HUB_CACHE).expanduser().resolve()
    return cache / "--".join(["models", *repo.split("/")])


def _download(name: ModelName, setting: str, patterns: Iterable[str]) -> Path:
    """Bring the top-level files that match `patterns` into the cache; return their folder."""
    from huggingface_hub import snapshot_download

    try:
        snapshot = snapshot_download(
            name.repo,
            revision=name.revision,
            allow_patterns=list(patterns),
            ignore_patterns=["*/*"],  # copies for other programs, and earlier checkpoints
        )
    except Exception as error:  # transports and library raise their own
        raise error if files.is_full(error) else failure(setting, error) from error
    return Path(snapshot)


def is_refused(error: BaseException) -> bool:
    """Return True if the Hub answered no, rather than not at all or to try again later."""
    answers = (getattr(cause, "response", None) for cause in files.causes(error))
    code = next((answer.status_code for answer in answers if answer is not None), 500)
    return code < 500 and code not in (408, 429)


def failure(setting: str, error: Exception) -> Exception:
    """Return the error for the user in one line, with the library's reason."""
    return ConnectionError(
        f"{setting}: no such folder here, and the Hugging Face Hub does not give it: "
        f"{files.one_line(error)[:600]}; if it is private or gated, log in with `hf auth login` or "
        "set HF_TOKEN; without a network give a local path, or try again later"
    )
