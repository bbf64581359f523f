"""data=text: local .txt and .md files (one document each), .jsonl (or .ndjson) and .parquet files
(a document per line or row), compressed or not.

A folder is searched for files with these endings. A file of any other ending is plain text if the
user names it or a glob finds it. Links are followed, and every folder and file is
read once, so loops of links end. (fsspec and glob cannot do that.)
"""

from __future__ import annotations

import bz2
import codecs
import gzip
import io
import json
import lzma
import os
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Set
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from longctx import untrusted
from longctx.config.data_config import DataConfig
from longctx.config.fields import refuse
from longctx.data.documents import Corpus, Document, NamedRows, Shard, encodable
from longctx.data.sources.registry import Source, absolute, register, state_of
from longctx.data.sources.rows import chat_template, documents_in, text_in

if TYPE_CHECKING:
    from longctx.data.chat import Template

# A file may hold this many bytes of text, or this many times its own size if that is more: text
# packs to a third or a tenth of its size, a bomb to a thousandth.
UNPACKED = 128 << 20
RATIO = 20
BATCH = 64  # rows of a Parquet file that are decoded together
OF_LINES = (".jsonl", ".ndjson")
OF_CHATS = (*OF_LINES, ".json")  # ShareGPT and Alpaca are mostly one array
OF_ROWS = (*OF_LINES, ".parquet")
# Read before torch is imported: a broken file is told at once
FILES_BEFORE, ROWS_BEFORE, BYTES_BEFORE = 8, 100, 1 << 20
FORMATS = (".txt", ".md", *OF_ROWS)


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


_COMPRESSIONS: dict[str, Callable[[IO[bytes]], Any]] = {
    ".gz": gzip.open,
    ".bz2": partial(_Streams, bz2.BZ2Decompressor),
    ".xz": partial(_Streams, lzma.LZMADecompressor),
    ".zst": _open_zst,
}


class _Unpacked(io.RawIOBase):
    """The unpacked bytes of a compressed file; more than its limit are a ValueError."""

    def __init__(self, file: Path, unpacked: Any) -> None:
        self.file = file
        self.unpacked = unpacked
        self.left = _limit(file)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        piece = self.unpacked.read(len(buffer))
        self.left -= len(piece)
        _check_left(self.file, self.left)
        buffer[: len(piece)] = piece
        return len(piece)


def _limit(file: Path) -> int:
    return max(UNPACKED, RATIO * file.stat().st_size)


def _check_left(file: Path, left: int) -> None:
    if left < 0:
        raise ValueError(
            f"{file}: holds more than {_limit(file):,} bytes of text, {RATIO} times its size; "
            "if that is right, unpack it or write it anew"
        )


@register("text")
class Text(Source):
    """The files that data.path names."""

    keys = frozenset({"path", "text_column", "chat", "preferences", "errors"})

    def check(self, config: DataConfig) -> None:
        example = "data=text reads a file, folder or glob, data.path=..."
        refuse((not config.paths(), f"data.path is not set; {example}"))

    def ignored(self, config: DataConfig, name: str) -> str:
        if name != "text_column" or config.chat or config.preferences:
            return super().ignored(config, name)
        # Of a missing path there is no file; `check_files` reports it
        formats = {_format(file)[0] for path in config.paths() for _, file in _find(path)}
        has_rows = not formats or not formats.isdisjoint(OF_ROWS)
        return "" if has_rows else "no file of data.path has rows with fields"

    def check_files(self, config: DataConfig) -> None:
        plain = [(ending, "") for ending in OF_LINES]
        files = (found for found in _find_all(config) if _format(found[1]) in plain)
        for name, file in islice(files, FILES_BEFORE):
            with untrusted.open_file(file) as stream:
                for _, place, row in islice(_lines(name, file, stream, config), ROWS_BEFORE):
                    if not (config.chat or config.preferences):
                        text_in(row, place, config)
                    if stream.tell() > BYTES_BEFORE:
                        break

    def left_out(self, config: DataConfig) -> str:
        return "; ".join(filter(None, map(_left_out, config.paths())))

    def pinned(self, config: DataConfig) -> DataConfig:
        paths = list(map(absolute, config.paths()))
        if not paths:
            return config
        return replace(config, path=paths[0] if isinstance(config.path, str) else paths)

    def open(self, config: DataConfig, without: Set[bytes]) -> Corpus:
        files = _find_all(config)
        has_rows = OF_ROWS if config.preferences else OF_CHATS
        for file in (file for _, file in files if _format(file)[0] not in has_rows):
            advice = "give files in which every line is a conversation"
            refuse(
                (config.preferences, f"{file} has no rows with answers; give .jsonl or .parquet"),
                (config.chat, f"data.chat=true: {file} is no .jsonl or .json file; {advice}"),
            )
        template = chat_template(config)
        states, shards = [], []
        for name, file in files:
            states.append(state_of(name, file))
            shards.append(Shard(name, partial(_read, name, file, config, template)))
        identity: list[Any] = [states, config.text_column, config.errors]
        if template is not None:
            identity.append(template.fingerprint)
        endings = {_format(file)[0] for _, file in files}
        holds_rows = config.chat or not endings.isdisjoint((*OF_ROWS, ".json"))
        return Corpus(identity, shards, None if holds_rows else len(shards))


