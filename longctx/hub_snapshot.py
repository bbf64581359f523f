"""Models of the Hugging Face Hub by name, owner/name or owner/name@revision, as folders here.

A revision is turned into its commit once, and that is what a run records. Only settings, tokenizer
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
TIMEOUT = 10.0  # seconds, for the Hub to say which commit a revision is


class ModelName(NamedTuple):
    """A model of the Hub; revision: a commit, branch or tag, None: the newest."""

    repo: str
    revision: str | None

    @property
    def name(self) -> str:
        """Its name without the owner's."""
        return self.repo.partition("/")[2]


def model_name(text: str) -> ModelName | None:
    """What `text` names at the Hub; None where it is a path: one that exists, that begins with . or
    / or ~, has not exactly one /, or lies in a folder that is here, or in runs, and names no
    revision.
    """
    match = NAME.fullmatch(text)
    if match is None or os.path.lexists(text):
        return None
    name = ModelName(*match.groups())
    owner = name.repo.partition("/")[0]
    is_misspelt_path = name.revision is None and (owner == "runs" or os.path.isdir(owner))
    return None if is_misspelt_path else name


def pinned(text: str, key: str) -> str:
    """`text`, given as `key`, with the commit that its revision means now, and its settings and
    tokenizer in the cache; a path as it is.

    Raises ValueError or OSError, one line, where there is no such model, it may not be read, or
    neither Hub nor cache has it.
    """
    name = model_name(text)
    if name is None:
        return text
    is_commit = name.revision is not None and COMMIT.fullmatch(name.revision)
    is_reached = is_commit or _is_reached(name, text, key)
    place = _download(name, text, key, SETTINGS, from_hub=bool(is_reached))
    return f"{name.repo}@{place.name}"


def folder(text: str, key: str, weights: Iterable[str] = ()) -> Path:
    """The folder that `text`, a path or a name with its commit, means: with the settings and the
    tokenizer in it, and the files `weights`, downloaded where the cache lacks them.

    Raises as `pinned`.
    """
    name = model_name(text)
    if name is None:
        return Path(text).expanduser().resolve()
    assert name.revision is not None, "pinned before"
    place = _cache(name) / "snapshots" / name.revision
    if not (place / "config.json").exists():  # on another machine than the one that pinned it
        _download(name, text, key, SETTINGS)
    missing = [file for file in weights if not (place / file).exists()]
    if missing:
        _download(name, text, key, missing)
    return place


def is_snapshot(place: Any, text: Any) -> bool:
    """Whether `place` is the folder, on some machine, of `text`, a name with its commit."""
    match = NAME.fullmatch(str(text))
    return match is not None and Path(str(place)).parts[-3:] == (
        _folder_name(match[1]),
        "snapshots",
        match[2],
    )


def _download(
    name: ModelName, text: str, key: str, patterns: Sequence[str], from_hub: bool = True
) -> Path:
    """Bring the files of the first folder level that match `patterns` into the cache; returns the
    folder of their commit.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils import tqdm

    class Hidden(tqdm):
        """A progress bar for what takes no time."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs | {"disable": True})

    try:
        place = snapshot_download(
            name.repo,
            revision=name.revision,
            allow_patterns=list(patterns),
            ignore_patterns=["*/*"],  # copies for other programs, and earlier checkpoints
            local_files_only=not from_hub,
            tqdm_class=Hidden if patterns is SETTINGS else tqdm,
        )
    except Exception as error:  # of each transport and of the library
        if files.is_full(error):
            raise
        raise _failure(name, text, key, error) from error
    return Path(place)


