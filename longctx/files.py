"""Files that are replaced atomically: a reader finds the old one or the new one, never a part, and
a failure leaves the old one.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def atomic(path: Path) -> Iterator[Path]:
    """A free name beside `path`, with its suffix, for a file, link or folder that becomes `path` at
    the end of the block.

    If the block raises, what it wrote is removed and `path` stays as it was. An OSError that names
    no file, such as that of a full disk, then names `path`. A folder replaces only an empty one.
    """
    as_given, path = path, path.absolute()
    partial = path.with_name(f".{path.stem}.{os.getpid()}{path.suffix}")
    remove(partial)  # of a process that was killed, whose number came again
    try:
        yield partial
        os.replace(partial, path)
    except OSError as error:
        if error.errno:  # one without it has only its text, which a file name would hide
            error.filename = error.filename or str(as_given)
        raise
    finally:
        remove(partial)


def write_text(path: Path, text: str) -> None:
    """Write `text` to `path` in UTF-8, atomically."""
    with atomic(path) as partial:
        partial.write_text(text, encoding="utf-8")


def remove(path: Path) -> None:
    """Remove a file, a link or a folder with all that is in it; nothing if there is none."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def by_step(path: Path) -> tuple[int, str]:
    """The sort key of checkpoints: their names hold at least eight digits, so a longer name is of a
    later step.
    """
    return len(path.name), path.name


def printable(text: str) -> str:
    """Text that moves no cursor and breaks no encoding: names of folders are anybody's."""
    return "".join(letter if letter.isprintable() else "\ufffd" for letter in text)
