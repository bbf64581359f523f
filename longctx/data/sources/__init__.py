"""Where documents come from. One source, one file; each opens into a Corpus, which can be read
again and again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Set
from dataclasses import dataclass
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from longctx.config.data_config import DataConfig

if TYPE_CHECKING:
    from longctx.data.chat import Template


class Document(NamedTuple):
    """A text and what to call it: its path, with `:line` or `:row` where a file holds many."""

    name: str
    text: str


def key(text: str) -> bytes:
    """16 bytes that stand for a text."""
    return hashlib.sha256(text.encode()).digest()[:16]


class Part(NamedTuple):
    """A file, or whatever a source is made of, and how to read its documents from the start."""

    name: str
    read: Callable[[], Iterator[Document]]


@dataclass(frozen=True)
class Corpus:
    """Parts in a fixed order. `identity` is JSON-able and changes whenever the documents may have
    changed.
    """

    identity: Any
    parts: list[Part]
    total: int | None  # documents in all, where that is known before reading

    def documents(self) -> Iterator[Document]:
        for part in self.parts:
            yield from part.read()

    def sample(self, characters: int) -> Iterator[str]:
        """Texts of about `characters` in all, from parts in an order that is random but always the
        same.

        No part gives more than an eighth, unless there are fewer than eight.
        """
        quota = max(characters // len(self.parts), characters // 8)
        for part in sorted(
            self.parts, key=lambda part: hashlib.sha256(part.name.encode()).digest()
        ):
            left = min(quota, characters)
            for document in part.read():
                yield document.text[:left]
                used = min(left, len(document.text))
                left, characters = left - used, characters - used
                if left <= 0:
                    break
            if characters <= 0:
                return


def open_corpus(config: DataConfig, without: Set[bytes] = frozenset()) -> Corpus:
    """Find the documents that `config` names; raises ValueError or OSError with one line if that
    cannot work.

    Generated documents are made of others, but of none whose `key` is in `without`.
    """
    config.validate()
    module = import_module(f"longctx.data.sources.{config.source}")
    corpus: Corpus = (
        module.open_corpus(config, without)
        if config.source == "needles"
        else module.open_corpus(config)
    )
    limit = config.documents
    if limit is None:
        return corpus
    part = Part("first", lambda: islice(corpus.documents(), limit))
    total = limit if corpus.total is None else min(limit, corpus.total)
    return Corpus([corpus.identity, limit], [part], total)


def read_documents(config: DataConfig) -> Iterator[Document]:
    """The documents of `config` as plain text, in their fixed order, read as they are asked for."""
    return open_corpus(config).documents()


def template_of(config: DataConfig) -> Template:
    """The chat template in the folder of `config.tokenizer`."""
    from longctx.data.chat import Template

    if config.tokenizer is None:
        raise ValueError(
            "data.chat=true: needs a tokenizer with a chat template; give its folder with data.tokenizer=, or init="
        )
    place = Path(config.tokenizer).expanduser()
    return Template(place if place.is_dir() else place.parent)
