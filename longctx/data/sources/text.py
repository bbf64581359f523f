"""data=text: local .txt and .md files (one document each), .jsonl (or .ndjson), .csv, .tsv and
.parquet files (a document per line or row), compressed or not.

A folder is searched for files with these endings; a file of rows without the fields that are read
is left out, and counted with those of other endings. A file of any other ending is plain text if
the user names it or a glob finds it. Links are followed, and every file is read once, so loops of
links end. (fsspec and glob cannot do that.)
"""

from __future__ import annotations

import codecs
import csv
import io
import json
import os
import re
from collections import Counter
from collections.abc import Iterator, Set
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from longctx import untrusted
from longctx.config.data_config import DataConfig
from longctx.config.fields import refuse
from longctx.data.documents import Corpus, Document, NamedRows, Shard
from longctx.data.sources.compressed import opened, split_name
from longctx.data.sources.registry import Source, absolute, register, state_of
from longctx.data.sources.rows import chat_template, documents_in, is_read

if TYPE_CHECKING:
    from longctx.data.chat import Template

BATCH = 64  # rows of a Parquet file that are decoded together
LONGEST_CELL = 1 << 30  # characters; csv's own limit of 131,072 is less than a long document
OF_LINES = (".jsonl", ".ndjson")
DELIMITERS = {".csv": ",", ".tsv": "\t"}
OF_ROWS = (*OF_LINES, *DELIMITERS, ".parquet")
FORMATS = (".txt", ".md", *OF_ROWS)


@register("text")
class LocalFiles(Source):
    """The files that data.path names."""

    keys = frozenset({"path", "text_column", "chat", "preferences", "errors"})

    def check(self, config: DataConfig) -> None:
        example = "data=text reads a file, folder or glob, data.path=..."
        refuse((not config.paths(), f"data.path is not set; {example}"))

    def check_files(self, config: DataConfig) -> None:
        _find_all(config)

    def left_out(self, config: DataConfig) -> str:
        return "; ".join(filter(None, (_left_out(path, config) for path in config.paths())))

    def pinned(self, config: DataConfig) -> DataConfig:
        paths = list(map(absolute, config.paths()))
        if not paths:
            return config
        return replace(config, path=paths[0] if isinstance(config.path, str) else paths)

    def open(self, config: DataConfig, without: Set[bytes]) -> Corpus:
        files = _find_all(config)
        for file in (file for _, file in files if split_name(file)[0] not in (*OF_ROWS, ".json")):
            problem = f"{file}: no rows; give files such as .jsonl"
            refuse(
                (config.preferences, f"{problem}, in which each is an answer, or a pair"),
                (config.chat, f"data.chat=true: {problem}, in which each is a conversation"),
            )
        template = chat_template(config)
        states, shards = [], []
        for name, file in files:
            states.append(state_of(name, file))
            shards.append(Shard(name, partial(_read, name, file, config, template)))
        identity: list[Any] = [states, config.text_column, config.errors]
        if template is not None:
            identity.append(template.fingerprint)
        endings = {split_name(file)[0] for _, file in files}
        holds_rows = config.chat or not endings.isdisjoint((*OF_ROWS, ".json"))
        return Corpus(identity, shards, None if holds_rows else len(shards))


def _find_all(config: DataConfig) -> list[tuple[str, Path]]:
    """Return (name, file) for every file of data.path, each once."""
    files: dict[str, tuple[str, Path]] = {}
    for path in config.paths():
        found = _find(path, config)
        if not found:
            others = _left_out(path, config) or "none that is not hidden"
            is_folder = Path(path).expanduser().is_dir()
            problem = f"no file to read, but {others}" if is_folder else "no such file"
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


def _left_out(path: str, config: DataConfig) -> str:
    """Count the files of a folder that are not read, by their endings, as in "3 .pdf, 1 .doc"; of
    more than five endings the rest as "7 others".
    """
    folder = Path(path).expanduser()
    read = set(_find(path, config))
    files = [file for file in _walk(folder) if file not in read] if folder.is_dir() else []
    counts = Counter(split_name(file)[0] or "without an ending" for _, file in files).most_common()
    rest = [("others", sum(count for _, count in counts[5:]))] if counts[5:] else []
    return ", ".join(f"{count:,} {ending}" for ending, count in counts[:5] + rest)


def _find(path: str, config: DataConfig) -> list[tuple[str, Path]]:
    """Return (name, file) for a file, folder or glob, sorted by name."""
    file = Path(path).expanduser()
    if file.is_dir():
        known = [(name, inner) for name, inner in _walk(file) if split_name(inner)[0] in FORMATS]
        # If no file is of the kind that is read, reading the first one says what it lacks
        return [found for found in known if _is_of_kind(*found, config)] or known
    return [(file.name, file)] if os.path.lexists(file) else _glob(file)


def _is_of_kind(name: str, file: Path, config: DataConfig) -> bool:
    """Return True if a file has what `config` reads: conversations, answers, or else text."""
    if split_name(file)[0] not in OF_ROWS:
        return not (config.chat or config.preferences)
    with opened(file) as stream:
        row = next(_rows(name, file, stream, config), None)
    return row is None or is_read(row[2], config)


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
    return [(name, file) for name, file in _walk(root) if translated.match(name)]


