"""Several sources as one data set: every row comes from a source drawn by weight.

Sample g is of the source that a hash of (seed, g) draws, and of that source the next row of its own
endless order (see `sampler.py`), so the whole order is a pure function of seed, weights and g. A
weight is a share of the rows; what a source's documents fill of them is in its counts. Validation
reads the rows of all sources, each as many as it has.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.data import Dataset, Sampler

from longctx.config.data_config import DataConfig
from longctx.data.cache import cached, fingerprint
from longctx.data.duplicates import groups, validates
from longctx.data.progress import Progress
from longctx.data.sampler import SampleStream, mixed, permutation
from longctx.data.sources import open_corpus
from longctx.data.tokenizer import Tokenizer, train

if TYPE_CHECKING:
    from longctx.data.dataset import Data, EncodedDocument, Part

_AHEAD = 1 << 16  # samples whose sources are drawn at one time
_SAMPLE = 16 << 20  # characters that the BPE is trained on


class Mixture:
    """What `Data` is for one source, for those of `config.mix`; `parts` are their data sets, in the
    order of their names.
    """

    def __init__(self, config: DataConfig, seq_len: int) -> None:
        from longctx.data.dataset import Data

        sources = config.sources()
        self.config, self.seq_len = config, seq_len
        tokenizer = config.tokenizer or _trained(
            {name: one for name, (_, one) in sources.items()}, config
        )
        self.weights = {name: weight for name, (weight, _) in sources.items()}
        self.parts: dict[str, Data] = {}
        known = _split_together(
            {name: replace(one, tokenizer=tokenizer) for name, (_, one) in sources.items()}
        )
        for name, (_, one) in sources.items():
            with _named(name):
                self.parts[name] = Data(replace(one, tokenizer=tokenizer), seq_len, known[name])
            if not len(self.parts[name].train):
                raise ValueError(f"data.mix.{name}: no document is left to train on")
        self.tokenizer: Tokenizer = next(iter(self.parts.values())).tokenizer
        described = [
            [name, self.weights[name], part.fingerprint] for name, part in self.parts.items()
        ]
        self.fingerprint: str = fingerprint(["mix 1", described])

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of every document."""
        return np.concatenate([part.lengths for part in self.parts.values()])

    @property
    def train(self) -> Joined:
        return Joined([part.train for part in self.parts.values()])

    @property
    def val(self) -> Joined:
        return Joined([part.val for part in self.parts.values()])

    @property
    def split(self) -> dict[str, np.ndarray]:
        """Documents of train and val, counted through over the sources."""
        starts = np.cumsum([0, *(len(part.store) for part in self.parts.values())])
        each = list(zip(starts, self.parts.values(), strict=False))
        return {
            split: np.concatenate([first + part.split[split] for first, part in each])
            for split in ("train", "val")
        }

    def order(self, seed: int, rank: int, world_size: int, consumed: int) -> Sampler[int]:
        """The endless order of the rows of `train`."""
        rows = [len(part.train) for part in self.parts.values()]
        return MixStream(rows, list(self.weights.values()), seed, rank, world_size, consumed)

    def documents(self, split: str = "val") -> Iterator[EncodedDocument]:
        """Whole documents of `train` or `val` of every source."""
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
        result: dict[str, Any] = {"source": "mix"} | sums
        result |= {"vocab_size": self.tokenizer.vocab_size, "seq_len": self.seq_len}
        for split in ("train", "val"):
            room = sum(one[f"{split}_rows"] for one in each.values()) * self.seq_len
            result[f"{split}_efficiency"] = (
                round(sums[f"{split}_tokens"] / room, 6) if room else 1.0
            )
        return result | {
            "mix": {name: {"weight": self.weights[name]} | one for name, one in each.items()}
        }


class Joined(Dataset[dict[str, torch.Tensor]]):
    """Rows of several data sets, one after the other."""

    def __init__(self, parts: Sequence[Any]) -> None:
        self.parts = list(parts)
        self.starts = np.cumsum([0, *(len(part) for part in self.parts)]).tolist()

    def __len__(self) -> int:
        return int(self.starts[-1])

    def __getitem__(self, row: int) -> dict[str, torch.Tensor]:
        if not 0 <= row < len(self):
            raise IndexError(f"row {row} of {len(self)}")
        part = bisect_right(self.starts, row) - 1
        found: dict[str, torch.Tensor] = self.parts[part][row - self.starts[part]]
        return found


