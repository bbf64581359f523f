"""The file of `out=`: a whole line for each text that is done, whatever becomes of the others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, BinaryIO


class AnswerFile:
    """Writes each row to the .jsonl `path` at once; None: nowhere.

    What the file held before goes with the first row. A line that a full disk cuts off is taken
    back, and the OSError names the file.
    """

    def __init__(self, path: str | None) -> None:
        self.path = None if path is None else Path(path)
        self.file: BinaryIO | None = None
        self.size = 0  # bytes of whole lines

    def add(self, row: dict[str, Any]) -> None:
        """Write one row."""
        if self.path is None:
            return
        line = (json.dumps(row, ensure_ascii=False) + "\n").encode()
        try:
            if self.file is None:
                self.file = open(self.path, "wb", buffering=0)  # noqa: SIM115 (`close` does)
            written = 0
            while written < len(line):
                written += self.file.write(line[written:])
        except OSError as error:
            if self.file is not None:
                self.file.truncate(self.size)
            error.filename = error.filename or str(self.path)
            raise
        self.size += len(line)

    def close(self) -> None:
        if self.file is not None:
            self.file.close()
