"""data=text: local .txt and .md files (one document each), .jsonl (or .ndjson) and .parquet (a
document a line or row), compressed or not.

A folder is searched for files with these endings; a file that is named, or that a glob finds, may
have any other ending and is then read as plain text. Links are followed, and every folder and file
is read once, so loops of links end (which is why the folders are not walked by fsspec: it follows
no links).
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
from longctx.data.corpus import Corpus, Document, Shard, Source, register
from longctx.files import check_utf8

if TYPE_CHECKING:
    from longctx.data.chat import Template

# A file may hold so many bytes of text, or so many times its own size if that is more: text is
# packed to a third or a tenth, a bomb to a thousandth.
UNPACKED = 128 << 20
RATIO = 20
WINDOW = 128 << 20  # bytes that unpacking may keep: zstd's own limit; xz -9 needs 65 MiB
ROWS = 256  # of a Parquet file, decoded together
OF_LINES = (".jsonl", ".ndjson")
OF_ROWS = (*OF_LINES, ".parquet")
FORMATS = (".txt", ".md", *OF_ROWS)


class _Unpacked(io.RawIOBase):
    """What an .xz file unpacks to, with dictionaries of at most WINDOW, which lzma.open does not
    bound.
    """

    def __init__(self, path: Path) -> None:
        self.file = open(path, "rb")  # noqa: SIM115 (close() closes it)
        self.stream = self._next()  # the first; a file may have several

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while True:
            packed = b""
            if self.stream.eof:
                packed = self.stream.unused_data.lstrip(b"\0")  # padding
                packed = packed or self.file.read(io.DEFAULT_BUFFER_SIZE).lstrip(b"\0")
                if not packed:
                    return 0
                self.stream = self._next()
            elif self.stream.needs_input:
                packed = self.file.read(io.DEFAULT_BUFFER_SIZE)
                if not packed:
                    raise EOFError("its end is missing")
            if piece := self.stream.decompress(packed, len(buffer)):
                buffer[: len(piece)] = piece
                return len(piece)

    def close(self) -> None:
        self.file.close()
        super().close()

    def _next(self) -> lzma.LZMADecompressor:
        return lzma.LZMADecompressor(memlimit=WINDOW)


def _open_zst(path: Path) -> IO[bytes]:
    import pyarrow  # 0.3 s

    return io.BufferedReader(pyarrow.input_stream(str(path), compression="zstd"))


_COMPRESSIONS: dict[str, Callable[[Path], Any]] = {
    ".gz": gzip.open,
    ".bz2": bz2.open,
    ".xz": lambda path: io.BufferedReader(_Unpacked(path)),
    ".zst": _open_zst,
}


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
        for path in config.paths():
            _find(path)

    def without_effect(self, config: DataConfig) -> Mapping[str, str]:
        if config.chat:
            return {"text_column": "data.chat=true reads `messages`"}
        if not _holds_rows(config):
            return {"text_column": "no file of data.path has rows with fields"}
        return {}

    def pinned(self, config: DataConfig) -> DataConfig:
        paths = [os.path.abspath(os.path.expanduser(path)) for path in config.paths()]
        if not paths:
            return config
        return replace(config, path=paths[0] if isinstance(config.path, str) else paths)

    def open(self, config: DataConfig, without: Set[bytes]) -> Corpus:
        files: dict[str, tuple[str, Path]] = {}  # real path -> (name, path): each file once
        for path in config.paths():
            for name, file in _find(path):
                files.setdefault(os.path.realpath(file), (name, file))
        template = None
        if config.chat:
            from longctx.data.chat import Template  # needs tokenizers

            others = [str(file) for _, file in files.values() if _format(file)[0] not in OF_LINES]
            if others:
                raise ValueError(
                    f"data.chat=true: {others[0]} is no .jsonl file; "
                    "give files in which every line is a conversation"
                )
            template = Template.of(config)
        states, shards = [], []
        for name, file in files.values():
            if _is_dead_link(file):
                raise FileNotFoundError(
                    f"{file}: a link to {os.readlink(file)}, which is not there; "
                    "mend it, or take it out"
                )
            check_utf8(os.fspath(file), "the name of this file is not UTF-8; rename it")
            status = file.stat()
            # The last time is of the file on this disk: a copy, or one unpacked with the time of
            # another, has its own.
            states.append((name, status.st_size, status.st_mtime_ns, status.st_ctime_ns))
            shards.append(Shard(name, partial(_read, name, file, config, template)))
        identity: list[Any] = [states, config.text_column, config.errors]
        if template is not None:
            identity.append(template.fingerprint)
        one_each = all(_format(file)[0] not in OF_ROWS for _, file in files.values())
        return Corpus(identity, shards, len(shards) if one_each else None)


def _holds_rows(config: DataConfig) -> bool:
    """Whether a file of data.path has rows with fields; true where none is there, which `open`
    reports.
    """
    try:
        files = [file for path in config.paths() for _, file in _find(path)]
    except OSError:
        return True
    return any(_format(file)[0] in OF_ROWS for file in files)


def _find(path: str) -> list[tuple[str, Path]]:
    """(name, file) for a file, folder or glob, sorted by name; FileNotFoundError for none."""
    place = Path(path).expanduser()
    if place.is_file():
        return [(place.name, place)]
    if place.is_dir():
        files = [(name, file) for name, file in _walk(place) if _format(file)[0] in FORMATS]
        if not files:
            raise FileNotFoundError(
                f"data.path={path}: no {', '.join(FORMATS)} file in this folder; "
                "other endings need a glob, such as '*.py'"
            )
        return files
    if os.path.lexists(place):
        untrusted.check_file(place)
    if not any(character in path for character in "*?["):
        raise FileNotFoundError(f"data.path={path}: no such file or folder; give one that exists")
    files = _glob(place)
    if not files:
        raise FileNotFoundError(f"data.path={path}: matches no file; give another pattern")
    return files


def _glob(place: Path) -> list[tuple[str, Path]]:
    """(name below the first wildcard, file) of the files that a pattern matches."""
    from fsspec.utils import glob_translate  # 0.15 s

    parts = place.parts
    fixed = next(at for at, part in enumerate(parts) if any(mark in part for mark in "*?["))
    root = Path(*parts[:fixed])
    if not root.is_dir():
        return []
    # fsspec takes ** for folders only as a part of its own.
    plain = [part if part == "**" else re.sub(r"\*+", "*", part) for part in parts[fixed:]]
    pattern = re.compile(glob_translate("/".join(plain)))
    return [(name, file) for name, file in _walk(root) if pattern.match(name)]


def _walk(root: Path) -> list[tuple[str, Path]]:
    """(name under root, file) for every file that is not hidden, sorted by name; each real folder
    is entered once.
    """

    def fail(error: OSError) -> None:
        raise OSError(
            f"data.path: cannot read the folder {error.filename} ({error.strerror})"
        ) from error

    files = []
    entered = set()
    for folder, subfolders, names in os.walk(root, followlinks=True, onerror=fail):
        real = os.path.realpath(folder)
        if real in entered:
            subfolders.clear()
            continue
        entered.add(real)
        subfolders[:] = sorted(name for name in subfolders if not name.startswith("."))
        for name in names:
            file = Path(folder, name)
            if not name.startswith(".") and (file.is_file() or _is_dead_link(file)):
                files.append((file.relative_to(root).as_posix(), file))
    return sorted(files)


def _is_dead_link(file: Path) -> bool:
    return file.is_symlink() and not file.exists()


def _format(file: Path) -> tuple[str, str]:
    """(format, compression) by the name's endings, lower case, '' for none."""
    compression = file.suffix.lower() if file.suffix.lower() in _COMPRESSIONS else ""
    return Path(file.name[: len(file.name) - len(compression)]).suffix.lower(), compression


