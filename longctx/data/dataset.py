"""From a DataConfig to rows: tokenizer, tokens, split and packing, each cached by a fingerprint of
what it depends on.

tokenizers/KEY    BPE trained on the corpus           key: the corpus' identity, vocabulary size
documents/KEY     documents as tokens (Arrow)         key: the corpus' identity, tokenizer
packings/KEY      which piece lies in which row       key: documents, split, seq_len
"""

from __future__ import annotations

from collections.abc import Iterator, Set
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from longctx.config.data_config import DataConfig
from longctx.data.cache import cached, fingerprint
from longctx.data.duplicates import validates
from longctx.data.packing import Packing, pack
from longctx.data.progress import Progress
from longctx.data.sources import open_corpus
from longctx.data.store import NothingToPredict, Store, build
from longctx.data.tokenizer import Tokenizer, train

if TYPE_CHECKING:
    from torch.utils.data import Sampler

    from longctx.data.mix import Mixture
    from longctx.data.rows import Rows

_VERSION = (
    1  # of what is in the cache; raised when the same documents would become other tokens or rows
)
_SAMPLE = 16 << 20  # characters that the BPE is trained on
SPLITS = ("train", "val")


class EncodedDocument(NamedTuple):
    """A whole document, uncut: its tokens (tokens,) int64, the last one end-of-text, and its size
    in UTF-8 bytes.
    """

    name: str
    ids: np.ndarray
    n_bytes: int


class Part(NamedTuple):
    """A source of a mix, tokenized and split."""

    tokenizer: Tokenizer
    store: Store
    validates: np.ndarray  # (documents,) bool


class Data:
    """A data set at one row length: `train` and `val` rows, the tokenizer, whole documents, and
    counts of it all.
    """

    def __init__(self, config: DataConfig, seq_len: int, part: Part | None = None):
        """`part` is what `Mixture` knows of a source of its own: else the documents are tokenized
        and split here.
        """
        if seq_len < 2:
            raise ValueError(f"seq_len={seq_len}: a row holds at least 2 tokens")
        self.config, self.seq_len = config, seq_len
        self.tokenizer, self.store = (part.tokenizer, part.store) if part else tokenize(config)
        validating = part.validates if part else split(config, self.store)
        self.split = {"train": np.flatnonzero(~validating), "val": np.flatnonzero(validating)}
        content = [self.store.content(), self.tokenizer.fingerprint, self.split["val"].tolist()]
        self.fingerprint: str = fingerprint([_VERSION, *content])
        self.packings = self._pack()

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of every document."""
        return self.store.lengths

    @property
    def train(self) -> Rows:
        return self._rows("train")

    @property
    def val(self) -> Rows:
        return self._rows("val")

    def order(self, seed: int, rank: int, world_size: int, consumed: int) -> Sampler[int]:
        """The endless order of the rows of `train`."""
        from longctx.data.sampler import SampleStream

        return SampleStream(len(self.train), seed, rank, world_size, consumed)

    def documents(self, split: str = "val") -> Iterator[EncodedDocument]:
        """Whole documents of `train` or `val`, uncut, in their fixed order."""
        if split not in SPLITS:
            raise ValueError(f"split={split}: use train or val")
        for document in self.split[split].tolist():
            ids = self.store.tokens(document).astype(np.int64)
            yield EncodedDocument(self.store.name(document), ids, int(self.store.n_bytes[document]))

    def summary(self) -> dict[str, Any]:
        """Counts for a table or a log; `efficiency` is the share of row positions that are not
        padding.
        """
        result: dict[str, Any] = {
            "source": self.config.source,
            "documents": len(self.store),
            "documents_dropped": self.store.dropped,
            "near_duplicates": len(self.store) - len(np.unique(self.store.groups)),
            "bytes": int(self.store.n_bytes.sum()),
            "tokens": int(self.store.lengths.sum()),
            "vocab_size": self.tokenizer.vocab_size,
            "seq_len": self.seq_len,
        }
        for split in SPLITS:
            result[f"{split}_documents"] = len(self.split[split])
            result[f"{split}_tokens"] = int(self.store.lengths[self.split[split]].sum())
            result[f"{split}_rows"] = self.packings[split].rows
            result[f"{split}_efficiency"] = round(self.packings[split].efficiency(self.seq_len), 6)
        return result

    def _rows(self, split: str) -> Rows:
        from longctx.data.rows import Rows

        return Rows(self.store, self.packings[split], self.seq_len, self.tokenizer.eos_id)

    def _pack(self) -> dict[str, Packing]:
        def write(folder: Path) -> None:
            for split, documents in self.split.items():
                pack(self.store.lengths[documents], self.seq_len, documents).save(
                    folder / f"{split}.npz"
                )

        key = fingerprint([self.fingerprint, self.seq_len])
        folder = cached(self.config.cache_folder() / "packings" / key, write)
        return {split: Packing.load(folder / f"{split}.npz") for split in SPLITS}


def load(config: DataConfig, seq_len: int) -> Data | Mixture:
    """Open a data set, or a mix of several, in rows of `seq_len` tokens, building what the cache
    lacks.

    Raises ValueError or OSError with one line that names the key or file, whatever is wrong with
    the documents.
    """
    config.validate()
    if config.source == "mix":
        from longctx.data.mix import Mixture

        return Mixture(config, seq_len)
    return Data(config, seq_len)


def tokenize(config: DataConfig, without: Set[bytes] = frozenset()) -> tuple[Tokenizer, Store]:
    """The tokenizer and the documents in its tokens; generated ones hold no text whose key (see
    `Store.keys`) is in `without`.
    """
    corpus = open_corpus(config, without)
    identity = [_VERSION, config.source, corpus.identity, *(["chat"] if config.chat else [])]
    cache = config.cache_folder()
    if config.tokenizer is None:

        def train_here(folder: Path) -> None:
            with Progress(f"training a tokenizer of {config.vocab_size:,} tokens", None):
                train(corpus.sample(_SAMPLE), config.vocab_size).save(folder / "tokenizer.json")

        key = fingerprint([identity, config.vocab_size])
        tokenizer = Tokenizer.load(cached(cache / "tokenizers" / key, train_here))
    else:
        tokenizer = Tokenizer.load(config.tokenizer)

    def encode(folder: Path) -> None:
        try:
            build(folder, corpus, tokenizer, config.chat)
        except NothingToPredict as error:
            where = f"data.path={config.path}" if config.paths() else f"data={config.source}"
            raise ValueError(f"{where}: {error}, so there is nothing to predict") from error

    key = fingerprint([identity, tokenizer.fingerprint, "signatures"])
    return tokenizer, Store(cached(cache / "documents" / key, encode))


def split(config: DataConfig, store: Store) -> np.ndarray:
    """Which documents validate, (documents,) bool."""
    return validates(store.hashes(), store.groups, config.val_fraction)