def _find_all(config: DataConfig) -> list[tuple[str, Path]]:
    """Return (name, file) for every file of data.path, each once."""
    files: dict[str, tuple[str, Path]] = {}
    for path in config.paths():
        found = _find(path)
        if not found:
            others = _left_out(path)
            problem = f"no file to read, but {others}" if others else "no such file"
            if not others and Path(path).expanduser().is_dir():
                problem = "no file to read in this folder"
            advice = "; PDFs: docs/pdf-to-server.md" if ".pdf" in others else ""
            raise FileNotFoundError(
                f"data.path={path}: {problem}; a folder is searched for {', '.join(FORMATS)}, "
                f"other endings need a glob, such as '*.py'{advice}"
            )
        for name, file in found:
            # Linux allows any bytes in a name, but a document's name is text.
            name = name.encode(errors="replace").decode()
            files.setdefault(os.path.realpath(file), (name, file))
    return list(files.values())


def _left_out(path: str) -> str:
    """Count the files of a folder that are not read, by their endings, as in "3 .pdf, 1 .doc"; of
    more than five endings the rest as "7 others".
    """
    folder = Path(path).expanduser()
    files = _walk(folder) if folder.is_dir() else []
    counts = Counter(_format(file)[0] or "without an ending" for _, file in files)
    others = [(ending, count) for ending, count in counts.most_common() if ending not in FORMATS]
    rest = [("others", sum(count for _, count in others[5:]))] if others[5:] else []
    return ", ".join(f"{count:,} {ending}" for ending, count in others[:5] + rest)


def _find(path: str) -> list[tuple[str, Path]]:
    """Return (name, file) for a file, folder or glob, sorted by name."""
    file = Path(path).expanduser()
    if file.is_dir():
        return [(name, inner) for name, inner in _walk(file) if _format(inner)[0] in FORMATS]
    return [(file.name, file)] if os.path.lexists(file) else _glob(file)


def _glob(pattern: Path) -> list[tuple[str, Path]]:
    """Return (name below the first wildcard, file) for the files that a pattern matches."""
    from fsspec.utils import glob_translate  # 0.15 s

    parts = pattern.parts
    wild = (number for number, part in enumerate(parts) if any(mark in part for mark in "*?["))
    fixed = next(wild, len(parts))
    root = Path(*parts[:fixed])
    if not root.is_dir():
        return []
    # fsspec takes ** for folders only as a part of its own.
    plain = [part if part == "**" else re.sub(r"\*+", "*", part) for part in parts[fixed:]]
    translated = re.compile(glob_translate("/".join(plain)))
    # A pattern such as v*/*.txt may match a folder, and not the link that shows it as latest/
    files = _walk(root, once=False)
    return [(name, file) for name, file in files if translated.match(name)]


def _walk(root: Path, once: bool = True) -> list[tuple[str, Path]]:
    """Return (name under root, file) for every file that is not hidden, sorted by name.

    Of a folder that links show in several places only the first is read if `once`, else each. No
    folder is read inside of itself.
    """

    def fail(error: OSError) -> None:
        raise error

    files = []
    entered: set[str] = set()
    around: dict[str, set[str]] = {}  # path → its folder and those around it, without links
    # os.walk leaves out a folder that it cannot read, and its documents, unless `onerror` raises.
    for folder, subfolders, names in os.walk(root, followlinks=True, onerror=fail):
        real = os.path.realpath(folder)
        outer = around.get(os.path.dirname(folder), set())
        if real in (entered if once else outer):
            subfolders.clear()
            continue
        entered.add(real)
        around[folder] = outer | {real}
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
    broken = (EOFError, OSError, zlib.error, lzma.LZMAError)
    with (
        untrusted.named(file, "cannot be read, or is not complete ({})", broken),
        untrusted.open_file(file) as stream,
    ):
        opened: IO[bytes] = stream
        if compression:
            opened = io.BufferedReader(_Unpacked(file, _COMPRESSIONS[compression](stream)), 1 << 20)
        if ending not in OF_ROWS:
            whole_file = opened.read().removeprefix(codecs.BOM_UTF8)
            refuse((whole_file[257:262] == b"ustar", f"{file}: a tar archive; unpack it"))
            opened = io.BytesIO(whole_file)
            # An array or lines of objects: as text their brackets would be learned
            if ending == ".json" and re.match(rb"\s*\{[^\n]*\}\s*\n\s*\{", whole_file):
                ending = ".jsonl"
            elif not (ending == ".json" and (config.chat or _has_rows(whole_file, config))):
                yield Document(name, _decode(whole_file, str(file), config))
                return
        if ending in OF_LINES:
            rows = _lines(name, file, opened, config)
        elif ending == ".json":
            rows = _array(name, file, opened, config)
        else:
            # Parquet is read from its end, which only unpacked bytes have.
            whole = io.BytesIO(opened.read()) if compression else opened
            rows = _parquet(name, file, whole, config)
        yield from documents_in(rows, config, template)


