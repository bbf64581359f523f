"""Several sources as one data set, in which every row comes from a source drawn by weight; and
`load`, which opens one source or several.

A weight is a share of the rows; what a source's documents fill of them is in its counts. Validation
reads the rows of all sources, each as many as it has. The order of the rows is in `sampler`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from longctx.config.data_config import DataConfig
from longctx.data.cache import fingerprint
from longctx.data.corpus import SOURCES
from longctx.data.dataset import (
    SAMPLE,
    SPLITS,
    Data,
    EncodedDocument,
    SplitDocuments,
    split_documents,
    tokenize,
    train_tokenizer,
)
from longctx.data.sources import check, mix, open_corpus
from longctx.data.split import by_bytes
from longctx.data.store import Store
from longctx.data.tokenizer import Tokenizer

if TYPE_CHECKING:
    from torch.utils.data import Sampler

    from longctx.data.rows import Joined


def load(config: DataConfig, seq_len: int) -> Data | Mixture:
    """Open a data set, or a mix of several, in rows of `seq_len` tokens.

    Builds what the cache lacks. Raises ValueError or OSError in one line that names the key or
    file, if something is wrong with the documents.
    """
    check(config)
    return Mixture(config, seq_len) if config.mix else Data(config, seq_len)


class Mixture:
    """One data set of several sources, with the members of `Data`.

    parts: the data set of each source by name, in the order of the configuration.
    """

    def __init__(self, config: DataConfig, seq_len: int) -> None:
        members = mix.members(config)
        self.config = config
        self.seq_len = seq_len
        self.weights = {name: weight for name, (weight, _) in members.items()}
        sources = {name: source for name, (_, source) in members.items()}
        tokenizer = config.tokenizer or _train_on_all(sources, config)
        sources = {name: replace(one, tokenizer=tokenizer) for name, one in sources.items()}
        documents = _split_together(sources)
        self.parts: dict[str, Data] = {}
        for name, source in sources.items():
            with _name_in_errors(name):
                self.parts[name] = Data(source, seq_len, documents[name])
        self.tokenizer: Tokenizer = next(iter(self.parts.values())).tokenizer
        content = [
            [name, self.weights[name], part.fingerprint] for name, part in self.parts.items()
        ]
        self.fingerprint: str = fingerprint(["mix 1", content])

    def at(self, seq_len: int) -> Mixture:
        """Return the same documents and split in rows of `seq_len`; no file of theirs is opened."""
        other = copy(self)
        other.seq_len = seq_len
        other.parts = {name: part.at(seq_len) for name, part in self.parts.items()}
        return other

    def identity(self) -> dict[str, str]:
        """Describe what all ranks must agree on, see `Data.identity`, of every source."""
        return {
            f"mix.{name} {key}": value
            for name, part in self.parts.items()
            for key, value in part.identity().items()
        }

    @property
    def lengths(self) -> np.ndarray:
        """Return the tokens of every document."""
        return np.concatenate([part.lengths for part in self.parts.values()])

    @property
    def train(self) -> Joined:
        return self._rows("train")

    @property
    def val(self) -> Joined:
        return self._rows("val")

    @property
    def split(self) -> dict[str, np.ndarray]:
        """Return the documents of train and val, numbered through over the sources."""
        parts = list(self.parts.values())
        starts = np.cumsum([0, *(len(part.store) for part in parts[:-1])])
        return {
            split: np.concatenate(
                [start + part.split[split] for start, part in zip(starts, parts, strict=True)]
            )
            for split in SPLITS
        }

    def order(self, seed: int, rank: int, world_size: int, consumed: int) -> Sampler[int]:
        """Return the endless order of the rows of `train`."""
        from longctx.data.rows import MixStream

        rows = [len(part.train) for part in self.parts.values()]
        return MixStream(rows, list(self.weights.values()), seed, rank, world_size, consumed)

    def documents(self, split: str = "val") -> Iterator[EncodedDocument]:
        """Read the uncut documents of `train` or `val` of every source."""
        for name, part in self.parts.items():
            for document in part.documents(split):
                yield document._replace(name=f"{name}/{document.name}")

    def summary(self) -> dict[str, Any]:
        """Counts over all sources, and under `mix` those of each."""
        each = {name: part.summary() for name, part in self.parts.items()}
        first = next(iter(each.values()))
        sums = {
            key: sum(one[key] for one in each.values())
            for key, value in first.items()
            if isinstance(value, int)
        }
        counts: dict[str, Any] = {"source": "mix"} | sums
        counts |= {"vocab_size": self.tokenizer.vocab_size, "seq_len": self.seq_len}
        for split in SPLITS:
            places = counts[f"{split}_rows"] * self.seq_len
            share = round(counts[f"{split}_tokens"] / places, 6) if places else 1.0
            counts[f"{split}_efficiency"] = share
        mixed = {name: {"weight": self.weights[name]} | one for name, one in each.items()}
        return counts | {"mix": mixed}

    def _rows(self, split: str) -> Joined:
        from longctx.data.rows import Joined

        return Joined([getattr(part, split) for part in self.parts.values()])


@contextmanager
def _name_in_errors(name: str) -> Iterator[None]:
    try:
        yield
    except (ValueError, OSError) as error:
        raise ValueError(f"data.mix.{name}: {error}") from error


def _split_together(sources: dict[str, DataConfig]) -> dict[str, SplitDocuments]:
    """Tokenize and split every source so that no text is on both sides.

    Near-duplicates in several sources lie on one side; generated documents have no text in them
    that validates.
    """
    encoded: dict[str, tuple[Tokenizer, Store]] = {}
    for name, source in sources.items():
        if not SOURCES[source.source].generated:
            with _name_in_errors(name):
                encoded[name] = tokenize(source)
    documents: dict[str, SplitDocuments] = {}
    if encoded:
        stores = [store for _, store in encoded.values()]
        fractions = {f"data.mix.{name}": sources[name].val_fraction for name in encoded}
        splits = by_bytes(stores, fractions, next(iter(encoded.values()))[0])
        for (name, (tokenizer, store)), trained in zip(encoded.items(), splits, strict=True):
            documents[name] = SplitDocuments(tokenizer, store, trained)
    unseen = {key for one in documents.values() for key in one.unseen()}
    for name, source in sources.items():
        if name not in documents:
            with _name_in_errors(name):
                documents[name] = split_documents(source, unseen)
    return documents


def _train_on_all(sources: dict[str, DataConfig], config: DataConfig) -> str:
    """Return the folder of a tokenizer trained on a sample of all sources."""
    corpora = []
    for name, source in sources.items():
        with _name_in_errors(name):
            corpora.append(open_corpus(source))
    texts = (text for corpus in corpora for text in corpus.sample(SAMPLE // len(corpora)))
    identity = ["mix 1", [corpus.identity for corpus in corpora], config.vocab_size]
    return str(train_tokenizer(config, identity, texts))
