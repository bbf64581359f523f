"""Models of the Hugging Face Hub by name, owner/name or owner/name@revision, as folders here.

A revision becomes a commit once, and a run records it. Only settings, tokenizer and safetensors are
downloaded, into the cache of huggingface_hub. A path that exists always wins over a name.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from contextlib import suppress
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
    """Return `text` with the commit that its revision means now; a path as it is."""
    name = model_name(text)
    return text if name is None else f"{name.repo}@{folder(text, key, is_pinned=False).name}"


def folder(text: str, key: str, weights: Sequence[str] = (), is_pinned: bool = True) -> Path:
    """Return the folder that `text`, given as `key`, means: a path, or a name in the cache with its
    settings, its tokenizer and the files `weights`. is_pinned: the cache has all settings of a
    commit if it has config.json.

    Downloads what the cache lacks; raises OSError if neither Hub nor cache has all of it.
    """
    name = model_name(text)
    if name is None:
        return Path(text).expanduser().resolve()
    from huggingface_hub import HfApi, constants, snapshot_download

    # In other folders are copies for other programs, and earlier checkpoints
    wanted: Any = {"allow_patterns": [*SETTINGS, *weights], "ignore_patterns": ["*/*"]}
    wanted["revision"], setting, unreachable = name.revision, f"{key}={text}", None

    def snapshot(is_local: bool) -> Path:
        found = Path(snapshot_download(name.repo, local_files_only=is_local, **wanted))
        # The library returns the folder without them
        for file in ("config.json", *weights):
            if not (found / file).exists():
                if is_local or constants.HF_HUB_OFFLINE:
                    raise OSError(f"the cache has no {file}")
                remedy = "pickles, which can run code, are not read: give one in safetensors"
                raise FileNotFoundError(f"{setting}: the model has no {file}; {remedy}")
        return found

    has_commit = COMMIT.fullmatch(name.revision or "")
    if has_commit and is_pinned:
        with suppress(Exception):
            return snapshot(is_local=True)
    try:
        if not has_commit:
            # Only this call ends if the server is silent
            HfApi().model_info(name.repo, revision=name.revision, timeout=10)
    except Exception as error:  # transports and library raise their own
        code = getattr(getattr(error, "response", None), "status_code", 500)
        if code < 500 and code not in (408, 429):  # it answered no, rather than try again later
            raise failure(setting, error) from error
        unreachable = error
    try:
        found = snapshot(is_local=unreachable is not None)
    except Exception as error:
        if files.is_full(error) or type(error) is FileNotFoundError:
            raise
        raise failure(setting, unreachable or error) from error
    # The user asked for HF_HUB_OFFLINE, and needs no notice of it
    if unreachable is not None and not constants.HF_HUB_OFFLINE:
        print(f"{setting}: {files.one_line(unreachable)}; using the cache", file=sys.stderr)
    return found


def is_snapshot(path: Any, text: Any) -> bool:
    """Return True if `path` is the folder, on some machine, of `text`, a name with its commit."""
    commit = str(text).partition("@")[2]
    return bool(COMMIT.fullmatch(commit)) and str(path).endswith(f"/snapshots/{commit}")


def failure(setting: str, error: Exception) -> Exception:
    """Return the error for the user in one line, with the library's reason."""
    return ConnectionError(
        f"{setting}: no such folder here, and the Hugging Face Hub does not give it: "
        f"{files.one_line(error)[:600]}; if it is private or gated, log in with `hf auth login` or "
        "set HF_TOKEN; without a network give a local path, or try again later"
    )
