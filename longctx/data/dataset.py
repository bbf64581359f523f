"""A data set: documents of one source or several, tokenized, split and packed into sequences.

tokenizers/KEY    BPE trained on the documents         key: identities of corpora, vocabulary size
documents/KEY     documents as tokens (Arrow)          key: format, identity of a corpus, tokenizer
packings/KEY      position of each piece in sequences  key: documents, split, seq_len

Each folder is cached by a fingerprint of these values. A weight in a mix is a share of the
sequences; the counts tell how many tokens of them documents fill. Validation reads the sequences of
all sources, each as many as it has.

torch is imported by the functions that return sequences: describing a data set does not need it,
and it takes 3 s.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from copy import copy
from dataclasses import dataclass, field
from pathlib import Path
from sys import maxsize
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from longctx import untrusted
from longctx.config.data_config import SOURCES, DataConfig
from longctx.config.fields import refuse
from longctx.data import far_back
from longctx.data.cache import cache_folder, cached, fingerprint
from longctx.data.documents import Corpus
from longctx.data.length_ranges import length_ranges
from longctx.data.packing import Packing, joined, pack
from longctx.data.preferences import CHOSEN, REJECTED, fitted, sides_of
from longctx.data.selection import grouped, selected
from longctx.data.sources import mix
from longctx.data.sources.registry import check, open_corpus
from longctx.data.split import by_hash
from longctx.data.store import FORMAT, Store, build, progress
from longctx.data.tokenizer import Tokenizer, train

if TYPE_CHECKING:
    from torch import Tensor
    from torch.utils.data import ConcatDataset, Sampler

    from longctx.data.sequences import PackedSequences

# Of the cache; raised when the same documents would become other tokens or sequences.
_VERSION = 1
_MIX = "mix 1"
SAMPLE = 16 << 20  # characters that a BPE is trained on
PIECE = 4096  # characters that are drawn together for it
_SAMPLE = "sample 2"  # of the cache; raised when the same documents would have another sample
SPLITS = ("train", "val")
LOOKED_AT = 1000  # sequences of a source, to find out if most hold no target


class EncodedDocument(NamedTuple):
    """A document of a split, or the part of one that is in it: tokens (tokens,) int64, with
    end-of-text at the end of a document, and UTF-8 bytes of its text.

    scored: a mark for each token of a conversation that is learned, (tokens,) bool; None: all.
    is_rejected: an answer to avoid, which no score is about.
    key: names its text, for data.filter.
    """

    name: str
    ids: np.ndarray
    n_bytes: int
    scored: np.ndarray | None = None
    is_rejected: bool = False
    key: bytes = b""

    @property
    def targets(self) -> int:
        """Count the tokens that are predicted: never the first."""
        marks = np.ones(len(self.ids), bool) if self.scored is None else self.scored
        return int(np.count_nonzero(marks[1:]))


@dataclass(eq=False)
class SourcePart:
    """The documents of one source in sequences of `seq_len` tokens.

    trained: (documents,) int64, the count of tokens of each that are trained on; the rest
    validates.
    """

    config: DataConfig
    tokenizer: Tokenizer
    store: Store
    trained: np.ndarray
    seq_len: int = 0
    packings: dict[str, Packing] = field(default_factory=dict)
    # (documents, sides) log-probabilities of the answers by the model that training began with
    reference: np.ndarray | None = None

    def __post_init__(self) -> None:
        validates = self.trained < self.store.lengths
        self.split = {"train": np.flatnonzero(self.trained), "val": np.flatnonzero(validates)}
        self.group, self.weights = grouped(self.config, self.store.lengths)
        # Ranks and a resumed run compare this: it covers all that decides a sequence but its length
        content = [self.store.content(), self.tokenizer.fingerprint, self.trained.tolist()]
        content += [ranges] if (ranges := length_ranges(self.config)) else []
        self.fingerprint = fingerprint([_VERSION, *content])

    def packed(self, seq_len: int, together: bool = True) -> SourcePart:
        """Return a copy in sequences of `seq_len`, with several documents `together` in one."""

        def write(folder: Path) -> None:
            for split, documents in self.split.items():
                starts, stops = self.span(split)
                # If the end validates, the last token that is trained on is only predicted. No
                # sequence shows it, or the first token that validates would be its target.
                shown = stops - starts - (stops < self.store.lengths[documents])
                if self.store.has_sides:
                    shown = fitted(self.store, documents, seq_len, self.tokenizer.bos_id)
                # Of a sequence to draw by its weight, all documents have that weight
                group = self.group[documents] * (split == "train")
                members = [group == number for number in range(group.max(initial=0) + 1)]
                packings = [
                    pack(shown[own], seq_len, documents[own], starts[own], together)
                    for own in members
                ]
                joined(packings).save(folder / f"{split}.npz")

        key = fingerprint([self.fingerprint, seq_len, "together" if together else "alone"])
        folder = cached(cache_folder(self.config) / "packings" / key, write)
        other = copy(self)
        other.seq_len = seq_len
        other.packings = {split: Packing.load(folder / f"{split}.npz") for split in SPLITS}
        return other

    def span(self, split: str) -> tuple[np.ndarray, np.ndarray]:
        """Return first and last + 1 token of each document in `split`."""
        documents = self.split[split]
        trained = self.trained[documents]
        if split == "train":
            return np.zeros_like(trained), trained
        return trained, self.store.lengths[documents]

    def groups(self) -> list[tuple[int, float]]:
        """Return the training sequences, and the share of samples, of each group of lengths."""
        return [(count, share) for count, share in self._groups() if count]

    def _groups(self) -> list[tuple[int, float]]:
        packing = self.packings["train"]
        group = self.group[packing.document[packing.bounds[:-1]]]
        counts = np.bincount(group, minlength=len(self.weights))
        shares = counts * self.weights / (counts @ self.weights)
        return list(zip(counts.tolist(), shares.tolist(), strict=True))

    def by_length(self) -> list[dict[str, Any]]:
        """Return a row for each range of data.lengths, the first one for documents in none: how
        many it has, and what share of the samples draws from them.
        """
        documents = np.bincount(self.group[self.split["train"]], minlength=len(self.weights))
        ranges = [
            f"{first:,} and more" if end == maxsize else f"{first:,} to {end - 1:,}"
            for first, end, _ in length_ranges(self.config)
        ]
        columns = zip(["others", *ranges], self.weights, documents, self._groups(), strict=True)
        return [
            {"tokens": name, "weight": float(weight), "documents": int(count)}
            | {"sequences": sequences, "drawn": f"{share:.1%}"}
            for name, weight, count, (sequences, share) in columns
        ]

    def share_beyond(self, limit: int) -> float:
        """Return the share of drawn tokens with more than `limit` of their document before them."""
        packing, far, tokens, first = self.packings["train"], 0.0, 0.0, 0
        for count, share in self.groups():
            pieces = packing.length[slice(*packing.bounds[[first, first + count]])]
            far += share * far_back.beyond(pieces, limit) / count
            tokens += share * float(pieces.sum()) / count
            first += count
        return far / tokens

    def without_target(self) -> str:
        """Return a line if most of LOOKED_AT training sequences, spread evenly, hold no target."""
        packing, count = self.packings["train"], 0
        numbers = range(packing.sequences)[:: 1 + packing.sequences // LOOKED_AT]
        first, stop = packing.start + 1, packing.start + 1 + packing.length
        for number in numbers:
            own = slice(*packing.bounds[number : number + 2].tolist())
            marks = map(self.store.scored, packing.document[own], first[own], stop[own])
            count += not any(x is None or x.any() for x in marks)
        origin, lengths = self.config.path or self.config.source, self.store.lengths
        text = f"{count:,} of {len(numbers):,} sequences of {origin} hold no target token"
        if len(cut := lengths[lengths > self.seq_len]):  # few long ones may have most sequences
            whole = np.quantile(cut, 0.9, method="higher")
            text += f"; seq_len={whole} holds 90% of the longer documents whole"
        return text if count > len(numbers) / 2 else ""

    def sequences(self, split: str) -> PackedSequences:
        """Return the sequences of `train` or `val`."""
        from longctx.data.sequences import PackedSequences

        ends = (self.tokenizer.eos_id, self.tokenizer.bos_id)
        packing = self.packings[split]
        return PackedSequences(self.store, packing, self.seq_len, *ends, self.reference)

    def documents(self, split: str) -> Iterator[EncodedDocument]:
        """Read the documents of `train` or `val`, not cut into sequences, in their fixed order."""
        starts, stops = self.span(split)
        columns = (x.tolist() for x in (self.split[split], starts, stops))
        for document, start, stop in zip(*columns, strict=True):
            side = CHOSEN
            if self.store.has_sides:  # the preferred or labelled answer stands for its document
                marks, begins, _ = sides_of(self.store, document)
                stop, side = int(begins[1]), marks[0] >> 1
            ids = self.store.tokens(document, start, stop).astype(np.int64)
            name, n_bytes = self.store.name(document), int(self.store.n_bytes[document])
            # A part has fewer bytes than its document; perplexity per byte needs them.
            if len(ids) < self.store.lengths[document]:
                name += "" if self.store.has_sides else " (end)" if start else " (before its end)"
                ends = (self.tokenizer.bos_id, self.tokenizer.eos_id)  # which are no text
                text = self.tokenizer.decode(token for token in ids if token not in ends)
                n_bytes = len(text.encode())
            scored = self.store.scored(document, start, stop)
            key = self.store.texts[document].tobytes()
            yield EncodedDocument(name, ids, n_bytes, scored, side == REJECTED, key)

    def summary(self) -> dict[str, Any]:
        """Count documents, tokens and sequences; `efficiency` is the share of a sequence that
        documents fill, rather than padding.
        """
        # Generation never stops if no answer teaches a token at which it does
        has_no_end = self.store.has_answers and not self.store.learns_any(self.tokenizer.end_tokens)
        is_too_long = self.store.lengths > self.seq_len
        counts: dict[str, Any] = {
            "source": self.config.source,
            "documents": len(self.store),
            "documents_dropped": self.store.dropped,
            "conversations_shortened": self.store.shortened,
            "sources_without_end": int(has_no_end),
            "prompts_cut": int(is_too_long.sum()) if self.store.has_sides else 0,
            "bytes": int(self.store.n_bytes.sum()),
            "tokens": int(self.store.lengths.sum()),
            "vocab_size": self.tokenizer.vocab_size,
            "seq_len": self.seq_len,
        }
        for split, packing in self.packings.items():
            starts, stops = self.span(split)
            counts[f"{split}_documents"] = len(self.split[split])
            counts[f"{split}_tokens"] = int((stops - starts).sum())
            counts[f"{split}_sequences"] = packing.sequences
            positions = max(1, packing.sequences * self.seq_len)
            counts[f"{split}_efficiency"] = round(int(packing.length.sum()) / positions, 6)
        return counts


class Data:
    """A data set at one `seq_len`: `train` and `val` sequences, tokenizer, documents, counts.

    parts: the documents of each source; a mix has their names, a single source is "".
    """

    def __init__(self, config: DataConfig, seq_len: int) -> None:
        """Build what the cache lacks."""
        refuse((seq_len < 2, f"seq_len={seq_len}: a sequence has at least 2 tokens; give more"))
        members = mix.members(config) or {"": mix.Member(1.0, config)}
        self.config = config
        self.seq_len = seq_len
        self.weights = [member.weight for member in members.values()]
        sources = {name: member.config for name, member in members.items()}
        parts = _split(sources, *_tokenizer(config, sources))
        self.parts = {name: part.packed(seq_len, config.packing) for name, part in parts.items()}
        self.tokenizer: Tokenizer = next(iter(parts.values())).tokenizer
        fingerprints = [part.fingerprint for part in parts.values()]
        content = [list(each) for each in zip(parts, self.weights, fingerprints, strict=True)]
        self.fingerprint = fingerprint([_MIX, content]) if config.mix else fingerprints[0]

    def at(self, seq_len: int) -> Data:
        """Return the same documents and split in sequences of `seq_len`; opens no document."""
        other = copy(self)
        other.seq_len, packs = seq_len, self.config.packing
        other.parts = {name: part.packed(seq_len, packs) for name, part in self.parts.items()}
        return other

    @property
    def lengths(self) -> np.ndarray:
        """Return the tokens of every document."""
        return np.concatenate([part.store.lengths for part in self.parts.values()])

    def count(self, split: str) -> int:
        """Return how many documents `train` or `val` has."""
        return sum(len(part.split[split]) for part in self.parts.values())

    @property
    def train(self) -> ConcatDataset[dict[str, Tensor]]:
        return self._sequences("train")

    @property
    def val(self) -> ConcatDataset[dict[str, Tensor]]:
        return self._sequences("val")

    def _sequences(self, split: str) -> ConcatDataset[dict[str, Tensor]]:
        from torch.utils.data import ConcatDataset

        return ConcatDataset([part.sequences(split) for part in self.parts.values()])

    def order(self, seed: int, rank: int, world_size: int, consumed: int) -> Sampler[int]:
        """Return the endless order of the sequences of `train`."""
        from longctx.data.sequences import SampleStream

        parts = zip(self.parts.values(), self.weights, strict=True)
        groups = [(n, weight * share) for part, weight in parts for n, share in part.groups()]
        counts, weights = zip(*groups, strict=True)
        return SampleStream(counts, weights, seed, rank, world_size, consumed)

    def documents(self, split: str = "val") -> Iterator[EncodedDocument]:
        """Read the documents of `train` or `val`, not cut into sequences, in their fixed order."""
        for name, part in self.parts.items():
            for document in part.documents(split):
                yield document._replace(name=f"{name}/{document.name}") if name else document

    def summary(self) -> dict[str, Any]:
        """Count over all sources, and under `mix` for each; see `SourcePart.summary`."""
        each = [part.summary() for part in self.parts.values()]
        reasons = sum((Counter(part.store.left_out) for part in self.parts.values()), Counter())
        # Answers that are compared are parts of a document
        parts = {name: part for name, part in self.parts.items() if not part.store.has_sides}
        shares = {name: part.share_beyond for name, part in parts.items()}
        rows = [row for part in self.parts.values() for row in part.by_length()[1:]]
        untaught = map(SourcePart.without_target, parts.values())
        empty = ", ".join(row["tokens"] for row in rows if not row["documents"])
        problem = f"; data.lengths: no document has {empty} tokens" if empty else ""
        about = {
            "left_out": ", ".join(f"{count:,} {reason}" for reason, count in reasons.items()),
            "far_back": far_back.line(shares, int(self.lengths.max()), self.seq_len) + problem,
            "without_target": "; ".join(filter(None, untaught)),
        }
        if not self.config.mix:
            return each[0] | about
        counts: dict[str, Any] = about | {"source": "mix", "seq_len": self.seq_len}
        counts["vocab_size"] = self.tokenizer.vocab_size
        # Counts add up over the sources; names, sizes and shares do not.
        for key, value in each[0].items():
            if isinstance(value, int) and key not in counts:
                counts[key] = sum(part[key] for part in each)
        for split in SPLITS:
            # Not by tokens: of prompts that are cut, more are counted than are in the sequences.
            filled = sum(part[f"{split}_efficiency"] * part[f"{split}_sequences"] for part in each)
            counts[f"{split}_efficiency"] = filled / max(1, counts[f"{split}_sequences"])
        members = zip(self.parts, self.weights, each, strict=True)
        return counts | {"mix": {name: {"weight": w} | part for name, w, part in members}}


def load(config: DataConfig, seq_len: int) -> Data:
    """Open a data set in sequences of `seq_len` tokens.

    Builds what the cache lacks. Raises ValueError or OSError in one line that names the key or
    file, if something is wrong with the documents.
    """
    check(config)
    return Data(config, seq_len)


def open_tokenizer(config: DataConfig) -> Tokenizer:
    """Return the tokenizer of a data set, trained on its documents if none is given.

    Raises as `load` does; the documents are not tokenized yet.
    """
    check(config)
    members = mix.members(config) or {"": mix.Member(1.0, config)}
    return _tokenizer(config, {name: member.config for name, member in members.items()})[0]


def _named(name: str) -> Any:
    """Return a context that puts the member of a mix before the text of an error."""
    errors = (ValueError, OSError)
    return untrusted.named(f"data.mix.{name}", errors=errors) if name else nullcontext()


def _identity(config: DataConfig, corpus: Corpus) -> list[Any]:
    kinds = ["chat"] if config.chat else []
    kinds += [config.preferences] if config.preferences else []
    return [_VERSION, config.source, corpus.identity, *kinds]


def _tokenizer(
    config: DataConfig, sources: Mapping[str, DataConfig]
) -> tuple[Tokenizer, dict[str, Corpus]]:
    """Return the tokenizer, trained on a sample of all sources unless given, and opened corpora."""
    corpora = {}
    for name, source in sources.items():
        with _named(name):
            corpora[name] = open_corpus(source)
    if config.tokenizer is not None:
        return Tokenizer.load(config.tokenizer), corpora

    def write(folder: Path) -> None:
        texts = (text for corpus in corpora.values() for text in corpus.sample(size, PIECE))
        with progress(f"training a tokenizer of {config.vocab_size:,} tokens"):
            train(texts, config.vocab_size).save(folder / "tokenizer.json")

    # Every source of a mix has an equal part in the vocabulary, whatever its weight.
    size = SAMPLE // len(corpora)
    identities: list[Any] = [_MIX, [corpus.identity for corpus in corpora.values()]]
    if not config.mix:
        identities = [_identity(config, corpora[""])]
    key = fingerprint([_SAMPLE, *identities, config.vocab_size])
    return Tokenizer.load(cached(cache_folder(config) / "tokenizers" / key, write)), corpora


def _split(
    sources: Mapping[str, DataConfig], tokenizer: Tokenizer, corpora: Mapping[str, Corpus]
) -> dict[str, SourcePart]:
    """Tokenize and split every source so that no text is on both sides; generated documents contain
    none that validates.
    """
    generated = [name for name, source in sources.items() if SOURCES[source.source].generated]
    read = {name: corpus for name, corpus in corpora.items() if name not in generated}
    parts = _parts(sources, read, tokenizer) if read else {}
    unseen = {
        key.tobytes()
        for part in parts.values()
        for key in part.store.keys[part.trained < part.store.lengths]
    }
    # Their text comes from another source, so they are made once its split is known.
    for name in generated:
        with _named(name):
            corpus = open_corpus(sources[name], unseen) if unseen else corpora[name]
        parts |= _parts(sources, {name: corpus}, tokenizer)
    return {name: parts[name] for name in sources}


def _parts(
    sources: Mapping[str, DataConfig], corpora: Mapping[str, Corpus], tokenizer: Tokenizer
) -> dict[str, SourcePart]:
    """Tokenize and split `corpora` together."""
    stores = {
        name: _tokenized(name, sources[name], corpus, tokenizer) for name, corpus in corpora.items()
    }
    fractions = {
        f"data.mix.{name}" if name else "data": sources[name].val_fraction for name in stores
    }
    splits = by_hash(list(stores.values()), fractions)
    return {
        name: SourcePart(sources[name], tokenizer, store, trained)
        for (name, store), trained in zip(stores.items(), splits, strict=True)
    }


def _tokenized(name: str, config: DataConfig, corpus: Corpus, tokenizer: Tokenizer) -> Store:
    """Open the documents of one source in tokens of `tokenizer`."""

    def write(folder: Path) -> None:
        setting = f"data.path={config.path}" if config.paths() else f"data={config.source}"
        build(folder, setting, corpus, tokenizer, config)

    key = fingerprint([FORMAT, _identity(config, corpus), tokenizer.fingerprint])
    with _named(name):
        store = Store(cached(cache_folder(config) / "documents" / key, write))
        return selected(store, corpus, config)
