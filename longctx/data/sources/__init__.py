"""The sources that `data=` can name: check a configuration, and read the documents it means.

Importing this package registers the sources that come with longctx; `register` adds others.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Set
from dataclasses import MISSING, fields, replace
from itertools import islice
from pathlib import Path
from typing import Any

from longctx.config.data_config import DataConfig
from longctx.data.corpus import (
    SOURCES,
    Corpus,
    Document,
    Shard,
    Source,
    check_used,
    register,
    source_of,
)
from longctx.data.sources import embedded, hub, mix, needles, text  # noqa: F401

__all__ = [
    "SOURCES",
    "Corpus",
    "Document",
    "Shard",
    "Source",
    "check",
    "check_files",
    "check_overrides",
    "open_corpus",
    "pinned",
    "read_documents",
    "register",
]


def check(config: DataConfig) -> None:
    """Raise ValueError for the first key of `config` that its source cannot use; reads nothing."""
    config.validate()
    source = source_of(config)
    for item in fields(config):
        value = getattr(config, item.name)
        default = item.default if item.default_factory is MISSING else item.default_factory()
        if value not in (default, None, "", []):
            check_used(config, item.name, value)
    source.check(config)


def check_overrides(config: DataConfig, overrides: Mapping[str, str]) -> None:
    """`check`, and a ValueError for an override (data.KEY → value) that changes nothing.

    A saved configuration spells out every key, so this cannot be asked of its values.
    """
    check(config)
    if config.tokenizer is not None and "data.vocab_size" in overrides:
        raise ValueError(
            f"data.vocab_size={overrides['data.vocab_size']}: "
            f"data.tokenizer={config.tokenizer} has its own; leave one out"
        )
    overridden = {
        name.removeprefix("data."): value
        for name, value in overrides.items()
        if name.startswith("data.")
    }
    _check_effect("data", config, overridden)
    if config.mix:
        for name, (_, member) in mix.members(config).items():
            _check_effect(f"data.mix.{name}", member, config.mix[name])


def _check_effect(place: str, config: DataConfig, overridden: Mapping[str, Any]) -> None:
    reasons = source_of(config).without_effect(config)
    for name, value in overridden.items():
        check_used(config, name, value, place)
        if name in reasons:
            raise ValueError(
                f"{place}.{name}={value}: has no effect, because {reasons[name]}; leave it out"
            )


def check_files(config: DataConfig) -> None:
    """Raise OSError for the first path of documents or tokenizer that is not there; reads none."""
    source_of(config).check_files(config)
    if config.tokenizer is not None and not Path(config.tokenizer).expanduser().exists():
        raise FileNotFoundError(
            f"data.tokenizer={config.tokenizer}: no such file or folder; give a tokenizer.json, or "
            "a folder that has one"
        )


def pinned(config: DataConfig) -> DataConfig:
    """Return the configuration with absolute paths, and commits as revisions.

    It means the same documents from every folder, and after every push to the Hub.
    """
    own = replace(config, cache=_absolute(config.cache), tokenizer=_absolute(config.tokenizer))
    return source_of(own).pinned(own)


def open_corpus(config: DataConfig, without: Set[bytes] = frozenset()) -> Corpus:
    """Find the documents that `config` names; ValueError or OSError, one line, if it cannot be.

    Generated documents hold no text whose `content_key` is in `without`.
    """
    check(config)
    corpus = source_of(config).open(config, without)
    limit = config.documents
    if limit is None:
        return corpus
    shard = Shard("first", lambda: islice(corpus.documents(), limit))
    total = limit if corpus.total is None else min(limit, corpus.total)
    return Corpus([corpus.identity, limit], [shard], total)


def read_documents(config: DataConfig) -> Iterator[Document]:
    """Read the documents of `config` as plain text, in their fixed order."""
    return open_corpus(config).documents()


def _absolute(path: str | None) -> str | None:
    return os.path.abspath(os.path.expanduser(path)) if path else path
