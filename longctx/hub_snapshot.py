"""Models of the Hugging Face Hub by name, owner/name or owner/name@revision, as folders here.

A revision is turned into its commit once, and a run records that commit. Only settings, tokenizer
and safetensors are downloaded, into the cache of huggingface_hub (HF_HUB_CACHE, HF_HUB_OFFLINE);
code and pickles never are. A path that exists always wins over a name.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from longctx import files

NAME = re.compile(r"([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@([\w.-]+))?", re.ASCII)
COMMIT = re.compile(r"[0-9a-f]{40}")
SETTINGS = ("*.json", "*.jinja")  # tokenizer.json among them
TIMEOUT = 10.0  # seconds in which the Hub must return the commit of a revision


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

    A path exists, or does not look like owner/name. A name without a revision is a misspelt path
    if a folder `owner` is here, or if it begins with runs/.
    """
    match = NAME.fullmatch(text)
    if match is None or os.path.lexists(text):
        return None
    name = ModelName(*match.groups())
    owner = name.repo.partition("/")[0]
    is_misspelt_path = name.revision is None and (owner == "runs" or os.path.isdir(owner))
    return None if is_misspelt_path else name


def pinned(text: str, key: str) -> str:
    """Return `text`, given as `key`, with the commit that its revision means now; a path as it is.

    Brings the settings and the tokenizer into the cache. Raises ValueError or OSError if there is
    no such model, the user may not read it, or neither Hub nor cache has it.
    """
    from huggingface_hub import HfApi, constants

    name = model_name(text)
    if name is None:
        return text
    from_hub = True
    if name.revision is None or not COMMIT.fullmatch(name.revision):
        try:
            HfApi().model_info(name.repo, revision=name.revision, timeout=TIMEOUT)
        except Exception as error:  # transports and library raise their own
            cached = _cache(name) / "refs" / (name.revision or "main")
            if is_refused(error) or not cached.is_file():
                raise failure(f"{key}={text}", error) from error
            from_hub = False
            # The user asked for HF_HUB_OFFLINE, and needs no notice of it.
            if not constants.HF_HUB_OFFLINE:
                reason = f"the Hub answers {status(error)}" if status(error) else "no answer"
                print(f"{key}={text}: {reason}; using the cache", file=sys.stderr)
    snapshot = _download(name, text, key, SETTINGS, from_hub)
    return f"{name.repo}@{snapshot.name}"


def folder(text: str, key: str, weights: Iterable[str] = ()) -> Path:
    """Return the folder that `text` means, a path or a name with its commit.

    It has the settings, the tokenizer and the files `weights`; downloads the missing ones. Raises
    as `pinned`.
    """
    name = model_name(text)
    if name is None:
        return Path(text).expanduser().resolve()
    assert name.revision is not None, "pinned before"
    snapshot = _cache(name) / "snapshots" / name.revision
    # Another machine than this one may have pinned it.
    if not (snapshot / "config.json").exists():
        _download(name, text, key, SETTINGS)
    # Settings come first: their index names the shards.
    missing = [file for file in weights if not (snapshot / file).exists()]
    if missing:
        _download(name, text, key, missing)
    return snapshot


def is_snapshot(path: Any, text: Any) -> bool:
    """Return True if `path` is the folder, on some machine, of `text`, a name with its commit."""
    match = NAME.fullmatch(str(text))
    if match is None:
        return False
    return Path(str(path)).parts[-3:] == (_folder_name(match[1]), "snapshots", match[2])


def _download(
    name: ModelName, text: str, key: str, patterns: Sequence[str], from_hub: bool = True
) -> Path:
    """Bring the top-level files that match `patterns` into the cache; return their folder."""
    from huggingface_hub import snapshot_download

    try:
        snapshot = snapshot_download(
            name.repo,
            revision=name.revision,
            allow_patterns=list(patterns),
            ignore_patterns=["*/*"],  # copies for other programs, and earlier checkpoints
            local_files_only=not from_hub,
        )
    except Exception as error:  # transports and library raise their own
        if files.is_full(error):
            raise
        raise failure(f"{key}={text}", error) from error
    return Path(snapshot)


def _cache(name: ModelName) -> Path:
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE).expanduser().resolve() / _folder_name(name.repo)


def _folder_name(repo: str) -> str:
    return "--".join(["models", *repo.split("/")])


def is_refused(error: BaseException) -> bool:
    """Return True if the Hub answered no, rather than not at all or to try again later."""
    code = status(error)
    return code is not None and code < 500 and code not in (408, 429)


def status(error: BaseException) -> int | None:
    """Return the HTTP status that an error, or its cause, is about."""
    codes = (
        getattr(getattr(cause, "response", None), "status_code", None)
        for cause in files.causes(error)
    )
    return next((code for code in codes if code is not None), None)


def failure(setting: str, error: Exception) -> Exception:
    """Return the error for the user in one line, with the library's reason."""
    return ConnectionError(
        f"{setting}: no such folder here, and the Hugging Face Hub does not give it: "
        f"{files.one_line(error)[:600]}; if it is private or gated, log in with `hf auth login` or "
        "set HF_TOKEN; without a network give a local path, or try again later"
    )