def _read(
    name: str, file: Path, config: DataConfig, template: Template | None
) -> Iterator[Document]:
    ending, compression = _format(file)
    of_lines = dict.fromkeys(OF_LINES, partial(_read_jsonl, template))
    readers = {".parquet": _read_parquet} | of_lines
    try:
        with untrusted.open_file(file) as plain:
            most = max(UNPACKED, RATIO * os.fstat(plain.fileno()).st_size)
            opened = _COMPRESSIONS[compression](file) if compression else plain
            with opened as stream:
                used = 0
                for document in readers.get(ending, _read_text)(name, file, stream, config, most):
                    used += len(document.text)
                    if used > most:
                        raise _too_large(file, most)
                    yield document
    except (EOFError, zlib.error, lzma.LZMAError, OSError) as error:
        if compression and "memory" in str(error).lower():  # in the words of zstd and xz
            raise ValueError(
                f"{file}: needs more than {WINDOW >> 20} MiB to be unpacked; pack it again, as "
                "xz -9 or zstd -19 do"
            ) from error
        if isinstance(error, OSError) and not (compression and error.errno is None):
            raise OSError(f"{file}: cannot read this file ({error.strerror or error})") from error
        raise ValueError(f"{file}: not a complete {compression} file ({error})") from error


def _too_large(file: Path, most: int) -> ValueError:
    return ValueError(
        f"{file}: holds more than {most:,} bytes of text, {RATIO} times its size; "
        "if that is right, unpack it or write it anew"
    )


def _all_of(stream: IO[bytes], file: Path, most: int) -> bytes:
    """What `stream` holds; ValueError where that is more than `most` bytes."""
    content = stream.read(most + 1)
    if len(content) > most:
        raise _too_large(file, most)
    return content


def _lines(stream: IO[bytes], file: Path, most: int) -> Iterator[bytes]:
    """The lines of `stream`; ValueError where they have more than `most` bytes in all."""
    left = most
    while line := stream.readline(left + 1):
        left -= len(line)
        if left < 0:
            raise _too_large(file, most)
        yield line


