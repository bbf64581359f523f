"""data=text: local .txt and .md files (one document each), .jsonl (or .ndjson) and .parquet files
(a document per line or row), compressed or not.

A folder is searched for files with these endings. A file that the user names, or that a glob finds,
may have any other ending and is then plain text. Links are followed, and every folder and file is
read once, so loops of links end. (fsspec and glob cannot do that.)
"""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import os
import re
import zlib
from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from longctx import untrusted
from longctx.config.data_config import DataConfig
from longctx.data.corpus import Corpus, Document, Shard, Source, register, text_in
from longctx.files import check_utf8

if TYPE_CHECKING:
    from longctx.data.chat import Template

# A file may hold this many bytes of text, or this many times its own size if that is more: text
# packs to a third or a tenth of its size, a bomb to a thousandth.
UNPACKED = 128 << 20
RATIO = 20
ROWS = 256  # of a Parquet file, decoded together
OF_LINES = (".jsonl", ".ndjson")
OF_ROWS = (*OF_LINES, ".parquet")
FORMATS = (".txt", ".md", *OF_ROWS)


class _XzStreams(io.RawIOBase):
    """The unpacked bytes of every stream in an .xz file.

    lzma.open stops at the padding that may stand between streams and drops what follows it.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self.file = file
        self.stream = lzma.LZMADecompressor()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while True:
            packed = b""
            if self.stream.eof:
                packed = self.stream.unused_data
                while not (packed := packed.lstrip(b"\0")):  # padding
                    packed = self.file.read(io.DEFAULT_BUFFER_SIZE)
                    if not packed:
                        return 0
                self.stream = lzma.LZMADecompressor()
            elif self.stream.needs_input:
                packed = self.file.read(io.DEFAULT_BUFFER_SIZE)
                if not packed:
                    raise EOFError("its end is missing")
            if piece := self.stream.decompress(packed, len(buffer)):
                buffer[: len(piece)] = piece
                return len(piece)


def _open_zst(file: IO[bytes]) -> Any:
    import pyarrow  # 0.3 s

    return pyarrow.input_stream(file, compression="zstd")


_COMPRESSIONS: dict[str, Callable[[IO[bytes]], Any]] = {
    ".gz": gzip.open,
    ".bz2": bz2.open,
    ".xz": lambda file: io.BufferedReader(_XzStreams(file)),
    ".zst": _open_zst,
}


class _Capped(io.RawIOBase):
    """The unpacked bytes of a compressed file; raises ValueError after `limit` bytes."""

    def __init__(self, file: Path, unpacked: Any, limit: int) -> None:
        self.file = file
        self.unpacked = unpacked
        self.left = limit

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        piece = self.unpacked.read(len(buffer))
        self.left -= len(piece)
        if self.left < 0:
            raise _too_large(self.file)
        buffer[: len(piece)] = piece
        return len(piece)


@register("text")
class Text(Source):
    """The files that data.path names."""

    keys = frozenset({"path", "text_column", "chat", "errors"})

    def check(self, config: DataConfig) -> None:
        if not config.paths():
            raise ValueError(
                "data.path is not set; data=text reads a file, folder or glob, data.path=..."
            )

    def check_files(self, config: DataConfig) -> None:
        _find_all(config)

    def without_effect(self, config: DataConfig) -> Mapping[str, str]:
        if config.chat:
            return {"text_column": "data.chat=true reads `messages`"}
        try:
            files = _find_all(config)
        except OSError:  # `open` reports it
            return {}
        if not any(_format(file)[0] in OF_ROWS for _, file in files):
            return {"text_column": "no file of data.path has rows with fields"}
        return {}

    def pinned(self, config: DataConfig) -> DataConfig:
        paths = [os.path.abspath(os.path.expanduser(path)) for path in config.paths()]
        if not paths:
            return config
        return replace(config, path=paths[0] if isinstance(config.path, str) else paths)

    def open(self, config: DataConfig, without: Set[bytes]) -> Corpus:
        files = _find_all(config)
        template = None
        if config.chat:
            from longctx.data.chat import Template  # needs tokenizers

            others = [file for _, file in files if _format(file)[0] not in OF_LINES]
            if others:
                raise ValueError(
                    f"data.chat=true: {others[0]} is no .jsonl file; "
                    "give files in which every line is a conversation"
                )
            template = Template.of(config)
        states, shards = [], []
        for name, file in files:
            check_utf8(os.fspath(file), "the name of this file is not UTF-8; rename it")
            status = file.stat()
            # The time of the last change is of the file on this disk. A copy, or a file unpacked
            # with the modification time of another one, has its own.
            states.append((name, status.st_size, status.st_mtime_ns, status.st_ctime_ns))
            shards.append(Shard(name, partial(_read, name, file, config, template)))
        identity: list[Any] = [states, config.text_column, config.errors]
        if template is not None:
            identity.append(template.fingerprint)
        holds_rows = any(_format(file)[0] in OF_ROWS for _, file in files)
        return Corpus(identity, shards, None if holds_rows else len(shards))


def _find_all(config: DataConfig) -> list[tuple[str, Path]]:
    """Return (name, file) for every file of data.path, each once."""
    files: dict[str, tuple[str, Path]] = {}
    for path in config.paths():
        for name, file in _find(path):
            files.setdefault(os.path.realpath(file), (name, file))
    return list(files.values())


def _find(path: str) -> list[tuple[str, Path]]:
    """Return (name, file) for a file, folder or glob, sorted by name."""
    file = Path(path).expanduser()
    if file.is_dir():
        found = [(name, inner) for name, inner in _walk(file) if _format(inner)[0] in FORMATS]
    elif os.path.lexists(file):
        return [(file.name, file)]
    else:
        found = _glob(file)
    if not found:
        raise FileNotFoundError(
            f"data.path={path}: no such file; a folder is searched for {', '.join(FORMATS)}, "
            "other endings need a glob, such as '*.py'"
        )
    return found


def _glob(pattern: Path) -> list[tuple[str, Path]]:
    """Return (name below the first wildcard, file) for the files that a pattern matches."""
    from fsspec.utils import glob_translate  # 0.15 s

    parts = pattern.parts
    wild = (at for at, part in enumerate(parts) if any(mark in part for mark in "*?["))
    fixed = next(wild, len(parts))
    root = Path(*parts[:fixed])
    if not root.is_dir():
        return []
    # fsspec takes ** for folders only as a part of its own.
    plain = [part if part == "**" else re.sub(r"\*+", "*", part) for part in parts[fixed:]]
    translated = re.compile(glob_translate("/".join(plain)))
    return [(name, file) for name, file in _walk(root) if translated.match(name)]


def _walk(root: Path) -> list[tuple[str, Path]]:
    """Return (name under root, file) for every file that is not hidden, sorted by name."""

    def fail(error: OSError) -> None:
        raise error

    files = []
    entered = set()
    # os.walk leaves out a folder that it cannot read, and its documents, unless `onerror` raises.
    for folder, subfolders, names in os.walk(root, followlinks=True, onerror=fail):
        real = os.path.realpath(folder)
        if real in entered:
            subfolders.clear()
            continue
        entered.add(real)
        subfolders[:] = sorted(name for name in subfolders if not name.startswith("."))
        for name in names:
            if not name.startswith("."):
                file = Path(folder, name)
                files.append((file.relative_to(root).as_posix(), file))
    return sorted(files)


def _format(file: Path) -> tuple[str, str]:
    """Return (format, compression): the endings of the name in lower case, "" for none."""
    compression = file.suffix.lower() if file.suffix.lower() in _COMPRESSIONS else ""
    return Path(file.name[: len(file.name) - len(compression)]).suffix.lower(), compression


def _read(
    name: str, file: Path, config: DataConfig, template: Template | None
) -> Iterator[Document]:
    ending, compression = _format(file)
    try:
        with untrusted.open_file(file) as stream:
            opened: IO[bytes] = stream
            if compression:
                unpacked = _COMPRESSIONS[compression](stream)
                opened = io.BufferedReader(_Capped(file, unpacked, _limit(file)), 1 << 20)
            if ending in OF_LINES:
                rows = _rows(file, opened, config)
                named = ((f"{name}:{number}", f"{file}:{number}", row) for number, row in rows)
                if template is not None:
                    yield from template.conversations(named)
                    return
                for title, place, row in named:
                    yield Document(title, _encodable(text_in(row, place, config), place, config))
            elif ending == ".parquet":
                # Parquet is read from its end, which only unpacked bytes have.
                whole = io.BytesIO(opened.read()) if compression else opened
                for number, text in enumerate(_parquet_texts(file, whole, config), start=1):
                    yield Document(f"{name}:{number}", text)
            else:
                yield Document(name, _decode(opened.read(), str(file), config))
    except (EOFError, OSError, zlib.error, lzma.LZMAError) as error:
        raise ValueError(f"{file}: cannot be read, or is not complete ({error})") from error


def _limit(file: Path) -> int:
    return max(UNPACKED, RATIO * file.stat().st_size)


def _too_large(file: Path) -> ValueError:
    return ValueError(
        f"{file}: holds more than {_limit(file):,} bytes of text, {RATIO} times its size; "
        "if that is right, unpack it or write it anew"
    )


def _rows(
    file: Path, stream: IO[bytes], config: DataConfig
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (line number, object) for every line that is not empty."""
    for number, line in enumerate(stream, start=1):
        if not line.strip():
            continue
        place = f"{file}:{number}"
        text = _decode(line, place, config)
        try:
            row = json.loads(text)
        except (ValueError, RecursionError) as error:  # deep brackets, thousands of digits
            raise ValueError(f"{place}: not JSON ({error}); every line is one object") from error
        if not isinstance(row, dict):
            raise ValueError(f"{place}: expected an object, found a {type(row).__name__}")
        if config.chat:
            row = json.loads(_encodable(json.dumps(row, ensure_ascii=False), place, config))
        yield number, row