class MixStream(Sampler[int]):
    """Endless stream of row numbers of a `Joined` of sources with `rows` rows each, drawn by
    `weights`.

    Rank r of `world_size` takes the samples consumed + r, consumed + r + world_size, …, as
    `SampleStream` does.
    """

    def __init__(
        self,
        rows: Sequence[int],
        weights: Sequence[float],
        seed: int,
        rank: int = 0,
        world_size: int = 1,
        consumed: int = 0,
    ):
        SampleStream(min(rows), seed, rank, world_size, consumed)  # the same checks
        self.rows, self.seed, self.rank, self.world_size, self.consumed = (
            list(rows),
            seed,
            rank,
            world_size,
            consumed,
        )
        share = np.cumsum(np.asarray(weights, dtype=np.float64) / sum(weights))
        self.bounds = np.minimum(share * 2.0**64, float(2**64 - 2048)).astype(np.uint64)
        self.bounds[-1] = np.iinfo(np.uint64).max
        self.starts = np.cumsum([0, *rows])

    def sources(self, first: int, count: int) -> np.ndarray:
        """(count,) the sources of the samples from `first` on."""
        keys = mixed([self.seed, 0x6D6978], np.arange(first, first + count, dtype=np.uint64))
        return np.searchsorted(self.bounds, keys, side="left")

    def __iter__(self) -> Iterator[int]:
        seen = self._before(self.consumed)
        orders: list[tuple[int, np.ndarray]] = [(-1, np.zeros(0, np.int64)) for _ in self.rows]
        first = self.consumed
        while True:
            for offset, source in enumerate(self.sources(first, _AHEAD).tolist()):
                epoch, position = divmod(seen[source], self.rows[source])
                seen[source] += 1
                if (first + offset - self.consumed) % self.world_size != self.rank:
                    continue
                if orders[source][0] != epoch:
                    orders[source] = (
                        epoch,
                        permutation(self.rows[source], self.seed + source, epoch),
                    )
                yield int(self.starts[source] + orders[source][1][position])
            first += _AHEAD

    def _before(self, end: int) -> list[int]:
        """How many of the samples before `end` are of each source."""
        counts = np.zeros(len(self.rows), np.int64)
        for first in range(0, end, 1 << 20):
            drawn = self.sources(first, min(1 << 20, end - first))
            counts += np.bincount(drawn, minlength=len(counts))
        return [int(count) for count in counts]


@contextmanager
def _named(name: str) -> Iterator[None]:
    """Mistakes in a source say which source it is."""
    try:
        yield
    except (ValueError, OSError) as error:
        raise ValueError(f"data.mix.{name}: {error}") from error


def _split_together(sources: dict[str, DataConfig]) -> dict[str, Part]:
    """Every source tokenized, and split so that what validates is trained on nowhere.

    Near-duplicates in several sources lie on one side, and train if one of them does; generated
    documents have no text in them that validates.
    """
    from longctx.data.dataset import Part, split, tokenize

    encoded = {}
    for name, config in sources.items():
        if config.source != "needles":
            with _named(name):
                encoded[name] = tokenize(config)
    found: dict[str, Part] = {}
    unseen: set[bytes] = set()
    if encoded:
        stores = [store for _, store in encoded.values()]
        group = groups(np.concatenate([store.signatures for store in stores]))
        smallest = np.full(len(group), 2**64 - 1, np.uint64)
        np.minimum.at(smallest, group, np.concatenate([store.hashes() for store in stores]))
        bounds = np.cumsum([len(store) for store in stores])[:-1]
        chosen = []
        for name, key, own in zip(
            encoded, np.split(smallest[group], bounds), np.split(group, bounds), strict=True
        ):
            with _named(name):
                chosen.append(
                    validates(
                        key, np.unique(own, return_inverse=True)[1], sources[name].val_fraction
                    )
                )
        trained = np.zeros(len(group), bool)
        np.logical_or.at(trained, group, ~np.concatenate(chosen))
        for (name, (tokenizer, store)), own, some in zip(
            encoded.items(), np.split(group, bounds), chosen, strict=True
        ):
            found[name] = Part(tokenizer, store, some & ~trained[own])
            unseen |= {key.tobytes() for key in store.keys[found[name].validates]}
    for name in [name for name in sources if name not in found]:
        with _named(name):
            tokenizer, store = tokenize(sources[name], unseen)
            found[name] = Part(tokenizer, store, split(sources[name], store))
    return found


def _trained(sources: dict[str, DataConfig], config: DataConfig) -> str:
    """The folder of a tokenizer trained on a sample of all sources."""
    corpora = []
    for name, source in sources.items():
        with _named(name):
            corpora.append(open_corpus(source))

    def train_here(folder: Any) -> None:
        with Progress(f"training a tokenizer of {config.vocab_size:,} tokens", None):
            texts = (text for corpus in corpora for text in corpus.sample(_SAMPLE // len(corpora)))
            train(texts, config.vocab_size).save(folder / "tokenizer.json")

    key = fingerprint(["mix 1", [corpus.identity for corpus in corpora], config.vocab_size])
    return str(cached(config.cache_folder() / "tokenizers" / key, train_here))
