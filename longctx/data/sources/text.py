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
from longctx.data.sources.rows import chat_template, documents_in, is_read, of_table

if TYPE_CHECKING:
    from longctx.data.chat import Template

BATCH = 64  # rows of a Parquet file that are decoded together
LONGEST_CELL = 1 << 30  # characters; csv's own limit of 131,072 is less than a long document
OF_LINES = (".jsonl", ".ndjson")
DELIMITERS = {".csv": ",", ".tsv": "\t"}
OF_ROWS = (*OF_LINES, *DELIMITERS, ".parquet", ".json")
OF_JSON = (ValueError, RecursionError)  # also for thousands of digits; deep brackets
FORMATS = (".txt", ".md", *OF_ROWS[:-1])  # of a folder; its .json may be settings


@register("text")
class LocalFiles(Source):
    """The files that data.path names."""

    keys = frozenset({"path", "text_column", "chat", "preferences", "errors"})

    def check(self, config: DataConfig) -> None:
        refuse((not config.paths(), "data.path is not set; give a file, a folder or a glob"))

    def check_files(self, config: DataConfig) -> None:
        _find_all(config)

    def left_out(self, config: DataConfig) -> str:
        others = "; ".join(filter(None, (_left_out(path, config) for path in config.paths())))
        return others and f"{others}; a glob reads texts, such as data.path='FOLDER/**/*.rst'"

    def pinned(self, config: DataConfig) -> DataConfig:
        paths = list(map(absolute, config.paths()))
        if not paths:
            return config
        return replace(config, path=paths[0] if isinstance(config.path, str) else paths)

    def open(self, config: DataConfig, without: Set[bytes]) -> Corpus:
        files = _find_all(config)
        template = chat_template(config)
        shards = [Shard(x, partial(_read, x, file, config, template)) for x, file in files]
        identity: list[Any] = [[state_of(*file) for file in files]]
        identity += [config.text_column, config.errors]
        identity += [] if template is None else [template.fingerprint]
        endings = {split_name(file)[0] for _, file in files}
        return Corpus(identity, shards, len(shards) if endings.isdisjoint(OF_ROWS) else None)


def _find_all(config: DataConfig) -> list[tuple[str, Path]]:
    """Return (name, file) for every file of data.path, each once."""
    files: dict[str, tuple[str, Path]] = {}
    for path in config.paths():
        found = _find(path, config)
        if not found:
            others = _left_out(path, config)
            problem = "no such file"
            if Path(path).expanduser().is_dir():
                problem = f"no file to read (there: {others or 'none'})"
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
    """Count the files of a folder that are not read, by their endings: "3 .pdf, 1 .doc"."""
    folder = Path(path).expanduser()
    read = set(_find(path, config))
    files = [file for file in _walk(folder) if file not in read] if folder.is_dir() else []
    counts = Counter(split_name(file)[0] or "without an ending" for _, file in files)
    shown = [f"{count:,} {ending}" for ending, count in counts.most_common(5)]
    return ", ".join(shown + ["others"] * (len(counts) > 5))


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
    with opened(file) as stream:
        if split_name(file)[0] in OF_ROWS:
            yield from documents_in(_rows(name, file, stream, config), config, template)
            return
        content = stream.read()
        problem = "no rows, which are conversations or answers; give files such as .jsonl"
        refuse(
            (config.chat or config.preferences, f"{file}: {problem}"),
            (content[257:262] == b"ustar", f"{file}: a tar archive; unpack it"),
        )
        yield Document(name, _decode(content, str(file), config))


def _rows(name: str, file: Path, stream: IO[bytes], config: DataConfig) -> NamedRows:
    """Read the rows of a file, each with its fields."""
    ending, compression = split_name(file)
    if ending == ".parquet":
        # It is read from its end, which only unpacked bytes have.
        stream = io.BytesIO(stream.read()) if compression else stream
        return _parquet(name, file, stream, config)
    if ending == ".json":
        return _of_json(name, file, stream.read().removeprefix(codecs.BOM_UTF8), config)
    return (_cells if ending in DELIMITERS else rows_of_lines)(name, file, stream, config)


def rows_of_lines(name: str, file: Path, stream: IO[bytes], config: DataConfig) -> NamedRows:
    """Yield the object of every line that is not empty."""
    for number, line in enumerate(stream, start=1):
        if not line.strip():
            continue
        location = f"{file}:{number}"
        text = _decode(line, location, config)
        with untrusted.named(location, "not JSON ({}); every line is one object", OF_JSON):
            row = json.loads(text)
        yield f"{name}:{number}", location, _object(row, location)


def _cells(name: str, file: Path, stream: IO[bytes], config: DataConfig) -> NamedRows:
    """Yield every row of a table, whose first line names the columns."""
    csv.field_size_limit(LONGEST_CELL)
    lines = (_decode(line, f"{file}:{n}", config) for n, line in enumerate(stream, start=1))
    table = csv.DictReader(lines, delimiter=DELIMITERS[split_name(file)[0]], strict=True)
    with untrusted.named(file, "not a table ({})", (csv.Error,)):
        for row in table:
            location = f"{file}:{table.line_num}"
            more = f"{location}: more cells than columns; quote those with a delimiter"
            refuse((None in row, more))
            # KTO's labels are the only cells that are no text
            if config.preferences and str(row.get("label")).lower() in ("true", "false"):
                row["label"] = row["label"].lower() == "true"
            yield f"{name}:{table.line_num}", location, row


def _of_json(name: str, file: Path, content: bytes, config: DataConfig) -> NamedRows:
    """Return the rows of a .json file: lines of objects, an array, or one object."""
    if re.match(rb"\s*\{[^\n]*\}\s*\n\s*\{", content):
        return rows_of_lines(name, file, io.BytesIO(content), config)
    with untrusted.named(file, "not JSON ({})", OF_JSON):
        found = json.loads(_decode(content, str(file), config))
    rows = enumerate(found if isinstance(found, list) else [found], start=1)
    locations = ((f"{name}:{n}", f"{file}: row {n}", row) for n, row in rows)
    return ((own, location, _object(row, location)) for own, location, row in locations)


def _object(row: Any, location: str) -> dict[str, Any]:
    problem = f"{location}: expected an object, found {type(row).__name__}"
    refuse((not isinstance(row, dict), problem))
    return dict(row)


def _parquet(name: str, file: Path, stream: IO[bytes], config: DataConfig) -> NamedRows:
    """Yield every row: its text, or all fields if it has none or they are read."""
    import pyarrow  # 0.2 s
    import pyarrow.parquet

    errors = (pyarrow.ArrowException, UnicodeDecodeError)
    with untrusted.named(file, "not a readable .parquet file ({})", errors):
        table = pyarrow.parquet.ParquetFile(stream)
        names, is_text = table.schema_arrow.names, not (config.chat or config.preferences)
        columns = [config.text_column] if is_text and config.text_column in names else None
        batches = table.iter_batches(batch_size=BATCH, columns=columns, use_threads=False)
        rows = (row for batch in batches for row in batch.to_pylist())
        for number, row in enumerate(rows, start=1):
            yield f"{name}:{number}", f"{file}: row {number}", of_table(row)


def _decode(data: bytes, location: str, config: DataConfig) -> str:
    if data.startswith(b"%PDF"):
        raise ValueError(f"{location}: a PDF, not text; docs/pdf-to-server.md turns it into text")
    with untrusted.named(location, "not UTF-8 ({}); convert it; data may have data.errors=replace"):
        return data.decode("utf-8-sig", config.errors)