def _is_reached(name: ModelName, text: str, key: str) -> bool:
    """Whether the Hub can be asked which commit a revision means; if not, and that was not asked
    for by HF_HUB_OFFLINE, it is said. Raises as `pinned` where the answer is no.
    """
    from huggingface_hub import HfApi, constants

    try:
        HfApi().model_info(name.repo, revision=name.revision, timeout=TIMEOUT)
        return True
    except Exception as error:  # as in _download
        ref = _cache(name) / "refs" / (name.revision or "main")
        is_answer = status(error) in range(400, 500) and trouble(error) is None
        if is_answer or not ref.is_file():
            raise _failure(name, text, key, error) from error
        if not constants.HF_HUB_OFFLINE:
            why = (trouble(error) or "no answer from the Hub").partition(";")[0]
            print(f"{key}={text}: {why}; using the cache", file=sys.stderr)
        return False


def _cache(name: ModelName) -> Path:
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE).expanduser().resolve() / _folder_name(name.repo)


def _folder_name(repo: str) -> str:
    return "--".join(["models", *repo.split("/")])


def trouble(error: BaseException) -> str | None:
    """What keeps the Hub from answering for now, and what to do; None where `error`, or what led
    to it, is something else.
    """
    answer = status(error)
    if answer == 429:
        return (
            "the Hugging Face Hub answers 429, too many requests; wait some minutes and try "
            "again, or set HF_TOKEN, with which it allows more"
        )
    if answer == 408:
        return "the Hugging Face Hub answers 408, it waited too long; try again"
    if answer is not None and answer >= 500:
        return f"the Hugging Face Hub answers {answer}, an error of its own; try again later"
    return None


def status(error: BaseException | None) -> int | None:
    """The HTTP status that an error, or what led to it, is about."""
    while error is not None:
        code: int | None = getattr(getattr(error, "response", None), "status_code", None)
        if code is not None:
            return code
        error = error.__cause__ or error.__context__
    return None


def _failure(name: ModelName, text: str, key: str, error: Exception) -> Exception:
    """What went wrong and what to do, in one line; nothing of a request, which holds the token."""
    from huggingface_hub import constants, errors

    place, page = f"{key}={text}", f"{constants.ENDPOINT}/{name.repo}"
    if (why := trouble(error)) is not None:
        return ConnectionError(f"{place}: {why}")
    log_in = "log in with `hf auth login`, or set HF_TOKEN"
    if isinstance(error, errors.GatedRepoError):
        return ValueError(f"{place}: a gated model; accept its terms at {page}, then {log_in}")
    if isinstance(error, errors.RevisionNotFoundError):
        return ValueError(
            f"{place}: the model has no revision {name.revision}; give a branch, a tag or a commit "
            f"of {page}"
        )
    if isinstance(error, errors.RepositoryNotFoundError) or status(error) in (401, 403):
        return ValueError(
            f"{place}: no such folder here, and no model at the Hugging Face Hub that can be read; "
            f"check the name; for a private model {log_in}"
        )
    if constants.HF_HUB_OFFLINE:
        return ConnectionError(
            f"{place}: no such folder here, and not whole in the cache {constants.HF_HUB_CACHE}; "
            "unset HF_HUB_OFFLINE to download it, or give a folder"
        )
    if status(error) is not None or not is_of_network(error):
        first_line = (str(error).strip().splitlines() or [type(error).__name__])[0]
        reason = f"the Hub answers {status(error)}" if status(error) is not None else first_line
        return ValueError(f"{place}: cannot be downloaded ({reason}); try later, or give a folder")
    return ConnectionError(
        f"{place}: no such folder here, and the Hugging Face Hub, {constants.ENDPOINT}, cannot be "
        "reached; give a folder, or fill the cache where there is a network"
    )


def is_of_network(error: BaseException | None) -> bool:
    """Whether an error, or what led to it, is about a connection."""
    from huggingface_hub.errors import LocalEntryNotFoundError

    while error is not None:
        name = type(error).__name__
        if isinstance(error, LocalEntryNotFoundError | ConnectionError | TimeoutError) or any(
            sign in name
            for sign in ("Connect", "Timeout", "Network", "Proxy", "Protocol", "gaierror")
        ):
            return True
        error = error.__cause__ or error.__context__
    return False
