"""One source as a data set: its tokenizer, tokens, split and rows, each cached by a fingerprint of
what it depends on.

tokenizers/KEY    BPE trained on the corpus           key: the corpus' identity, vocabulary size
documents/KEY     documents as tokens (Arrow)         key: the corpus' identity, tokenizer
packings/KEY      which piece lies in which row       key: documents, split, seq_len

torch is imported by what returns rows: to describe a data set does not need it, and it takes 3 s.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Set
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from longctx.config.data_config import DataConfig
from longctx.data.cache import cached, fingerprint
from longctx.data.packing import Packing, pack
from longctx.data.sources import open_corpus
from longctx.data.split import by_bytes
from longctx.data.store import Store, build, progress
from longctx.data.tokenizer import Tokenizer, train

if TYPE_CHECKING:
    from torch.utils.data import Sampler

    from longctx.data.rows import Rows

# Of what is in the cache; raised when the same documents would become other tokens or rows.
_VERSION = 1
SAMPLE = 16 << 20  # characters that a BPE is trained on
SPLITS = ("train", "val")


class EncodedDocument(NamedTuple):
    """A document of a split, or the part of one that is in it: tokens (tokens,) int64, at the end
    of a document end-of-text, and UTF-8 bytes of its text.

    scored: which tokens of a conversation are learned, (tokens,) bool; None: all of a text.
    """

    name: str
    ids: np.ndarray
    n_bytes: int
    scored: np.ndarray | None = None


class SplitDocuments(NamedTuple):
    """The tokenized documents of a source.

    trained: (documents,) int64, how many tokens of each are trained on; the rest validates.
    """

    tokenizer: Tokenizer
    store: Store
    trained: np.ndarray

    def unseen(self) -> set[bytes]:
        """Return the keys of documents that validate, whole or in part."""
        return {key.tobytes() for key in self.store.keys[self.trained < self.store.lengths]}


class Data:
    """A data set at one row length: `train` and `val` rows, tokenizer, uncut documents, counts."""

    def __init__(self, config: DataConfig, seq_len: int, documents: SplitDocuments | None = None):
        """Tokenize and split the documents, unless a mix has done so: then take its `documents`."""
        if seq_len < 2:
            raise ValueError(f"seq_len={seq_len}: a row holds at least 2 tokens; give more")
        self.config = config
        self.seq_len = seq_len
        self.tokenizer, self.store, self.trained = documents or split_documents(config)
        validates = self.trained < self.store.lengths
        self.split = {"train": np.flatnonzero(self.trained), "val": np.flatnonzero(validates)}
        content = [self.store.content(), self.tokenizer.fingerprint, self.split["val"].tolist()]
        if (validates & (self.trained > 0)).any():
            content.append(self.trained[validates].tolist())
        self.fingerprint: str = fingerprint([_VERSION, *content])
        self.packings = self._pack()

    def at(self, seq_len: int) -> Data:
        """Return the same documents and split in rows of `seq_len`; no file of theirs is opened."""
        return Data(self.config, seq_len, SplitDocuments(self.tokenizer, self.store, self.trained))

    def identity(self) -> dict[str, str]:
        """Describe what all ranks must agree on: documents, tokenizer and split, not `seq_len`."""
        split = f"{len(self.split['train']):,} + {len(self.split['val']):,}"
        tokens = f"{int(self.store.lengths.sum()):,}"
        return {
            "documents": f"{len(self.store):,} of {tokens} tokens, {self.store.content()}",
            "tokenizer": f"{self.tokenizer.vocab_size:,} tokens, {self.tokenizer.fingerprint}",
            "split": f"{split} documents, {fingerprint(self.trained.tolist())}",
        }

    @property
    def lengths(self) -> np.ndarray:
        """Return the tokens of every document."""
        return self.store.lengths

    @property
    def train(self) -> Rows:
        return self._rows("train")

    @property
    def val(self) -> Rows:
        return self._rows("val")

    def order(self, seed: int, rank: int, world_size: int, consumed: int) -> Sampler[int]:
        """Return the endless order of the rows of `train`."""
        from longctx.data.rows import SampleStream

        return SampleStream(len(self.train), seed, rank, world_size, consumed)

    def documents(self, split: str = "val") -> Iterator[EncodedDocument]:
        """Read the documents of `train` or `val`, not cut into rows, in their fixed order."""
        starts, stops = self._span(split)
        for document, start, stop in zip(
            self.split[split].tolist(), starts.tolist(), stops.tolist(), strict=True
        ):
            ids = self.store.tokens(document, start, stop).astype(np.int64)
            name, n_bytes = self.store.name(document), int(self.store.n_bytes[document])
            if len(ids) < self.store.lengths[document]:
                name += " (end)" if start else " (before its end)"
                ends = (self.tokenizer.bos_id, self.tokenizer.eos_id)  # which are no text
                n_bytes = len(self.tokenizer.decode(x for x in ids if x not in ends).encode())
            yield EncodedDocument(name, ids, n_bytes, self.store.scored(document, start, stop))

    def tokens(self, split: str) -> int:
        """Count the tokens of `train` or `val`."""
        starts, stops = self._span(split)
        return int((stops - starts).sum())

    def summary(self) -> dict[str, Any]:
        """Counts for a table or a log; `efficiency` is the share of row positions that hold a
        document's token rather than padding.
        """
        counts: dict[str, Any] = {
            "source": self.config.source,
            "documents": len(self.store),
            "documents_dropped": self.store.dropped,
            "conversations_shortened": self.store.shortened,
            "near_duplicates": len(self.store) - len(np.unique(self.store.groups)),
            "bytes": int(self.store.n_bytes.sum()),
            "tokens": int(self.store.lengths.sum()),
            "vocab_size": self.tokenizer.vocab_size,
            "seq_len": self.seq_len,
        }
        for split in SPLITS:
            packing = self.packings[split]
            counts[f"{split}_documents"] = len(self.split[split])
            counts[f"{split}_tokens"] = self.tokens(split)
            counts[f"{split}_rows"] = packing.rows
            counts[f"{split}_efficiency"] = round(packing.efficiency(self.seq_len), 6)
        # Documents that are trained on and whose ends validate.
        counts["val_ends"] = int(np.count_nonzero(self.trained[self.split["val"]]))
        return counts

    def _span(self, split: str) -> tuple[np.ndarray, np.ndarray]:
        """Return first and last + 1 token of each document in `split`."""
        documents = self.split[split]
        trained = self.trained[documents]
        if split == "train":
            return np.zeros_like(trained), trained
        return trained, self.store.lengths[documents]

    def _rows(self, split: str) -> Rows:
        from longctx.data.rows import Rows

        return Rows(self.store, self.packings[split], self.seq_len, self.tokenizer.eos_id)

    def _pack(self) -> dict[str, Packing]:
        def write(folder: Path) -> None:
            for split, documents in self.split.items():
                starts, stops = self._span(split)
                # If the end validates, the last token that is trained on is only predicted. No row
                # shows it, or the first token that validates would be its target.
                shown = stops - starts - (stops < self.store.lengths[documents])
                packing = pack(shown, self.seq_len, documents, starts)
                packing.save(folder / f"{split}.npz")

        key = fingerprint([self.fingerprint, self.seq_len])
        folder = cached(self.config.cache_folder() / "packings" / key, write)
        return {split: Packing.load(folder / f"{split}.npz") for split in SPLITS}


def split_documents(config: DataConfig, without: Set[bytes] = frozenset()) -> SplitDocuments:
    """Tokenize the documents of one source and choose which of them validate."""
    tokenizer, store = tokenize(config, without)
    (trained,) = by_bytes([store], {"data": config.val_fraction}, tokenizer)
    return SplitDocuments(tokenizer, store, trained)


def tokenize(config: DataConfig, without: Set[bytes] = frozenset()) -> tuple[Tokenizer, Store]:
    """Open the tokenizer and the documents in its tokens, building what the cache lacks.

    Generated documents hold no text whose key (see `Store`) is in `without`.
    """
    corpus = open_corpus(config, without)
    identity = [_VERSION, config.source, corpus.identity, *(["chat"] if config.chat else [])]
    if config.tokenizer is None:
        folder = train_tokenizer(config, [identity, config.vocab_size], corpus.sample(SAMPLE))
        tokenizer = Tokenizer.load(folder)
    else:
        tokenizer = Tokenizer.load(config.tokenizer)

    def encode(folder: Path) -> None:
        place = f"data.path={config.path}" if config.paths() else f"data={config.source}"
        build(folder, place, corpus, tokenizer, config.chat)

    key = fingerprint([identity, tokenizer.fingerprint, "signatures"])
    return tokenizer, Store(cached(config.cache_folder() / "documents" / key, encode))


def train_tokenizer(config: DataConfig, identity: Any, texts: Iterable[str]) -> Path:
    """Train a tokenizer of `config.vocab_size` tokens on `texts`, which `identity` stands for.

    Returns its folder in the cache. `texts` are read only if it is not there yet.
    """

    def write(folder: Path) -> None:
        with progress(f"training a tokenizer of {config.vocab_size:,} tokens"):
            train(texts, config.vocab_size).save(folder / "tokenizer.json")

    return cached(config.cache_folder() / "tokenizers" / fingerprint(identity), write)