def _walk(root: Path) -> list[tuple[str, Path]]:
    """Return (name under root, file) for every file that is not hidden, sorted by name. No folder
    is read inside of itself, as links may show it.
    """
    files = []
    folders = [(root, frozenset[str]())]
    while folders:
        folder, around = folders.pop()
        real = os.path.realpath(folder)
        if real in around:
            continue
        with os.scandir(folder) as entries:
            for entry in entries:
                path = folder / entry.name
                if entry.name.startswith("."):
                    continue
                if entry.is_dir():
                    folders.append((path, around | {real}))
                else:
                    files.append((path.relative_to(root).as_posix(), path))
    return sorted(files)


def _read(
    name: str, file: Path, config: DataConfig, template: Template | None
) -> Iterator[Document]:
    ending = split_name(file)[0]
    with opened(file) as stream:
        if ending in OF_ROWS:
            yield from documents_in(_rows(name, file, stream, config), config, template)
            return
        content = stream.read().removeprefix(codecs.BOM_UTF8)
        refuse((content[257:262] == b"ustar", f"{file}: a tar archive; unpack it"))
        rows = _of_json(name, file, content, config) if ending == ".json" else None
        if rows is None:
            yield Document(name, _decode(content, str(file), config))
        else:
            yield from documents_in(rows, config, template)


def _rows(name: str, file: Path, stream: IO[bytes], config: DataConfig) -> NamedRows:
    """Read the rows of a file, each with its fields."""
    ending, compression = split_name(file)
    if ending == ".parquet":
        # It is read from its end, which only unpacked bytes have.
        stream = io.BytesIO(stream.read()) if compression else stream
        return _parquet(name, file, stream, config)
    return (_cells if ending in DELIMITERS else _lines)(name, file, stream, config)


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
        yield f"{name}:{number}", place, _object(row, place)


def _cells(name: str, file: Path, stream: IO[bytes], config: DataConfig) -> NamedRows:
    """Yield every row of a table, whose first line names the columns."""
    csv.field_size_limit(LONGEST_CELL)
    lines = (_decode(line, f"{file}:{n}", config) for n, line in enumerate(stream, start=1))
    table = csv.DictReader(lines, delimiter=DELIMITERS[split_name(file)[0]], strict=True)
    with untrusted.named(file, "not a table ({})", (csv.Error,)):
        for row in table:
            place = f"{file}:{table.line_num}"
            more = f"{place}: more cells than columns; quote those with a delimiter"
            refuse((None in row, more))
            # KTO's labels are the only cells that are no text
            if config.preferences and str(row.get("label")).lower() in ("true", "false"):
                row["label"] = row["label"].lower() == "true"
            yield f"{name}:{table.line_num}", place, row


def _of_json(name: str, file: Path, content: bytes, config: DataConfig) -> NamedRows | None:
    """Return the rows of a .json file: lines of objects, an array, or one object with a text. None
    for another, which is plain text; as text the brackets of rows would be learned.
    """
    if re.match(rb"\s*\{[^\n]*\}\s*\n\s*\{", content):
        return _lines(name, file, io.BytesIO(content), config)
    rows: Any = None
    if config.chat or config.preferences or re.match(rb"\s*(\[\s*)?\{", content):
        text = _decode(content, str(file), config)
        with untrusted.named(file, "not JSON ({})", (ValueError, RecursionError)):
            rows = json.loads(text)
    if isinstance(rows, dict) and is_read(rows, config):
        rows = [rows]
    is_array = isinstance(rows, list)
    refuse(((config.chat or config.preferences) and not is_array, f"{file}: expected an array"))
    places = ((f"{name}:{n}", f"{file}: row {n}", row) for n, row in enumerate(rows or [], start=1))
    objects = ((own, place, _object(row, place)) for own, place, row in places)
    return objects if is_array else None


def _object(row: Any, place: str) -> dict[str, Any]:
    refuse((not isinstance(row, dict), f"{place}: expected an object, found {type(row).__name__}"))
    return dict(row)


def _parquet(name: str, file: Path, stream: IO[bytes], config: DataConfig) -> NamedRows:
    """Yield every row: its text, or all fields if it has none or they are read."""
    import pyarrow  # 0.2 s
    import pyarrow.parquet

    errors = (pyarrow.ArrowException, UnicodeDecodeError)
    with untrusted.named(file, "not a readable .parquet file ({})", errors):
        table = pyarrow.parquet.ParquetFile(stream)
        column, names = config.text_column, table.schema_arrow.names
        columns = [column] if column in names and not (config.chat or config.preferences) else None
        problem = f"{file}: needs one field '{column}' (found {', '.join(names[:8])})"
        refuse((columns and names.count(column) > 1, f"{problem}; set data.text_column"))
        is_text = False
        if columns:
            field_type = table.schema_arrow.field(column).type
            is_text = "string" in str(field_type) and not pyarrow.types.is_nested(field_type)
        number = 0
        for batch in table.iter_batches(batch_size=BATCH, columns=columns, use_threads=False):
            # Arrow does not check that a string is UTF-8, so its bytes are decoded below.
            if is_text:
                batch = batch.cast(pyarrow.schema({column: pyarrow.large_binary()}))
            for row in batch.to_pylist():
                number += 1
                place = f"{file}: row {number}"
                if columns and isinstance(row[column], bytes):
                    row[column] = _decode(row[column], place, config, "utf-8")
                yield f"{name}:{number}", place, row


def _decode(data: bytes, place: str, config: DataConfig, encoding: str = "utf-8-sig") -> str:
    if data.startswith(b"%PDF"):
        raise ValueError(f"{place}: a PDF, not text; docs/pdf-to-server.md turns it into text")
    with untrusted.named(place, "not UTF-8 ({}); convert it, or data.errors=replace"):
        return data.decode(encoding, config.errors)
