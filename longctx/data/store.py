"""Tokenized documents in one Arrow file, read through the memory map.

`datasets.Dataset.from_file` opens it too: a row per document with name, input_ids, n_bytes. It is
written and read through pyarrow because importing datasets takes 1.5 s. The hashes of the texts are
in a file next to it.
"""

from __future__ import annotations

import hashlib
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby, repeat
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from rich.console import Console
from rich.progress import Progress

from longctx.config.data_config import SOURCES, DataConfig
from longctx.config.fields import refuse
from longctx.data.documents import Corpus, Document, exact_key
from longctx.data.tokenizer import Tokenizer
from longctx.tables import count_of

FORMAT = 2  # of a folder
_BATCH = 8 << 20  # characters tokenized and written together


class Store:
    """The tokenized documents in `folder`. Worker processes open it anew.

    lengths: (documents,) tokens of each. n_bytes: (documents,) of the text in UTF-8.
    keys, texts: (documents, 16) `exact_key` of the source, by which the split chooses a side, and
    of the text itself. dropped: a count of documents with nothing to predict.
    left_out: the counts of documents that are not used, by reason.
    shortened: a count of conversations that are learned in their last turn alone, because the chat
    template rewrites the turns before. has_answers: documents are conversations, or compared
    answers. has_sides: the latter.
    """

    def __init__(self, folder: Path, rows: np.ndarray | None = None):
        """Open the documents in `rows` of the file, (documents,) int64; None: all."""
        self.folder = folder
        with pa.memory_map(str(folder / "documents.arrow")) as source:
            self.table = pa.ipc.open_stream(source).read_all()
        with np.load(folder / "documents.npz") as arrays:
            keys: np.ndarray = arrays["keys"]
            texts: np.ndarray = arrays["texts"]
            self.dropped = int(arrays["dropped"])
            self.shortened = int(arrays["shortened"])
        chunks = self.table.column("input_ids").chunks
        self._ids = [view(chunk.values) for chunk in chunks]
        self._marks: list[np.ndarray] | None = None
        if "scored" in self.table.column_names:
            self._marks = [view(chunk.values) for chunk in self.table.column("scored").chunks]
        self.has_answers = self._marks is not None
        self.has_sides = any((marks > 1).any() for marks in self._marks or [])
        # First and last + 1 token of each document, counted in its chunk.
        offsets = [view(chunk.offsets).astype(np.int64) for chunk in chunks]
        self.rows = np.arange(len(keys)) if rows is None else rows
        self.keys = keys[self.rows]
        self.texts = texts[self.rows]
        self._first = np.concatenate([bounds[:-1] for bounds in offsets])[self.rows]
        self._chunk = np.repeat(np.arange(len(chunks)), [len(chunk) for chunk in chunks])[self.rows]
        self.lengths = np.concatenate([np.diff(bounds) for bounds in offsets])[self.rows]
        n_bytes = list(map(view, self.table.column("n_bytes").chunks))
        self.n_bytes = np.concatenate(n_bytes)[self.rows]
        reason = "with equal answers" if self.has_sides else "without text"
        self.left_out = {reason: self.dropped} if self.dropped else {}

    def __len__(self) -> int:
        return len(self.lengths)

    def __reduce__(self) -> tuple[type[Store], tuple[Path, np.ndarray]]:
        return Store, (self.folder, self.rows)

    def tokens(self, document: int, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Return tokens `start:stop` of a document: a read-only view into the file."""
        return self._sliced(self._ids, document, start, stop)

    def marks(self, document: int, start: int = 0, stop: int | None = None) -> np.ndarray | None:
        """Return for each token of `start:stop` scored + 2 · side, uint8; None: all are scored."""
        return None if self._marks is None else self._sliced(self._marks, document, start, stop)

    def _sliced(
        self, chunks: list[np.ndarray], document: int, start: int, stop: int | None
    ) -> np.ndarray:
        first, length = int(self._first[document]), int(self.lengths[document])
        stop = length if stop is None else min(stop, length)
        return chunks[self._chunk[document]][first + start : first + stop]

    def scored(self, document: int, start: int, stop: int) -> np.ndarray | None:
        """Return a mark for each scored token of `start:stop`, bool; None: all are scored."""
        marks = self.marks(document, start, stop)
        return None if marks is None else marks & 1 > 0

    def learns_any(self, tokens: Collection[int]) -> bool:
        """Return True if one of `tokens` is scored in a conversation or an answer."""
        assert self._marks is not None
        batches = zip(self._ids, self._marks, strict=True)
        return any(np.isin(ids[marks & 1 > 0], list(tokens)).any() for ids, marks in batches)

    def name(self, document: int) -> str:
        return str(self.table.column("name")[int(self.rows[document])])

    def content(self) -> str:
        """Return a hash of all documents in order, and of the scored tokens if not all are."""
        digest = hashlib.sha256(self.keys.tobytes())
        if not np.array_equal(self.keys, self.texts):
            digest.update(self.texts.tobytes())
        if self._marks is not None:
            digest.update(self.lengths.tobytes())
            for chunk in self._marks:
                digest.update(chunk.tobytes())
        return digest.hexdigest()[:32]


def view(array: Any) -> np.ndarray:
    """Return the values of an Arrow array of integers, read-only and not copied."""
    # pyarrow's own `to_numpy` imports pandas, which takes 0.5 s
    dtype = np.dtype(str(array.type))
    if not len(array):
        return np.zeros(0, dtype)
    return np.frombuffer(array.buffers()[1], dtype, len(array), array.offset * dtype.itemsize)


@contextmanager
def progress(task: str, total: int | None = None) -> Iterator[Callable[[int, int], None]]:
    """Show a moving line on a terminal while the block runs, then print the totals. The block calls
    the yielded function with the documents and tokens so far; `total` documents, if known.
    """
    began, console = time.monotonic(), Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        shown = bar.add_task(f"data: {task}", total=total)

        def show(documents: int, tokens: int) -> None:
            line = f"data: {task}: {count_of(documents, 'document')}, {tokens:,} tokens"
            bar.update(shown, completed=documents, description=line)

        yield show
        line = bar.tasks[0].description
    print(f"{line} in {time.monotonic() - began:.1f} s", file=sys.stderr)


def build(
    folder: Path, setting: str, corpus: Corpus, tokenizer: Tokenizer, config: DataConfig
) -> None:
    """Tokenize every document into `folder`, with the hash of its text.

    Documents without text or without a token to predict are left out and counted. If `config` reads
    conversations or answers, a column `scored` marks their learned tokens and their side. Raises
    ValueError, which begins with `setting`, if no document is left.
    """
    has_answers = has_marks(config)
    # Two bytes a token where they suffice, as in the files of nanoGPT and Megatron
    token_type = pa.uint16() if tokenizer.vocab_size <= 1 << 16 else pa.int32()
    fields = {"name": pa.string(), "input_ids": pa.list_(token_type), "n_bytes": pa.int64()}
    schema = pa.schema(fields | ({"scored": pa.list_(pa.uint8())} if has_answers else {}))
    keys: list[bytes] = []
    texts: list[bytes] = []
    documents = tokens = shortened = 0
    # Shorter documents have nothing to predict.
    shortest = 2 if has_answers else tokenizer.shortest
    with (
        progress("tokenizing", corpus.total) as show,
        pa.OSFile(str(folder / "documents.arrow"), "wb") as sink,
        pa.ipc.new_stream(sink, schema) as writer,
    ):
        for batch in _batches(corpus.documents()):
            encoded = _encoded(batch, tokenizer, config)
            kept = [
                (document, ids.astype(token_type.to_pandas_dtype()), marks)
                for document, (ids, marks) in zip(batch, encoded, strict=True)
                if document.whole and len(ids) >= shortest
            ]
            # Of the text: another tokenizer has the same split.
            keys += [document.key for document, *_ in kept]
            texts += [exact_key(document.whole) for document, *_ in kept]
            columns: list[Any] = [
                [document.name for document, *_ in kept],
                [ids for _, ids, _ in kept],
                [len(document.whole.encode()) for document, *_ in kept],
                [marks for *_, marks in kept],
            ]
            # The offsets of Arrow's lists are 32 bits, so a batch stays far below 2^31 tokens.
            writer.write_batch(pa.record_batch(columns[: len(schema)], schema=schema))
            documents += len(batch)
            tokens += sum(len(ids) for _, ids, _ in kept)
            shortened += sum(document.shortened for document in batch)
            show(documents, tokens)
    missing = "two different answers" if config.preferences else "a token to predict"
    refuse((not keys, f"{setting}: none of {documents:,} documents has {missing}; give others"))
    hashes, own = (np.frombuffer(b"".join(x), np.uint8).reshape(-1, 16) for x in (keys, texts))
    counts: Any = {"dropped": documents - len(keys), "shortened": shortened}
    np.savez(folder / "documents.npz", keys=hashes, texts=own, **counts)


def has_marks(config: DataConfig) -> bool:
    """Return True if the documents that `config` reads mark their targets."""
    answers: bool = SOURCES[config.source].has_answers
    return config.chat or config.preferences is not None or answers


def _encoded(
    batch: Sequence[Document], tokenizer: Tokenizer, config: DataConfig
) -> Iterable[tuple[np.ndarray, np.ndarray]]:
    """Return tokens of each document, and of conversations and answers marks: scored + 2 · side."""
    if not has_marks(config):
        ids = tokenizer.encode_documents([document.text for document in batch])
        return zip(ids, repeat(np.zeros(0, np.uint8)), strict=False)
    encode = tokenizer.encode_conversation if config.chat else tokenizer.encode_answer
    return [_marked(document, encode) for document in batch]


def _marked(document: Document, encode: Callable[..., Any]) -> tuple[np.ndarray, np.ndarray]:
    """Return the tokens and marks of all sides, one side after another."""
    ids, marks = [], []
    for side in document.sides:
        tokens, scored = encode(side.text, side.spans or [])
        scored[:1] = False  # no token before it predicts it
        ids.append(tokens)
        marks.append(scored + np.uint8(2 * side.side))
    return np.concatenate(ids), np.concatenate(marks).astype(np.uint8)


def _batches(documents: Iterator[Document]) -> Iterator[list[Document]]:
    """Group documents that have about `_BATCH` characters together; names count about 64."""
    characters = 0

    def group(document: Document) -> int:
        nonlocal characters
        characters += sum(len(side.text) for side in document.sides) + 64
        return characters // _BATCH

    for _, batch in groupby(documents, group):
        yield list(batch)
