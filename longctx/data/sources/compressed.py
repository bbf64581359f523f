"""Compressed files, unpacked within a limit: .gz, .bz2, .zst.

pyarrow unpacks them: gzip and bz2 of the standard library drop what follows padding between two
streams without a word, and pyarrow refuses it.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from longctx import untrusted
from longctx.config.fields import refuse
from longctx.files import one_line

# A file may hold this many bytes of text, or this many times its own size if that is more: text
# packs to a third or a tenth of its size, a bomb to a thousandth.
UNPACKED = 128 << 20
RATIO = 20
COMPRESSIONS = {".gz": "gzip", ".bz2": "bz2", ".zst": "zstd"}


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
    compression = file.suffix.lower() if file.suffix.lower() in COMPRESSIONS else ""
    return Path(file.name[: len(file.name) - len(compression)]).suffix.lower(), compression


@contextmanager
def opened(file: Path) -> Iterator[IO[bytes]]:
    """Open a file, unpacked. Whatever its readers raise becomes a ValueError that names it."""
    compression = split_name(file)[1]
    try:
        with untrusted.open_file(file) as stream:
            if not compression:
                yield stream
                return
            import pyarrow  # 0.3 s

            unpacked = pyarrow.input_stream(stream, compression=COMPRESSIONS[compression])
            yield io.BufferedReader(_Unpacked(file, unpacked), 1 << 20)
    except ValueError:  # names the file, and mostly the line
        raise
    except Exception as error:
        problem = f"cannot be read, or is not complete ({one_line(error)})"
        raise ValueError(f"{file}: {problem}") from error