def _parquet_texts(file: Path, stream: IO[bytes], config: DataConfig) -> Iterator[str]:
    """Yield the text of every row."""
    import pyarrow  # 0.2 s
    import pyarrow.parquet

    left = _limit(file)
    column = config.text_column
    try:
        table = pyarrow.parquet.ParquetFile(stream)
        names = table.schema_arrow.names
        if names.count(column) != 1:
            raise ValueError(
                f"{file}: needs one field '{column}' (there are: {', '.join(names[:8])}); "
                "set data.text_column"
            )
        number = 0
        for batch in table.iter_batches(batch_size=ROWS, columns=[column], use_threads=False):
            for value in batch.column(0):
                number += 1
                place = f"{file}: row {number}"
                if isinstance(value, pyarrow.DictionaryScalar) and value.is_valid:
                    value = value.value
                if isinstance(value, pyarrow.StringScalar) and value.is_valid:
                    # Arrow does not check that a string is UTF-8.
                    text = _decode(bytes(value.as_buffer()), place, config, "utf-8")
                else:
                    text = text_in({column: value.as_py()}, place, config)
                left -= len(text)
                if left < 0:
                    raise _too_large(file)
                yield text
    except pyarrow.ArrowException as error:
        reason = str(error).partition("\n")[0][:300]
        raise ValueError(f"{file}: not a readable .parquet file ({reason})") from error


def _encodable(text: str, place: str, config: DataConfig) -> str:
    """Return `text` without halves of surrogate pairs, as data.errors says.

    JSON can write such a half, UTF-8 cannot.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        if config.errors == "strict":
            raise ValueError(
                f"{place}: half of a surrogate pair, which is no character; "
                "mend it, or data.errors=replace"
            ) from error
        return text.encode(errors="replace").decode()
    return text


def _decode(data: bytes, place: str, config: DataConfig, encoding: str = "utf-8-sig") -> str:
    try:
        return data.decode(encoding, config.errors)
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{place}: not UTF-8 (byte 0x{error.object[error.start]:02x} at {error.start}); "
            "convert it, or data.errors=replace"
        ) from error
