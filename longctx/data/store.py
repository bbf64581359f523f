"""Tokenized documents in one Arrow file, read through the memory map.

`datasets.Dataset.from_file` opens it too: a row per document with name, input_ids, n_bytes. It is
written and read through pyarrow because importing datasets takes 1.5 s. Beside it lie the groups of
near-duplicates and the content hashes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from longctx import untrusted
from longctx.data import duplicates
from longctx.data.cache import read_arrays
from longctx.data.chat import Conversation
from longctx.data.corpus import Corpus, Document, content_key
from longctx.data.progress import Progress
from longctx.data.tokenizer import Tokenizer

_BATCH = 8 << 20  # characters tokenized and written together


class NothingToPredict(ValueError):
    """No document has a token that follows another."""


class Store:
    """The tokenized documents in `folder`. Pickled as the folder's name, for worker processes.

    lengths: (documents,) tokens of each. n_bytes: (documents,) of the text in UTF-8.
    groups: (documents,) the first of its near-duplicates. keys: (documents, 16) `content_key`.
    signatures: see `duplicates`. dropped: how many documents had nothing to predict.
    shortened: how many conversations are learned in their last turn alone, since the chat template
    rewrites the turns before.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        documents = folder / "documents.arrow"
        untrusted.check_file(documents)
        with pa.memory_map(str(documents)) as source:
            self.table = pa.ipc.open_stream(source).read_all()
        names = ["groups", "keys", "signatures", "dropped"]
        of_chats = "scored" in self.table.column_names
        extra = read_arrays(folder / "documents.npz", names + ["shortened"] * of_chats)
        self.groups: np.ndarray = extra["groups"]
        self.keys: np.ndarray = extra["keys"]
        self.signatures: np.ndarray = extra["signatures"]
        self.dropped = int(extra["dropped"])
        self.shortened = int(extra.get("shortened", 0))
        self.table.validate()
        chunks = self.table.column("input_ids").chunks
        self._ids = [view(chunk.values) for chunk in chunks]
        self._scored: list[np.ndarray] | None = None
        if of_chats:
            marks = [chunk.values for chunk in self.table.column("scored").chunks]
            self._scored = [view(one).view(bool) for one in marks]
        offsets = [view(chunk.offsets) for chunk in chunks]
        empty = np.zeros(0, np.int64)
        self._first = np.concatenate([empty, *(one[:-1].astype(np.int64) for one in offsets)])
        ends = np.concatenate([empty, *(one[1:].astype(np.int64) for one in offsets)])
        self._chunk = np.repeat(np.arange(len(chunks)), [len(chunk) for chunk in chunks])
        self.lengths = ends - self._first
        self.n_bytes = np.concatenate([empty, *map(view, self.table.column("n_bytes").chunks)])

    def __len__(self) -> int:
        return len(self.lengths)

    def __reduce__(self) -> tuple[type[Store], tuple[Path]]:
        return Store, (self.folder,)

    def check(self, vocab_size: int) -> None:
        """Raise ValueError unless the files belong together and every token is below `vocab_size`.

        Reads the file once.
        """
        self.table.validate(full=True)
        documents = len(self)
        shapes = {"groups": (documents,), "keys": (documents, 16)}
        shapes["signatures"] = (documents, duplicates.PLACES)
        for name, shape in shapes.items():
            array = getattr(self, name)
            if array.shape != shape or not np.issubdtype(array.dtype, np.integer):
                raise ValueError(f"documents.npz: {name} is not that of {documents:,} documents")
        if ((self.groups < 0) | (self.groups >= documents)).any():
            raise ValueError("documents.npz: groups of documents that there are not")
        columns = [self.table.column(name) for name in self.table.column_names]
        if any(column.null_count for column in columns) or not (self.lengths > 1).all():
            raise ValueError("documents.arrow: documents without tokens")
        for number, ids in enumerate(self._ids):
            if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < vocab_size:
                raise ValueError(
                    f"documents.arrow: tokens outside the vocabulary of {vocab_size:,}"
                )
            if self._scored is not None and len(self._scored[number]) != len(ids):
                raise ValueError("documents.arrow: marks that are not those of its tokens")

    def tokens(self, document: int, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Tokens `start:stop` of a document: a read-only view into the file."""
        length = int(self.lengths[document])
        stop = length if stop is None else min(stop, length)
        first = int(self._first[document])
        return self._ids[self._chunk[document]][first + start : first + stop]

    def scored(self, document: int, start: int, stop: int) -> np.ndarray | None:
        """Which of the tokens `start:stop` of a document are scored, bool; None: all."""
        if self._scored is None:
            return None
        first = int(self._first[document])
        stop = min(stop, int(self.lengths[document]))
        return self._scored[self._chunk[document]][first + start : first + stop]

    def name(self, document: int) -> str:
        return str(self.table.column("name")[document])

    def hashes(self) -> np.ndarray:
        """A hash of each document's content, (documents,) uint64."""
        first = np.ascontiguousarray(self.keys[:, :8])
        return np.asarray(first.view(">u8")[:, 0], dtype=np.uint64)

    def content(self) -> str:
        """A hash of all documents in order, and of which tokens are scored if not all are."""
        digest = hashlib.sha256(self.keys.tobytes())
        if self._scored is not None:
            digest.update(self.lengths.tobytes())
            for chunk in self._scored:
                digest.update(chunk.tobytes())
        return digest.hexdigest()[:32]


def view(array: Any) -> np.ndarray:
    """The values of an Arrow array of integers, read-only and not copied. ValueError for nulls and
    other types.

    pyarrow's own `to_numpy` imports pandas, which takes 0.5 s.
    """
    if not pa.types.is_integer(array.type) or array.null_count:
        raise ValueError(f"documents.arrow: {array.type} with {array.null_count} nulls")
    dtype = np.dtype(str(array.type))
    if not len(array):
        return np.zeros(0, dtype)
    return np.frombuffer(array.buffers()[1], dtype, len(array), array.offset * dtype.itemsize)


def build(folder: Path, corpus: Corpus, tokenizer: Tokenizer, chat: bool = False) -> None:
    """Tokenize every document into `folder`, with its near-duplicate group and content hash.

    Documents without a token to predict (empty ones) are left out and counted. With `chat` every
    document is a Conversation, and a column `scored` marks the assistant's tokens. Raises
    NothingToPredict if no document is left.
    """
    token_type = pa.uint16() if tokenizer.vocab_size <= 1 << 16 else pa.int32()
    fields = {"name": pa.string(), "input_ids": pa.list_(token_type), "n_bytes": pa.int64()}
    schema = pa.schema(fields | ({"scored": pa.list_(pa.uint8())} if chat else {}))
    keys: list[bytes] = []
    signatures: list[np.ndarray] = []
    dropped = shortened = 0
    shortest = 2 if chat else tokenizer.shortest
    with (
        Progress("tokenizing", corpus.total) as progress,
        pa.OSFile(str(folder / "documents.arrow"), "wb") as sink,
        pa.ipc.new_stream(sink, schema) as writer,
    ):
        for batch in _batches(corpus.documents()):
            encoded, scored = _encoded(batch, tokenizer, chat)
            chosen = [n for n, ids in enumerate(encoded) if len(ids) >= shortest]
            dropped += len(batch) - len(chosen)
            shortened += sum(isinstance(one, Conversation) and one.shortened for one in batch)
            n_bytes = []
            for n in chosen:
                n_bytes.append(len(batch[n].text.encode()))
                keys.append(content_key(batch[n].text))
                signatures.append(duplicates.signature(batch[n].text))
            offsets = np.cumsum([0, *(len(encoded[n]) for n in chosen)]).astype(np.int32)
            columns: list[Any] = [
                [batch[n].name for n in chosen],
                _lists(offsets, [encoded[n] for n in chosen], token_type),
                n_bytes,
            ]
            if chat:
                columns.append(_lists(offsets, [scored[n] for n in chosen], pa.uint8()))
            writer.write_batch(pa.record_batch(columns, schema=schema))
            progress.advance(len(batch), int(offsets[-1]))
    if not keys:
        raise NothingToPredict(
            f"none of {dropped:,} documents has 2 tokens" if dropped else "there is no document"
        )
    stacked = np.stack(signatures)
    counts: dict[str, Any] = {"shortened": shortened} if chat else {}
    np.savez(
        folder / "documents.npz",
        **counts,
        groups=duplicates.groups(stacked),
        signatures=stacked,
        keys=np.frombuffer(b"".join(keys), np.uint8).reshape(-1, 16),
        dropped=dropped,
    )


def _encoded(
    batch: Sequence[Document], tokenizer: Tokenizer, chat: bool
) -> tuple[Sequence[np.ndarray], Sequence[np.ndarray]]:
    """The tokens of each document, and with `chat` which of them are scored."""
    if not chat:
        return tokenizer.encode_documents([document.text for document in batch]), []
    pairs = [
        tokenizer.encode_conversation(document.text, document.spans)
        for document in batch
        if isinstance(document, Conversation)
    ]
    return [ids for ids, _ in pairs], [scored for _, scored in pairs]


def _lists(offsets: np.ndarray, lists: Sequence[np.ndarray], value_type: Any) -> Any:
    values = np.concatenate([np.zeros(0, np.int32), *(one.astype(np.int32) for one in lists)])
    return pa.ListArray.from_arrays(offsets, pa.array(values, value_type))


def _batches(documents: Iterator[Document]) -> Iterator[list[Document]]:
    batch: list[Document] = []
    characters = 0
    for document in documents:
        batch.append(document)
        characters += len(document.text) + 64
        if characters >= _BATCH:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch
