"""metrics.jsonl of a run folder, a line per record: its format and its one reader. Torch-free.

The file grows, so a run that still trains or was killed may leave its last line cut.
"""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any, TextIO

from longctx import files, untrusted
from longctx.runs.metrics import Record

FILE = "metrics.jsonl"


def append(file: TextIO, record: Record) -> None:
    """Write one record to `file` at once; null stands for a number that is not finite."""
    try:
        file.write(json.dumps(without_infinite(record), allow_nan=False) + "\n")
        file.flush()
    except OSError as error:
        error.filename = file.name
        raise


def without_infinite(value: Any) -> Any:
    """Return `value`, made of dicts and lists, with None for every number that is not finite."""
    value = value.tolist() if hasattr(value, "tolist") else value  # of torch or numpy
    if isinstance(value, dict):
        return {key: without_infinite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return list(map(without_infinite, value))
    return None if isinstance(value, float) and not math.isfinite(value) else value


class Tail:
    """Read the records that a growing metrics.jsonl gains; the start of a line waits for its end.

    Raises ValueError if the file is not a regular file in `folder`.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.lines = 0
        self.wrong = 0  # lines that hold no record
        self.inode, self.position, self.rest = 0, 0, b""

    def records(self, ended: bool = False) -> list[Record]:
        """Return the records since the last call; all of them if a resumed run replaced the file.
        If it has `ended`, its last line needs no line break: a kill may have come in between.
        """
        if not os.path.lexists(self.folder / FILE):
            return []
        with untrusted.open_file(self.folder / FILE, within=self.folder) as file:
            now = os.fstat(file.fileno())
            # A resumed run drops records of steps that it computes again, by a new file
            if now.st_ino != self.inode or now.st_size < self.position:
                self.inode, self.position, self.rest = now.st_ino, 0, b""
            file.seek(self.position)
            new = file.read()
        self.position += len(new)
        *lines, self.rest = (self.rest + new).split(b"\n")
        lines += [self.rest] if ended else []
        values = [parsed(line) for line in lines if line]
        records = [value for value in values if value is not None]
        self.lines += len(values)
        self.wrong += len(values) - len(records)
        return records


def read(folder: Path) -> list[Record]:
    """Return the records of metrics.jsonl, [] without such a file; raises ValueError as `Tail`."""
    return read_records(folder)[0]


def read_records(folder: Path) -> tuple[list[Record], str]:
    """Return the records of metrics.jsonl, and how many lines hold none ("" without any)."""
    tail = Tail(folder)
    records = tail.records(ended=True)
    return records, f"{tail.wrong} of {tail.lines:,} lines" if tail.wrong else ""


def parsed(line: bytes) -> Record | None:
    """Return the record in a line of metrics.jsonl; None if it is none as training logs them."""
    try:
        value: Any = json.loads(line)
        is_record = type(value["step"]) is int and type(value["tokens_seen"]) is int
    except (ValueError, RecursionError, LookupError, TypeError):
        return None
    return value if is_record else None


def drop_after(folder: Path, step: int) -> None:
    """Remove the records of steps past `step`, which a resumed run computes again."""
    records = [record for record in read(folder) if record["step"] <= step]
    files.write_text(folder / FILE, "".join(json.dumps(record) + "\n" for record in records))
