"""Local files: .txt and .md (one document each), .jsonl (or .ndjson) and .parquet (a document a
line or row), compressed or not.

A folder is searched for files with these endings; a file that is named, or that a glob finds, may
have any other ending and is then read as plain text. Links are followed, and every folder and file
is read once, so loops of links end.
"""

from __future__ import annotations

import bz2
import fnmatch
import gzip
import io
import json
import lzma
import os
import re
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import IO, Any

from longctx.config.data_config import DataConfig
from longctx.data.sources import Corpus, Document, Part, template_of

OF_LINES = (".jsonl", ".ndjson")
OF_ROWS = (*OF_LINES, ".parquet")
FORMATS = (".txt", ".md", *OF_ROWS)


def _open_zst(path: Path) -> IO[bytes]:
    import pyarrow

    return io.BufferedReader(pyarrow.input_stream(str(path), compression="zstd"))


_COMPRESSIONS: dict[str, Callable[[Path], Any]] = {
    ".gz": gzip.open,
    ".bz2": bz2.open,
    ".xz": lzma.open,
    ".zst": _open_zst,
}


def open_corpus(config: DataConfig) -> Corpus:
    files: dict[str, tuple[str, Path]] = {}  # real path -> (name, path): each file once
    for path in config.paths():
        for name, file in _find(path):
            files.setdefault(os.path.realpath(file), (name, file))
    identity, parts = [], []
    for name, file in files.values():
        if _leads_nowhere(file):
            raise FileNotFoundError(
                f"{file}: a link to {os.readlink(file)}, which is not there; mend it, or take it out"
            )
        status = file.stat()
        # The last time is of the file on this disk: a copy, or one unpacked with the time of
        # another, has its own.
        identity.append((name, status.st_size, status.st_mtime_ns, status.st_ctime_ns))
        parts.append(Part(name, partial(_read, name, file, config)))
    one_each = all(_format(file)[0] not in OF_ROWS for _, file in files.values())
    settings: list[Any] = [identity, config.text_column, config.errors]
    if config.chat:
        others = [str(file) for _, file in files.values() if _format(file)[0] not in OF_LINES]
        if others:
            raise ValueError(
                f"data.chat=true: {others[0]} is no .jsonl file, in which every line is a conversation"
            )
        settings.append(template_of(config).fingerprint)
    return Corpus(settings, parts, len(parts) if one_each else None)


def holds_rows(path: str) -> bool:
    """Whether one of the files at a path of `data.path` has rows with fields; FileNotFoundError
    where there is none.
    """
    return any(_format(file)[0] in OF_ROWS for _, file in _find(path))


def _find(path: str) -> list[tuple[str, Path]]:
    """(name, file) for a file, folder or glob, sorted by name; raises FileNotFoundError when there
    is none.
    """
    place = Path(path).expanduser()
    if place.is_file():
        return [(place.name, place)]
    if place.is_dir():
        found = [(name, file) for name, file in _walk(place) if _format(file)[0] in FORMATS]
        if not found:
            raise FileNotFoundError(
                f"data.path={path}: no {', '.join(FORMATS)} file in this folder"
            )
        return found
    if not any(character in path for character in "*?["):
        raise FileNotFoundError(f"data.path={path}: no such file or folder")
    parts = place.parts
    fixed = next(
        at for at, part in enumerate(parts) if any(character in part for character in "*?[")
    )
    root = Path(*parts[:fixed]) if fixed else Path(".")
    pattern = re.compile(_translate(parts[fixed:]))
    found = (
        [(name, file) for name, file in _walk(root) if pattern.fullmatch(name)]
        if root.is_dir()
        else []
    )
    if not found:
        raise FileNotFoundError(f"data.path={path}: this pattern matches no file")
    return found


def _translate(parts: tuple[str, ...]) -> str:
    """A glob's parts as a regular expression over names joined by `/`; `**` stands for any number
    of folders.
    """
    regex = ""
    for at, part in enumerate(parts):
        last = at == len(parts) - 1
        if part == "**":
            regex += ".*" if last else "(?:.*/)?"
        else:
            wildcard = (
                fnmatch.translate(part)
                .replace("(?s:", "", 1)
                .rsplit(")", 1)[0]
                .replace(".*", "[^/]*")
            )
            regex += wildcard + ("" if last else "/")
    return regex


def _walk(root: Path) -> list[tuple[str, Path]]:
    """(name under root, file) for every file that is not hidden, sorted by name; each real folder
    is entered once.
    """

    def fail(error: OSError) -> None:
        raise OSError(
            f"data.path: cannot read the folder {error.filename} ({error.strerror})"
        ) from error

    found, entered = [], set()
    for folder, folders, files in os.walk(root, followlinks=True, onerror=fail):
        real = os.path.realpath(folder)
        if real in entered:
            folders.clear()
            continue
        entered.add(real)
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in files:
            file = Path(folder, name)
            if not name.startswith(".") and (file.is_file() or _leads_nowhere(file)):
                found.append((file.relative_to(root).as_posix(), file))
    return sorted(found)


