"""Tokenized documents in one Arrow file, a row per document (name, input_ids, n_bytes), read
through the memory map.

The file is what `datasets.Dataset.from_file` opens; it is written and read through pyarrow, which
datasets is built on, because that starts in a tenth of the time. Beside it lie the near-duplicate
groups and the content hashes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from longctx.data import duplicates
from longctx.data.chat import Conversation
from longctx.data.progress import Progress
from longctx.data.sources import Corpus, Document, key
from longctx.data.tokenizer import Tokenizer

_BATCH = 8 << 20  # characters tokenized and written together


class NothingToPredict(ValueError):
    """Of the documents none has a token that follows another."""


class Store:
    """Documents of `folder`; `lengths` in tokens, `n_bytes`, `groups` are (documents,). Unpickling
    opens it again.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        with pa.memory_map(str(folder / "documents.arrow")) as source:
            self.table = pa.ipc.open_stream(source).read_all()
        with np.load(folder / "documents.npz") as extra:
            self.groups: np.ndarray = extra["groups"]
            self.keys: np.ndarray = extra["keys"]  # (documents, 16) uint8
            self.signatures: np.ndarray = extra["signatures"]  # see `duplicates`
            self.dropped = int(extra["dropped"])
        chunks = self.table.column("input_ids").chunks
        self._ids = [chunk.values.to_numpy(zero_copy_only=True) for chunk in chunks]
        self._scored: list[np.ndarray] | None = None
        if "scored" in self.table.column_names:
            marks = self.table.column("scored").chunks
            self._scored = [
                chunk.values.to_numpy(zero_copy_only=True).view(bool) for chunk in marks
            ]
        offsets = [chunk.offsets.to_numpy(zero_copy_only=True) for chunk in chunks]
        self._first = (
            np.concatenate([np.asarray(o[:-1], np.int64) for o in offsets])
            if chunks
            else np.zeros(0, np.int64)
        )
        ends = (
            np.concatenate([np.asarray(o[1:], np.int64) for o in offsets])
            if chunks
            else np.zeros(0, np.int64)
        )
        self._chunk = np.repeat(np.arange(len(chunks)), [len(chunk) for chunk in chunks])
        self.lengths = ends - self._first
        self.n_bytes = self.table.column("n_bytes").to_numpy()

    def __len__(self) -> int:
        return len(self.lengths)

    def __reduce__(self) -> tuple[type[Store], tuple[Path]]:
        return Store, (self.folder,)

    def tokens(self, document: int, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Tokens `start:stop` of a document, a read-only view into the file."""
        length = int(self.lengths[document])
        stop = length if stop is None else min(stop, length)
        first = int(self._first[document])
        return self._ids[self._chunk[document]][first + start : first + stop]

    def scored(self, document: int, start: int, stop: int) -> np.ndarray | None:
        """Which of the tokens `start:stop` of a document are to be learned, bool; None: all."""
        if self._scored is None:
            return None
        first = int(self._first[document])
        return self._scored[self._chunk[document]][
            first + start : first + min(stop, int(self.lengths[document]))
        ]

    def name(self, document: int) -> str:
        return str(self.table.column("name")[document])

    def hashes(self) -> np.ndarray:
        """(documents,) uint64: a hash of each document's content."""
        found: np.ndarray = (
            np.ascontiguousarray(self.keys[:, :8]).view(">u8")[:, 0].astype(np.uint64)
        )
        return found

    def content(self) -> str:
        """A hash of all documents' contents, in order, and of what is to be learned of them where
        that is not all.
        """
        whole = hashlib.sha256(self.keys.tobytes())
        if self._scored is not None:
            whole.update(self.lengths.tobytes())
            for chunk in self._scored:
                whole.update(chunk.tobytes())
        return whole.hexdigest()[:32]


def build(folder: Path, corpus: Corpus, tokenizer: Tokenizer, chat: bool = False) -> None:
    """Tokenize every document into `folder`, with its near-duplicate group and a hash of its
    content.

    Documents without a token to predict (empty ones) are left out and counted. With `chat` every
    document says which part of it is to be learned, and a column `scored` says so of its tokens.
    Raises ValueError if no document is left.
    """
    kind = pa.uint16() if tokenizer.vocab_size <= 1 << 16 else pa.int32()
    fields = {"name": pa.string(), "input_ids": pa.list_(kind), "n_bytes": pa.int64()}
    schema = pa.schema(fields | ({"scored": pa.list_(pa.uint8())} if chat else {}))
    keys: list[bytes] = []
    signatures: list[np.ndarray] = []
    dropped = 0
    least = 2 if tokenizer.bos_id is None or chat else 3  # tokens of a document that has text
    with (
        Progress("tokenizing", corpus.total) as progress,
        pa.OSFile(str(folder / "documents.arrow"), "wb") as sink,
        pa.ipc.new_stream(sink, schema) as writer,
    ):
        for batch in _batches(corpus.documents()):
            encoded, marks = _encoded(batch, tokenizer, chat)
            kept = [n for n, ids in enumerate(encoded) if len(ids) >= least]
            dropped += len(batch) - len(kept)
            sizes = []
            for n in kept:
                sizes.append(len(batch[n].text.encode()))
                keys.append(key(batch[n].text))
                signatures.append(duplicates.signature(batch[n].text))
            offsets = np.cumsum([0, *(len(encoded[n]) for n in kept)]).astype(np.int32)
            columns: list[Any] = [
                [batch[n].name for n in kept],
                _lists(offsets, [encoded[n] for n in kept], kind),
                sizes,
            ]
            if chat:
                columns.append(_lists(offsets, [marks[n] for n in kept], pa.uint8()))
            writer.write_batch(pa.record_batch(columns, schema=schema))
            progress.advance(len(batch), int(offsets[-1]))
    if not keys:
        raise NothingToPredict(
            f"none of {dropped:,} documents has 2 tokens" if dropped else "there is no document"
        )
    np.savez(
        folder / "documents.npz",
        groups=duplicates.groups(np.stack(signatures)),
        signatures=np.stack(signatures),
        keys=np.frombuffer(b"".join(keys), np.uint8).reshape(-1, 16),
        dropped=dropped,
    )


def _encoded(
    batch: Sequence[Document], tokenizer: Tokenizer, chat: bool
) -> tuple[Sequence[np.ndarray], Sequence[np.ndarray]]:
    """The tokens of each document, and with `chat` which of them are to be learned."""
    if not chat:
        return tokenizer.encode_documents([document.text for document in batch]), []
    pairs = [
        tokenizer.encode_parts_of(document.text, document.spans)
        for document in batch
        if isinstance(document, Conversation)
    ]
    return [ids for ids, _ in pairs], [marks for _, marks in pairs]


def _lists(offsets: np.ndarray, parts: Sequence[np.ndarray], kind: Any) -> Any:
    values = np.concatenate([np.zeros(0, np.int32), *(part.astype(np.int32) for part in parts)])
    return pa.ListArray.from_arrays(offsets, pa.array(values, kind))


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
