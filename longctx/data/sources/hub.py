"""data=hub: any data set that `datasets` can stream, on the Hugging Face Hub or local through a
builder such as `json`.

Streaming reads no more than is asked for, so `data.documents` bounds a data set of any size. Code
from a data set's repository is never run. A run records the commit in its configuration, so that a
push changes nothing for it; without a network, a new run takes the commit seen last.
"""

from __future__ import annotations

import glob
import json
import os
import sys
from collections.abc import Iterator, Mapping, Set
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import huggingface_hub

from longctx import hub_snapshot, untrusted
from longctx.config.data_config import DataConfig
from longctx.data.cache import fingerprint
from longctx.data.corpus import Corpus, Document, Shard, Source, register, text_in
from longctx.files import write_text

if TYPE_CHECKING:
    from longctx.data.chat import Template

_BUILDERS = ("json", "csv", "parquet", "arrow", "text", "webdataset")


@register("hub")
class Hub(Source):
    """A data set by name, or a builder (`data.path=json`) and its `data.files`."""

    keys = frozenset({"path", "name", "split", "files", "revision", "text_column", "chat"})

    def check(self, config: DataConfig) -> None:
        if not config.paths():
            raise ValueError(
                "data.path is not set; data=hub reads a data set by name, data.path=OWNER/NAME"
            )
        if len(config.paths()) != 1:
            raise ValueError(f"data.path={config.path}: data=hub takes one name; give one")

    def without_effect(self, config: DataConfig) -> Mapping[str, str]:
        return {"text_column": "data.chat=true reads `messages`"} if config.chat else {}

    def check_files(self, config: DataConfig) -> None:
        _local_files(*_places(config))

    def pinned(self, config: DataConfig) -> DataConfig:
        path, files = _places(config)
        if path not in _BUILDERS and not os.path.isdir(path):
            return replace(config, revision=_revision(path, config))
        path = path if path in _BUILDERS else os.path.abspath(path)
        files = [file if "://" in file else os.path.abspath(file) for file in files]
        return replace(config, path=path, files=files or None)

    def open(self, config: DataConfig, without: Set[bytes]) -> Corpus:
        path, files = _places(config)
        local = _local_files(path, files)
        is_local = path in _BUILDERS or os.path.isdir(path)
        revision = config.revision if is_local else _revision(path, config)
        identity = [
            *(path, config.name, config.split, config.text_column),
            *(revision, files, local),
        ]
        template = None
        if config.chat:
            from longctx.data.chat import Template  # needs tokenizers

            template = Template.of(config)
            identity.append(template.fingerprint)
        read = partial(_read, path, files, revision, config, template)
        return Corpus(identity, [Shard(path, read)], None)


def _places(config: DataConfig) -> tuple[str, list[str]]:
    """Return the name, builder or folder that `config` means, and its files.

    A builder's files are on this machine, other files are in the data set.
    """
    path = os.path.expanduser(config.paths()[0])
    files = [os.path.expanduser(file) for file in config.data_files()]
    if path in _BUILDERS and not files:
        raise ValueError(f"data.path={path}: a builder of local files; name them with data.files=")
    if path not in _BUILDERS and os.path.isdir(path):
        files = [file if "://" in file else os.path.join(path, file) for file in files]
    return path, files


def _read(
    path: str,
    files: list[str],
    revision: str | None,
    config: DataConfig,
    template: Template | None,
) -> Iterator[Document]:
    rows = enumerate(_stream(path, files, revision, config), start=1)
    if template is not None:
        yield from template.conversations(
            (f"{path}:{number}", f"data.path={path}: row {number}", row) for number, row in rows
        )
        return
    for number, row in rows:
        text = text_in(row, f"data.path={path}: row {number}", config)
        yield Document(f"{path}:{number}", text.encode(errors="replace").decode())


def _stream(
    path: str, files: list[str], revision: str | None, config: DataConfig
) -> Iterator[Mapping[str, Any]]:
    import datasets  # 1.5 s

    datasets.disable_progress_bars()
    try:
        yield from datasets.load_dataset(
            path,
            config.name,
            split=config.split,
            data_files=files or None,
            revision=revision,
            streaming=True,
        )
    except Exception as error:  # each builder and transport raises its own
        raise hub_snapshot.failure(f"data.path={path}", error) from error


def _local_files(path: str, files: list[str]) -> list[tuple[str, int, int]]:
    """Return (file, bytes, time) of every local file of the data set; none for one on the Hub."""
    names: list[str] = []
    is_folder = path not in _BUILDERS and os.path.isdir(path)
    if not files and is_folder:
        names = sorted(str(file) for file in Path(path).rglob("*") if file.is_file())
    for pattern in files if is_folder or path in _BUILDERS else []:
        if "://" in pattern:
            continue
        matches = sorted(glob.glob(pattern, recursive=True))
        if not matches:
            raise FileNotFoundError(f"data.files={pattern}: no such file; give one that exists")
        names += matches
    return [(file, os.stat(file).st_size, os.stat(file).st_mtime_ns) for file in names]


def _revision(path: str, config: DataConfig) -> str | None:
    """Return the commit that `config` means at the Hub now, or the one last time if there is no
    network. A commit stands for itself, and nobody is asked.
    """
    if config.revision is not None and hub_snapshot.COMMIT.fullmatch(config.revision):
        return config.revision
    record = config.cache_folder() / "revisions" / f"{fingerprint([path, config.revision])}.json"
    try:
        api = huggingface_hub.HfApi()
        sha: str | None = api.dataset_info(path, revision=config.revision, timeout=10).sha
    except Exception as error:  # transports differ between versions of the library
        is_refused = hub_snapshot.status(error) is not None and not hub_snapshot.is_busy(error)
        if is_refused or not record.exists():
            raise hub_snapshot.failure(f"data.path={path}", error) from error
        sha = untrusted.read_json(record)
        print(
            f"data: {path}: no answer from the Hub, using revision {sha} as before",
            file=sys.stderr,
        )
        return sha
    # The record only spares a later run the network: a cache that cannot be written is reported
    # when something is built in it.
    with suppress(OSError):
        record.parent.mkdir(parents=True, exist_ok=True)
        write_text(record, json.dumps(sha))
    return sha
