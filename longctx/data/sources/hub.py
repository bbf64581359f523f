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
from typing import TYPE_CHECKING, Any, NamedTuple

import huggingface_hub

from longctx import hub_snapshot, untrusted
from longctx.config.data_config import DataConfig
from longctx.config.fields import refuse
from longctx.data.cache import fingerprint
from longctx.data.documents import Corpus, Document, Shard
from longctx.data.sources.registry import Source, register, state_of
from longctx.data.sources.rows import chat_template, documents_in
from longctx.files import one_line, write_text

if TYPE_CHECKING:
    from longctx.data.chat import Template

_BUILDERS = ("json", "csv", "parquet", "arrow", "text", "webdataset")


@register("hub")
class Hub(Source):
    """A data set by name, or a builder (`data.path=json`) and its `data.files`."""

    keys = frozenset(
        {"path", "name", "split", "files", "revision", "text_column", "chat", "preferences"}
    )

    def check(self, config: DataConfig) -> None:
        paths = config.paths()
        example = "data=hub reads a data set by name, data.path=OWNER/NAME"
        refuse(
            (not paths, f"data.path is not set; {example}"),
            (len(paths) > 1, f"data.path={config.path}: data=hub takes one name; give one"),
        )

    def ignored(self, config: DataConfig, name: str) -> str:
        dataset = _dataset(config)
        is_unused = name == "revision" or (name == "name" and dataset.path in _BUILDERS)
        if dataset.is_local and is_unused:
            return "the files are on this machine"
        return super().ignored(config, name)

    def check_files(self, config: DataConfig) -> None:
        _dataset(config).local_files()

    def pinned(self, config: DataConfig) -> DataConfig:
        dataset = _dataset(config)
        if not dataset.is_local:
            return replace(config, revision=_revision(dataset.path, config))
        path = dataset.path if dataset.path in _BUILDERS else os.path.abspath(dataset.path)
        files = [file if "://" in file else os.path.abspath(file) for file in dataset.files]
        return replace(config, path=path, files=files or None)

    def open(self, config: DataConfig, without: Set[bytes]) -> Corpus:
        dataset = _dataset(config)
        local = dataset.local_files()
        revision = config.revision if dataset.is_local else _revision(dataset.path, config)
        identity = [
            *(dataset.path, config.name, config.split, config.text_column),
            *(revision, dataset.files, local),
        ]
        template = chat_template(config)
        if template is not None:
            identity.append(template.fingerprint)
        read = partial(_read, dataset, revision, config, template)
        return Corpus(identity, [Shard(dataset.path, read)])


class _Dataset(NamedTuple):
    """The name, builder or folder of data.path, and the files of data.files.

    Files of a builder or a folder are on this machine, other files are in the data set of the Hub.
    """

    path: str
    files: list[str]
    is_local: bool

    def local_files(self) -> list[tuple[str, int, int, int]]:
        """Return (file, bytes, times) of every file on this machine; raise FileNotFoundError for
        one that is missing.
        """
        patterns = self.files or [f"{glob.escape(self.path)}/**"]
        found: list[str] = []
        for pattern in patterns if self.is_local else []:
            if "://" in pattern:
                continue
            matches = sorted(filter(os.path.isfile, glob.glob(pattern, recursive=True)))
            if not matches:
                raise FileNotFoundError(f"data.files={pattern}: no such file; give one that exists")
            found += matches
        return [state_of(file, file) for file in found]


def _dataset(config: DataConfig) -> _Dataset:
    path = os.path.expanduser(config.paths()[0])
    files = [os.path.expanduser(file) for file in config.data_files()]
    if path in _BUILDERS:
        problem = f"data.path={path}: a builder of local files; name them with data.files="
        refuse((not files, problem))
        return _Dataset(path, files, is_local=True)
    is_folder = os.path.isdir(path)
    if is_folder:
        files = [file if "://" in file else os.path.join(path, file) for file in files]
    return _Dataset(path, files, is_folder)


def _read(
    dataset: _Dataset, revision: str | None, config: DataConfig, template: Template | None
) -> Iterator[Document]:
    # Whoever streams a data set cannot mend the text in it.
    config = replace(config, errors="replace")
    rows = enumerate(_stream(dataset, revision, config), start=1)
    place = f"data.path={dataset.path}: row"
    named = ((f"{dataset.path}:{number}", f"{place} {number}", row) for number, row in rows)
    yield from documents_in(named, config, template)


def _stream(
    dataset: _Dataset, revision: str | None, config: DataConfig
) -> Iterator[Mapping[str, Any]]:
    import datasets  # 1.5 s

    datasets.disable_progress_bars()
    try:
        yield from datasets.load_dataset(
            dataset.path,
            config.name,
            split=config.split,
            data_files=dataset.files or None,
            revision=revision,
            streaming=True,
        )
    except Exception as error:  # each builder and transport raises its own
        # datasets lists the splits that exist
        if "Bad split" in str(error):
            raise ValueError(f"data.split={config.split}: {one_line(error)}") from error
        if dataset.is_local:
            raise ValueError(f"data.path={dataset.path}: {one_line(error)}") from error
        raise hub_snapshot.failure(f"data.path={dataset.path}", error) from error


def _revision(path: str, config: DataConfig) -> str | None:
    """Return the commit that `config` means at the Hub now, or last time if there is no network.

    A commit stands for itself, and the Hub is not asked.
    """
    if config.revision is not None and hub_snapshot.COMMIT.fullmatch(config.revision):
        return config.revision
    record = config.cache_folder() / "revisions" / f"{fingerprint([path, config.revision])}.json"
    try:
        # 10 s: without a network, a run soon takes the commit seen last.
        api = huggingface_hub.HfApi()
        sha: str | None = api.dataset_info(path, revision=config.revision, timeout=10).sha
    except Exception as error:  # transports differ between versions of the library
        if hub_snapshot.is_refused(error) or not record.exists():
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