def _read_text(
    name: str, file: Path, stream: IO[bytes], config: DataConfig, most: int
) -> Iterator[Document]:
    yield Document(name, _decode(_all_of(stream, file, most), str(file), config))


def _read_jsonl(
    template: Template | None,
    name: str,
    file: Path,
    stream: IO[bytes],
    config: DataConfig,
    most: int,
) -> Iterator[Document]:
    rows = _rows(file, stream, config, most)
    if template is not None:
        named = ((f"{name}:{number}", place, row) for number, place, row in rows)
        yield from template.conversations(named)
        return
    for number, place, row in rows:
        if config.text_column not in row:
            raise _no_column(place, config, list(row))
        text = "" if row[config.text_column] is None else row[config.text_column]
        if not isinstance(text, str):
            raise _no_string(place, config, type(text).__name__)
        yield Document(f"{name}:{number}", _encodable(text, place, config))


def _rows(
    file: Path, stream: IO[bytes], config: DataConfig, most: int
) -> Iterator[tuple[int, str, dict[str, Any]]]:
    """(line, place, object) of every line that is not empty."""
    for number, line in enumerate(_lines(stream, file, most), start=1):
        if not line.strip():
            continue
        place = f"{file}:{number}"
        row = _json_object(_decode(line, place, config), place, config)
        if config.chat:
            row = json.loads(_encodable(json.dumps(row, ensure_ascii=False), place, config))
        yield number, place, row


def _json_object(line: str, place: str, config: DataConfig) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(
            f"{place}: not JSON ({error.msg}, column {error.colno}); every line is one object"
        ) from error
    except (ValueError, RecursionError) as error:  # thousands of digits, or of nested brackets
        raise ValueError(f"{place}: JSON that cannot be read ({error})") from error
    if not isinstance(row, dict):
        raise ValueError(
            f"{place}: expected an object with a field '{config.text_column}', "
            f"found a {type(row).__name__}"
        )
    return row


def _read_parquet(
    name: str, file: Path, stream: IO[bytes], config: DataConfig, most: int
) -> Iterator[Document]:
    import pyarrow  # 0.2 s

    if _format(file)[1]:  # Parquet is read from its end
        stream = io.BytesIO(_all_of(stream, file, most))
    try:
        for row, value in enumerate(_column(file, stream, config), start=1):
            place = f"{file}: row {row}"
            if isinstance(value, pyarrow.DictionaryScalar) and value.is_valid:
                value = value.value
            if not value.is_valid:  # a document without text, which is left out and counted
                yield Document(f"{name}:{row}", "")
            elif isinstance(value, pyarrow.StringScalar):
                yield Document(f"{name}:{row}", _of_row(bytes(value.as_buffer()), place, config))
            else:
                raise _no_string(place, config, str(value.type))
    except (pyarrow.ArrowException, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:  # of the disk
            raise
        reason = (str(error).splitlines() or [type(error).__name__])[0][:300]
        raise ValueError(f"{file}: not a readable .parquet file ({reason})") from error


def _column(file: Path, stream: IO[bytes], config: DataConfig) -> Iterator[Any]:
    """Yield the values of data.text_column, each a scalar of pyarrow."""
    import pyarrow.parquet

    table, column = pyarrow.parquet.ParquetFile(stream), config.text_column
    names = table.schema_arrow.names
    if names.count(column) != 1:
        raise _no_column(str(file), config, names)
    for batch in table.iter_batches(batch_size=ROWS, columns=[column], use_threads=False):
        yield from batch.column(0)


def _of_row(value: bytes, place: str, config: DataConfig) -> str:
    try:
        return value.decode()  # a byte order mark is a character here
    except UnicodeDecodeError:  # Arrow does not check the bytes of a string
        return _decode(value, place, config)


def _no_column(place: str, config: DataConfig, columns: list[str]) -> ValueError:
    names = ", ".join(columns[:8]) or "none"
    return ValueError(
        f"{place}: needs one field '{config.text_column}' (there are: {names}); "
        "set data.text_column"
    )


def _no_string(place: str, config: DataConfig, found: str) -> ValueError:
    return ValueError(
        f"{place}: '{config.text_column}' is {found}, expected a string; set data.text_column"
    )


def _encodable(text: str, place: str, config: DataConfig) -> str:
    """`text` without halves of surrogate pairs, which JSON can write and UTF-8 cannot, treated as
    data.errors says.
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


def _decode(data: bytes, place: str, config: DataConfig) -> str:
    encoding = "utf-8-sig" if data.startswith(b"\xef\xbb\xbf") else "utf-8"
    try:
        return data.decode(encoding, config.errors)
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{place}: not UTF-8 (byte 0x{data[error.start]:02x} at {error.start}); "
            "convert it, or data.errors=replace"
        ) from error