def _has_rows(content: bytes, config: DataConfig) -> bool:
    """Return True for an array of objects, or for one object with a text."""
    if re.match(rb"\s*\{", content):
        with suppress(ValueError, RecursionError):
            row = json.loads(content.decode(errors=config.errors))
            return isinstance(row.get(config.text_column), str)
    return re.match(rb"\s*\[\s*\{", content) is not None


def _lines(name: str, file: Path, stream: IO[bytes], config: DataConfig) -> NamedRows:
    """Yield the object of every line that is not empty."""
    for number, line in enumerate(stream, start=1):
        if not line.strip():
            continue
        place = f"{file}:{number}"
        text = _decode(line, place, config)
        # RecursionError: deep brackets; ValueError: also for thousands of digits
        with untrusted.named(
            place, "not JSON ({}); every line is one object", (ValueError, RecursionError)
        ):
            row = json.loads(text)
        yield f"{name}:{number}", place, _object(row, place, config)


def _array(name: str, file: Path, stream: IO[bytes], config: DataConfig) -> NamedRows:
    """Yield an object, or every object of an array."""
    text = _decode(stream.read(), str(file), config)
    with untrusted.named(file, "not JSON ({})", (ValueError, RecursionError)):
        rows = json.loads(text)
    rows = [rows] if isinstance(rows, dict) else rows
    refuse((not isinstance(rows, list), f"{file}: expected an array"))
    for number, row in enumerate(rows, start=1):
        place = f"{file}: row {number}"
        yield f"{name}:{number}", place, _object(row, place, config)


def _object(row: Any, place: str, config: DataConfig) -> dict[str, Any]:
    """Return `row`; of a conversation, with texts that can be encoded."""
    wrong_type = f"{place}: expected an object, found a {type(row).__name__}"
    refuse((not isinstance(row, dict), wrong_type))
    if config.chat and not config.preferences:
        row = json.loads(encodable(json.dumps(row, ensure_ascii=False), place, config))
    return dict(row)


def _parquet(name: str, file: Path, stream: IO[bytes], config: DataConfig) -> NamedRows:
    """Yield every row: its text, or all fields of answers."""
    import pyarrow  # 0.2 s
    import pyarrow.parquet

    column, left, number = config.text_column, _limit(file), 0
    errors = (pyarrow.ArrowException, UnicodeDecodeError)
    with untrusted.named(file, "not a readable .parquet file ({})", errors):
        table = pyarrow.parquet.ParquetFile(stream)
        is_text = False
        if not config.preferences:
            names = table.schema_arrow.names
            found = f"found {', '.join(names[:8])}"
            problem = f"{file}: needs one field '{column}' ({found}); set data.text_column"
            refuse((names.count(column) != 1, problem))
            field_type = table.schema_arrow.field(column).type
            is_text = "string" in str(field_type) and not pyarrow.types.is_nested(field_type)
        columns = None if config.preferences else [column]
        for batch in table.iter_batches(batch_size=BATCH, columns=columns, use_threads=False):
            # Arrow does not check that a string is UTF-8, so its bytes are decoded below.
            if is_text:
                batch = batch.cast(pyarrow.schema({column: pyarrow.large_binary()}))
            for row in batch.to_pylist():
                number += 1
                place = f"{file}: row {number}"
                if columns and isinstance(row[column], bytes):
                    row[column] = _decode(row[column], place, config, "utf-8")
                left -= len(str(row))
                _check_left(file, left)
                yield f"{name}:{number}", place, row


def _decode(data: bytes, place: str, config: DataConfig, encoding: str = "utf-8-sig") -> str:
    if data.startswith(b"%PDF"):
        raise ValueError(f"{place}: a PDF, not text; docs/pdf-to-server.md turns it into text")
    with untrusted.named(place, "not UTF-8 ({}); convert it, or data.errors=replace"):
        return data.decode(encoding, config.errors)
