"""A source of documents: a class that declares its keys of `data`, checks them, opens a corpus.

A new source is one file in `longctx/data/sources/` with a `Source` under `@register("name")`, a
configs/data/name.yaml, and a test. Importing this module or a source stays cheap, because every
command line is checked by them: datasets, pyarrow and tokenizers are imported by what reads.
"""

from __future__ import annotations

import dataclasses
import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Set
from typing import Any, NamedTuple

from longctx.config.data_config import SOURCES, DataConfig


class Document(NamedTuple):
    """A text and what to call it: its path, with `:line` or `:row` where a file holds many."""

    name: str
    text: str


class Shard(NamedTuple):
    """A file, or another unit of a corpus, and how to read its documents from the start."""

    name: str
    read: Callable[[], Iterator[Document]]


@dataclasses.dataclass(frozen=True)
class Corpus:
    """Shards in a fixed order, which can be read again and again.

    `identity` is JSON-able and changes whenever the documents may have changed.
    """

    identity: Any
    shards: list[Shard]
    total: int | None  # documents in all, where that is known before reading

    def documents(self) -> Iterator[Document]:
        """Read every document."""
        for shard in self.shards:
            yield from shard.read()

    def sample(self, characters: int) -> Iterator[str]:
        """Read texts of about `characters` in all, from shards in a shuffled but fixed order.

        No shard gives more than an eighth, unless there are fewer than eight.
        """
        quota = max(characters // len(self.shards), characters // 8)
        for shard in sorted(self.shards, key=lambda shard: _digest(shard.name)):
            left = min(quota, characters)
            for document in shard.read():
                yield document.text[:left]
                used = min(left, len(document.text))
                left -= used
                characters -= used
                if left <= 0:
                    break
            if characters <= 0:
                return


class Source(ABC):
    """Where documents come from. `DataConfig.source` names one that was registered.

    keys: the keys of `data` that this source uses. A key that no source lists, such as
    `data.tokenizer`, goes with all of them; one that only others list is refused here.
    generated: its documents are made of those of another source. A mix opens it last, so that it
    can leave out the texts that validate.
    """

    keys: Set[str] = frozenset()
    generated: bool = False

    def keys_of(self, config: DataConfig) -> Set[str]:
        """The keys used with this configuration; a combination asks its members."""
        return self.keys

    def check(self, config: DataConfig) -> None:  # noqa: B027 (nothing to check by default)
        """Raise ValueError for the first key that cannot be right; reads nothing."""

    def check_files(self, config: DataConfig) -> None:  # noqa: B027 (most read none)
        """Raise OSError for the first path of this machine that is not there; reads no file."""

    def without_effect(self, config: DataConfig) -> Mapping[str, str]:
        """Keys of this source that change nothing with this configuration, each with the reason.

        Asked only about keys that the user gave, and may look at the names of files.
        """
        return {}

    def pinned(self, config: DataConfig) -> DataConfig:
        """Return the configuration with absolute paths and, for the Hub, a commit as revision."""
        return config

    @abstractmethod
    def open(self, config: DataConfig, without: Set[bytes]) -> Corpus:
        """Find the documents. ValueError or OSError, one line, if that cannot work.

        `without` holds the `content_key` of texts that generated documents must not contain.
        """


def register(name: str) -> Callable[[type[Source]], type[Source]]:
    """Make a `Source` available as `data.source=name`."""

    def add(source: type[Source]) -> type[Source]:
        unknown = source.keys - {item.name for item in dataclasses.fields(DataConfig)}
        assert not unknown, f"{source.__name__}.keys: no fields of DataConfig: {unknown}"
        SOURCES[name] = source()
        return source

    return add


def source_of(config: DataConfig) -> Source:
    """Return the source that `config` names; ValueError if there is none of this name."""
    if config.source not in SOURCES:
        raise ValueError(
            f"data.source={config.source}: not a source; use one of {', '.join(SOURCES)}"
        )
    return SOURCES[config.source]


def check_used(config: DataConfig, name: str, value: Any, place: str = "data") -> None:
    """Raise ValueError if `place`.`name`=`value` is a key that only other sources use."""
    users = [other for other, source in SOURCES.items() if name in source.keys]
    if users and name not in source_of(config).keys_of(config):
        shown = str(value).lower() if isinstance(value, bool) else value
        raise ValueError(
            f"{place}.{name}={shown}: data={config.source} does not use it; leave it out, "
            f"or use {' or '.join(f'data={user}' for user in users)}"
        )


def text_in(row: Mapping[str, Any], place: str, config: DataConfig) -> str:
    """Return the text of a row, "" for null: such a document is left out and counted."""
    column = config.text_column
    if column not in row:
        raise ValueError(
            f"{place}: no field '{column}' (there are: {', '.join(list(row)[:8])}); "
            "set data.text_column"
        )
    text = row[column]
    if text is not None and not isinstance(text, str):
        raise ValueError(
            f"{place}: '{column}' is {type(text).__name__}, expected a string; set data.text_column"
        )
    return text or ""


def content_key(text: str) -> bytes:
    """Return 16 bytes that stand for a text."""
    return _digest(text)[:16]


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()
