"""Compressed files, unpacked whole and within a limit: .gz, .bz2, .xz, .zst."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import IO, Any

from longctx import untrusted
from longctx.config.fields import refuse
from longctx.files import one_line

# A file may hold this many bytes of text, or this many times its own size if that is more: text
# packs to a third or a tenth of its size, a bomb to a thousandth.
UNPACKED = 128 << 20
RATIO = 20


class _Streams:
    """The unpacked bytes of every stream of an .xz or .bz2 file.

    lzma.open stops at padding between streams and drops the rest of the file, bz2.open too.
    """

    def __init__(self, decompressor: Callable[[], Any], file: IO[bytes]) -> None:
        self.decompressor = decompressor
        self.file = file
        self.stream = decompressor()

    def read(self, size: int) -> Any:
        while True:
            packed = b""
            if self.stream.eof:
                packed = self.stream.unused_data
                while not (packed := packed.lstrip(b"\0")):  # padding
                    packed = self.file.read(io.DEFAULT_BUFFER_SIZE)
                    if not packed:
                        return b""
                self.stream = self.decompressor()
            elif self.stream.needs_input:
                packed = self.file.read(io.DEFAULT_BUFFER_SIZE)
                if not packed:
                    raise EOFError("its end is missing")
            if piece := self.stream.decompress(packed, size):
                return piece


def _open_zst(file: IO[bytes]) -> Any:
    import pyarrow  # 0.3 s

    return pyarrow.input_stream(file, compression="zstd")


_READERS: dict[str, Callable[[IO[bytes]], Any]] = {
    ".gz": gzip.open,
    ".bz2": partial(_Streams, bz2.BZ2Decompressor),
    ".xz": partial(_Streams, lzma.LZMADecompressor),
    ".zst": _open_zst,
}


class _Unpacked(io.RawIOBase):
    """The unpacked bytes of a compressed file; more than its limit are a ValueError."""

    def __init__(self, file: Path, unpacked: Any) -> None:
        self.file, self.unpacked = file, unpacked
        self.limit = self.left = max(UNPACKED, RATIO * file.stat().st_size)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        piece = self.unpacked.read(len(buffer))
        self.left -= len(piece)
        holds = f"{self.file}: holds more than {self.limit:,} bytes of text, {RATIO} times its size"
        refuse((self.left < 0, f"{holds}; if that is right, unpack it or write it anew"))
        buffer[: len(piece)] = piece
        return len(piece)


def split_name(file: Path) -> tuple[str, str]:
    """Return (format, compression): the endings of the name in lower case, "" for none."""
    compression = file.suffix.lower() if file.suffix.lower() in _READERS else ""
    return Path(file.name[: len(file.name) - len(compression)]).suffix.lower(), compression


@contextmanager
def opened(file: Path) -> Iterator[IO[bytes]]:
    """Open a file, unpacked. Whatever its readers raise becomes a ValueError that names it."""
    compression = split_name(file)[1]
    try:
        with untrusted.open_file(file) as stream:
            if compression:
                unpacked = _Unpacked(file, _READERS[compression](stream))
                yield io.BufferedReader(unpacked, 1 << 20)
            else:
                yield stream
    except ValueError:  # names the file, and mostly the line
        raise
    except Exception as error:
        problem = f"cannot be read, or is not complete ({one_line(error)})"
        raise ValueError(f"{file}: {problem}") from error
