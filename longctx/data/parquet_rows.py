"""Rows of a Parquet file, decoded in a child process with little time and memory.

Headers may lie about sizes, and a dictionary, or a prefix that texts share, may stand for gigabytes
that pyarrow writes out before anybody can count them. That ends in the child, in one line.
"""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from collections.abc import Generator
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from typing import IO, Any, NamedTuple

from longctx import python_child

SECONDS = 3.0  # of processor time before the first row, and in store at most
OF_FILE = 1e-6  # of them more, for a byte of the file
EARNED = 1e-6  # and for a byte of text
MEMORY = 640 << 20  # bytes beyond what the child has once it has started
TIMES = 3  # and so many times the text that the file may hold
WAIT = 60  # seconds for some rows; a busy machine takes longer than processor time
ROWS = 256  # decoded together
_HEADER = struct.Struct("<cQ")  # of each answer: its kind, the bytes that follow
_TEXT, _NO_STRING, _NO_COLUMN, _TOO_LARGE, _BROKEN, _END = b"T", b"N", b"C", b"L", b"B", b"E"


class NoColumn(ValueError):
    """The file has other columns."""

    def __init__(self, columns: list[str]) -> None:
        super().__init__(f"there are {columns}")
        self.columns = columns


class TooLarge(ValueError):
    """The file says that it holds more text than it may."""


class NoString(NamedTuple):
    """A value that is no text, by the name of its type."""

    type: str


def rows(
    file: Path, stream: IO[bytes], column: str, most: int
) -> Generator[bytes | NoString, None, None]:
    """The values of `column` in `stream`, a real file that others call `file`, in UTF-8.

    Raises NoColumn, TooLarge where a group of rows has more than `most` bytes, and ValueError, one
    line that begins with the file, where it is broken or takes more than its share.
    """
    process = subprocess.Popen(
        python_child.command("longctx.data.parquet_rows", column, str(most)),
        env=python_child.environment(ARROW_DEFAULT_MEMORY_POOL="system", OMP_NUM_THREADS="1"),
        stdin=stream,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    assert process.stdout is not None
    try:
        with closing(process.stdout) as answers:
            while True:
                header = answers.read(_HEADER.size)
                kind, size = _HEADER.unpack(header) if len(header) == _HEADER.size else (b"", 0)
                if kind == _TEXT and size > most:
                    raise TooLarge
                content = answers.read(size)
                if not kind or len(content) < size:
                    raise ValueError(
                        f"{file}: takes more than {SECONDS:.0f} s or "
                        f"{(MEMORY + TIMES * most) >> 20:,} MiB to be read; write it anew"
                    )
                if kind == _END:
                    return
                if kind == _NO_COLUMN:
                    raise NoColumn(json.loads(content))
                if kind == _TOO_LARGE:
                    raise TooLarge
                if kind == _BROKEN:
                    raise ValueError(f"{file}: not a readable .parquet file ({content.decode()})")
                yield NoString(content.decode()) if kind == _NO_STRING else content
    finally:
        process.kill()
        process.wait()


def _answer(kind: bytes, content: Any = b"") -> None:
    sys.stdout.buffer.write(_HEADER.pack(kind, len(content)))
    sys.stdout.buffer.write(content)


def _decode(column: str, most: int, limit: python_child.TimeLimit) -> None:
    """Answer with the values of `column` of the file on stdin."""
    import pyarrow
    import pyarrow.parquet

    table = limit.run(partial(pyarrow.parquet.ParquetFile, sys.stdin.buffer), 0.0)
    names = table.schema_arrow.names
    if column not in names:
        return _answer(_NO_COLUMN, json.dumps(names[:8]).encode())
    if names.count(column) > 1:
        return _answer(_BROKEN, f"several columns are named '{column}'".encode())
    groups = [table.metadata.row_group(n) for n in range(table.metadata.num_row_groups)]
    if any(group.total_byte_size > most for group in groups):
        return _answer(_TOO_LARGE)
    if pyarrow.types.is_string(table.schema_arrow.field(column).type):
        # A dictionary stays one: written out, its texts may be of any size.
        table = pyarrow.parquet.ParquetFile(
            sys.stdin.buffer, metadata=table.metadata, read_dictionary=[column]
        )
    batches = table.iter_batches(batch_size=ROWS, columns=[column], use_threads=False)
    earned = 0.0
    while (batch := limit.run(lambda: next(batches, None), earned)) is not None:
        earned = 0.0
        for value in batch.column(0):
            if isinstance(value, pyarrow.DictionaryScalar) and value.is_valid:
                value = value.value
            if not value.is_valid:  # null: a document without text, which is left out and counted
                _answer(_TEXT)
            elif isinstance(value, pyarrow.StringScalar):
                content = value.as_buffer()
                earned += EARNED * len(content)
                _answer(_TEXT, content)
            else:
                _answer(_NO_STRING, type(value.as_py()).__name__.encode())
    _answer(_END)


def main() -> int:
    """Answer with the rows of the Parquet file on stdin."""
    import pyarrow
    import pyarrow.parquet  # before the limit: libraries are large

    column, most = sys.argv[1], int(sys.argv[2])
    size = sys.stdin.buffer.seek(0, 2)
    sys.stdin.buffer.seek(0)
    python_child.limit_memory(MEMORY + TIMES * most)
    limit = python_child.TimeLimit(SECONDS + OF_FILE * size, WAIT)
    with suppress(BrokenPipeError):
        try:
            _decode(column, most, limit)
        except MemoryError:
            return 1
        except (pyarrow.ArrowException, OSError, ValueError) as error:
            reason = str(error).splitlines() or [type(error).__name__]
            _answer(_BROKEN, reason[0][:300].encode())
        sys.stdout.buffer.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