def _leads_nowhere(file: Path) -> bool:
    return file.is_symlink() and not file.exists()


def _format(file: Path) -> tuple[str, str]:
    """(format, compression) by the name's endings, lower case, '' for none."""
    compression = file.suffix.lower() if file.suffix.lower() in _COMPRESSIONS else ""
    return Path(file.name[: len(file.name) - len(compression)]).suffix.lower(), compression


def _read(name: str, file: Path, config: DataConfig) -> Iterator[Document]:
    kind, compression = _format(file)
    readers = {".parquet": _read_parquet} | dict.fromkeys(OF_LINES, _read_jsonl)
    try:
        with _COMPRESSIONS[compression](file) if compression else file.open("rb") as stream:
            yield from readers.get(kind, _read_text)(name, file, stream, config)
    except (EOFError, zlib.error, lzma.LZMAError, gzip.BadGzipFile) as error:
        raise ValueError(f"{file}: not a complete {compression} file ({error})") from error
    except OSError as error:
        if compression and error.errno is None:
            raise ValueError(f"{file}: not a complete {compression} file ({error})") from error
        raise OSError(f"{file}: cannot read this file ({error.strerror or error})") from error


def _read_text(name: str, file: Path, stream: IO[bytes], config: DataConfig) -> Iterator[Document]:
    yield Document(name, _decode(stream.read(), str(file), config))


def _read_jsonl(name: str, file: Path, stream: IO[bytes], config: DataConfig) -> Iterator[Document]:
    template = template_of(config) if config.chat else None
    for number, line in enumerate(stream, start=1):
        if not line.strip():
            continue
        place = f"{file}:{number}"
        decoded = _decode(line, place, config)
        try:
            row = json.loads(decoded)
        except json.JSONDecodeError as error:
            raise ValueError(
                f"{place}: not JSON ({error.msg}, column {error.colno}); every line is one object"
            ) from error
        except (
            ValueError,
            RecursionError,
        ) as error:  # a number of thousands of digits, brackets thousands deep
            raise ValueError(f"{place}: JSON that cannot be read ({error})") from error
        if not isinstance(row, dict):
            raise ValueError(
                f"{place}: expected an object with a field '{config.text_column}', found a {type(row).__name__}"
            )
        if template is not None:
            row = json.loads(_encodable(json.dumps(row, ensure_ascii=False), place, config))
            yield template.render(f"{name}:{number}", place, row)
            continue
        if config.text_column not in row:
            raise _no_column(place, config, list(row))
        text = row[config.text_column]
        if not isinstance(text, str):
            raise ValueError(
                f"{place}: field '{config.text_column}' is a {type(text).__name__}, expected a string"
            )
        yield Document(f"{name}:{number}", _encodable(text, place, config))


def _read_parquet(
    name: str, file: Path, stream: IO[bytes], config: DataConfig
) -> Iterator[Document]:
    import pyarrow
    import pyarrow.parquet

    source = stream if stream.seekable() else io.BytesIO(stream.read())
    try:
        table = pyarrow.parquet.ParquetFile(source)
        if config.text_column not in table.schema_arrow.names:
            raise _no_column(str(file), config, table.schema_arrow.names)
        row = 0
        for batch in table.iter_batches(batch_size=256, columns=[config.text_column]):
            for value in batch.column(0):
                row += 1
                try:
                    text = value.as_py()
                except (
                    UnicodeDecodeError
                ) as error:  # Arrow's strings are bytes that nobody looked at
                    text = _decode(error.object, f"{file}: row {row}", config)
                if not isinstance(text, str):
                    found = type(text).__name__
                    raise ValueError(
                        f"{file}: row {row}: '{config.text_column}' is {found}, expected a string"
                    )
                yield Document(f"{name}:{row}", text)
    except pyarrow.ArrowInvalid as error:
        raise ValueError(
            f"{file}: not a readable .parquet file ({str(error).splitlines()[0]})"
        ) from error


def _no_column(place: str, config: DataConfig, columns: list[str]) -> ValueError:
    has = ", ".join(columns[:8]) or "none"
    return ValueError(
        f"{place}: no field '{config.text_column}' (there are: {has}); set data.text_column"
    )


def _encodable(text: str, place: str, config: DataConfig) -> str:
    """`text` without halves of surrogate pairs, which JSON can write and no text holds: data.errors
    says what becomes of them.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        if config.errors == "strict":
            raise ValueError(
                f"{place}: half of a surrogate pair, which no text holds; data.errors=replace"
            ) from error
        return text.encode(errors="replace").decode()
    return text


def _decode(data: bytes, place: str, config: DataConfig) -> str:
    try:
        return data.decode(
            "utf-8-sig" if data.startswith(b"\xef\xbb\xbf") else "utf-8", config.errors
        )
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{place}: not UTF-8 (byte 0x{data[error.start]:02x} at {error.start}); convert it, or data.errors=replace"
        ) from error
