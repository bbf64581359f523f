"""Any data set that `datasets` can stream: on the Hugging Face Hub, or local through a builder such
as `json`.

Streaming reads no more than is asked for, so `data.documents` bounds a data set of any size. Code
from a data set's repository is never run. The commit that was read is pinned; without a network,
the one seen last is used again.
"""

from __future__ import annotations

import glob
import json
import os
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from longctx.config.data_config import DataConfig
from longctx.data.cache import fingerprint
from longctx.data.sources import Corpus, Document, Part, template_of
from longctx.files import write_text

_BUILDERS = ("json", "csv", "parquet", "arrow", "text", "webdataset")


def open_corpus(config: DataConfig) -> Corpus:
    path = os.path.expanduser(config.paths()[0])
    files = [os.path.expanduser(file) for file in config.data_files()]
    if path in _BUILDERS and not files:
        raise ValueError(f"data.path={path}: a builder of local files; name them with data.files=")
    local = _local_files(path, files)
    revision = config.revision if files or local else _revision(path, config)
    template = [template_of(config).fingerprint] if config.chat else []
    identity = [
        path,
        config.name,
        config.split,
        config.text_column,
        revision,
        files,
        local,
        *template,
    ]
    return Corpus(identity, [Part(path, partial(_read, path, files, revision, config))], None)


def _read(
    path: str, files: list[str], revision: str | None, config: DataConfig
) -> Iterator[Document]:
    import datasets

    datasets.disable_progress_bars()
    try:
        rows = datasets.load_dataset(
            path,
            config.name,
            split=config.split,
            data_files=files or None,
            revision=revision,
            streaming=True,
        )
    except Exception as error:  # each builder and transport raises its own
        raise _failure(path, error) from error
    number, template = 0, template_of(config) if config.chat else None
    iterator = iter(rows)
    while True:
        try:
            row = next(iterator)
        except StopIteration:
            return
        except Exception as error:
            raise _failure(path, error) from error
        number += 1
        if template is not None:
            yield template.render(f"{path}:{number}", f"data.path={path}: row {number}", row)
            continue
        if config.text_column not in row:
            fields = ", ".join(list(row)[:8])
            raise ValueError(
                f"data.path={path}: no field '{config.text_column}' (there are: {fields}); set data.text_column"
            )
        text = row[config.text_column]
        if not isinstance(text, str):
            found = type(text).__name__
            raise ValueError(
                f"data.path={path}: row {number}: '{config.text_column}' is {found}, expected a string"
            )
        yield Document(f"{path}:{number}", text.encode(errors="replace").decode())


def _local_files(path: str, files: list[str]) -> list[tuple[str, int, int]]:
    """Size and time of every local file that the data set is made of; empty for one that lives on
    the Hub.
    """
    found: list[str] = []
    for pattern in files:
        if "://" in pattern:
            continue
        matches = sorted(glob.glob(pattern, recursive=True))
        if not matches:
            raise FileNotFoundError(f"data.files={pattern}: no such file")
        found += matches
    if not files and os.path.isdir(path):
        found = sorted(str(file) for file in Path(path).rglob("*") if file.is_file())
        if not found:
            raise FileNotFoundError(f"data.path={path}: no file in this folder")
    return [(file, os.stat(file).st_size, os.stat(file).st_mtime_ns) for file in found]


def _revision(path: str, config: DataConfig) -> str | None:
    """The commit on the Hub that `config` means now; without a network, the one that it meant last
    time.
    """
    import huggingface_hub

    record = config.cache_folder() / "revisions" / f"{fingerprint([path, config.revision])}.json"
    try:
        sha: str | None = (
            huggingface_hub.HfApi().dataset_info(path, revision=config.revision, timeout=10).sha
        )
    except Exception as error:  # transports differ between versions of the library
        if (
            getattr(getattr(error, "response", None), "status_code", None) is not None
            or not record.exists()
        ):
            raise _failure(path, error) from error
        sha = json.loads(record.read_text())
        print(
            f"data: {path}: no connection to the Hub, using revision {sha} as before",
            file=sys.stderr,
        )
        return sha
    try:
        record.parent.mkdir(parents=True, exist_ok=True)
        write_text(record, json.dumps(sha))
    except OSError:
        # only spares a later run the network; an unwritable cache is reported when something is
        # built in it
        pass
    return sha


def _failure(path: str, error: Exception) -> Exception:
    chain: list[str] = []
    cause: Any = error
    while cause is not None:
        chain.append(f"{type(cause).__name__} {cause}")
        cause = cause.__cause__ or cause.__context__
    lines = str(error).strip().splitlines()
    reason = lines[0] if lines else type(error).__name__
    signs = (
        "Connect",
        "Timeout",
        "OfflineMode",
        "Network",
        "ProxyError",
        "Name or service",
        "resolution",
    )
    if any(sign in line for line in chain for sign in signs):
        return ConnectionError(
            f"data.path={path}: the Hugging Face Hub cannot be reached; data=text and data=embedded need no network"
        )
    return ValueError(
        f"data.path={path}: cannot be read as a data set ({type(error).__name__}: {reason})"
    )
