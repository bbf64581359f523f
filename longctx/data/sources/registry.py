"""The door behind `data=NAME`, and the checks of a data configuration.

A source is a class with its keys of `data` and a method that opens its documents; `register` shows
a whole one. Importing this stays cheap, because every command line is checked by it: datasets,
pyarrow, tokenizers and torch are imported by the functions that read.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Set
from dataclasses import fields, replace
from itertools import islice
from pathlib import Path
from typing import Any

from longctx.config.data_config import SOURCES, DataConfig
from longctx.config.fields import refuse, shown
from longctx.data.documents import Corpus, Document, Shard
from longctx.data.length_ranges import check_selection


class Source(ABC):
    """The description of a source, and how to open it.

    keys: the keys of `data` that this source uses. Keys that no source lists, such as
    `data.tokenizer`, go with all of them; keys that only others list are refused.
    has_answers: its documents mark their targets, by `Document.spans`.
    generated: its documents are made from those of another source. A mix opens it last, without
    the texts that validate.
    """

    keys: Set[str] = frozenset()
    generated: bool = False
    has_answers: bool = False

    def keys_of(self, config: DataConfig) -> Set[str]:
        """Return the keys used with this configuration; a mix asks its members."""
        return self.keys

    def check(self, config: DataConfig) -> None:  # noqa: B027 (nothing to check by default)
        """Raise ValueError for the first key that cannot be right; read nothing."""

    def check_files(self, config: DataConfig) -> None:  # noqa: B027 (most read none)
        """Raise OSError for the first path of this machine that is missing. The beginnings of its
        files may be read, with no large library.
        """

    def left_out(self, config: DataConfig) -> str:
        """Return which files are not read and how to read them, "" if all are."""
        return ""

    def pinned(self, config: DataConfig) -> DataConfig:
        """Return the configuration with absolute paths and, for the Hub, a commit as revision."""
        return config

    @abstractmethod
    def open(self, config: DataConfig, without: Set[bytes]) -> Corpus:
        """Find the documents. Raise ValueError or OSError, one line, if that cannot work.

        without: the `exact_key` of each text that generated documents must not contain.
        """


def register(name: str) -> Callable[[type[Source]], type[Source]]:
    """Make a `Source` available as `data=name`. A file of the user's own may hold one:

        from pathlib import Path
        from longctx.data.sources import Corpus, Document, Shard, Source, register

        @register("poems")
        class Poems(Source):
            keys = frozenset({"path"})  # of `data`; another key that is given is refused

            def open(self, config, without):
                file = Path(config.path)

                def read():
                    for number, text in enumerate(file.read_text().split("***"), start=1):
                        yield Document(f"{file.name}:{number}", text)

                # Tokens are cached under the identity: it must change with the documents.
                return Corpus([str(file), file.stat().st_mtime_ns], [Shard(file.name, read)])

    Such a source is split, packed, mixed with others and resumed like those of longctx. Documents
    come in the same order each time; `read` opens the files anew at each call.
    """

    def add(source: type[Source]) -> type[Source]:
        unknown = set(source.keys) - {item.name for item in fields(DataConfig)}
        assert not unknown, f"{source.__name__}.keys: no fields of DataConfig: {unknown}"
        SOURCES.register(name, source())
        return source

    return add


def check(config: DataConfig) -> None:
    """Raise ValueError for the first key of `config` that its source cannot use; read nothing."""
    config.validate()
    usual = DataConfig()
    for item in fields(config):
        value = getattr(config, item.name)
        # A saved configuration spells out every default, also of keys that others use.
        if value not in (getattr(usual, item.name), None, "", []):
            check_used(config, item.name, value)
    check_selection(config)
    SOURCES[config.source].check(config)


def check_used(config: DataConfig, name: str, value: Any, prefix: str = "data") -> None:
    """Raise ValueError if `prefix`.`name`=`value` is a key that only other sources use."""
    users = [f"data={other}" for other, source in SOURCES.items() if name in source.keys]
    is_foreign = users and name not in SOURCES[config.source].keys_of(config)
    message = f"{prefix}.{name}={shown(value)}: data={config.source} does not use it"
    refuse((is_foreign, f"{message}; leave it out, or use {' or '.join(users)}"))


def check_files(config: DataConfig) -> None:
    """Raise OSError for the first missing path of documents or tokenizer, ValueError for a file
    with a broken beginning.
    """
    SOURCES[config.source].check_files(config)
    for key in ("tokenizer", "filter"):
        path = getattr(config, key)
        if path not in (None, "gzip") and not Path(path).expanduser().exists():
            what = "a tokenizer.json or a model's folder" if key == "tokenizer" else "a .jsonl file"
            raise FileNotFoundError(f"data.{key}={path}: no such file or folder; give {what}")


def pinned(config: DataConfig) -> DataConfig:
    """Return the configuration with absolute paths, and commits as revisions."""
    # It means the same documents from every folder, and after every push to the Hub
    own = replace(config, cache=absolute(config.cache), tokenizer=absolute(config.tokenizer))
    own.filter = config.filter if config.filter == "gzip" else absolute(config.filter)
    return SOURCES[own.source].pinned(own)


def absolute(path: str | None) -> str | None:
    """Return a path that is the same from every folder."""
    return os.path.abspath(os.path.expanduser(path)) if path else path


def open_corpus(config: DataConfig, without: Set[bytes] = frozenset()) -> Corpus:
    """Find the documents that `config` names; raise ValueError or OSError, one line, if it fails.

    Generated documents hold no text whose `exact_key` is in `without`.
    """
    source, limit = SOURCES[config.source], config.documents
    corpus: Corpus = source.open(config, without)
    # An edited plugin may read other texts: its module is named by the hash of its file
    if not (module := type(source).__module__).startswith("longctx."):
        corpus = replace(corpus, identity=[corpus.identity, module])
    if limit is None:
        return corpus
    shard = Shard("first", lambda: islice(corpus.documents(), limit))
    total = limit if corpus.total is None else min(limit, corpus.total)
    return Corpus([corpus.identity, limit], [shard], total)


def read_documents(config: DataConfig) -> Iterator[Document]:
    """Read the documents of `config` as plain text, in their fixed order."""
    check(config)
    return open_corpus(config).documents()


def state_of(name: str, file: str | Path) -> tuple[str, int, int, int]:
    """Return the name, size and times of a file, by which tokens are cached."""
    # The time of the last change is of the file on this disk. A copy, or a file unpacked with the
    # modification time of another one, has its own.
    status = os.stat(file)
    return name, status.st_size, status.st_mtime_ns, status.st_ctime_ns
