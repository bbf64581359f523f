"""Files that are replaced atomically: a reader finds the old one or the new one, never a part, and
a failure leaves the old one. Also exit codes, since a full disk has one of its own.
"""

from __future__ import annotations

import errno
import glob
import os
import re
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

FULL_DISK = 74  # EX_IOERR of sysexits.h: nothing about the request is wrong
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
FULL_TEXTS = tuple(map(os.strerror, FULL))
DAY = 86_400.0  # seconds after which a half-written file is of a killed process
PARTIAL = re.compile(r"\..+\.partial|\.step-\d+\.ckpt\.removed")


@contextmanager
def atomic(path: Path) -> Iterator[Path]:
    """Yield a path of the same name, in a hidden folder next to `path`, for a file, link or folder
    that becomes `path` at the end of the block.

    If the block raises, its files are removed and `path` stays as it was. An OSError without a file
    name, such as of a full disk, gets the name of `path`. A folder replaces only an empty one.
    """
    as_given, path = path, path.absolute()
    for left in path.parent.glob(f".{glob.escape(path.name)}.*.partial"):
        with suppress(FileNotFoundError):  # another process has just ended it
            if left.lstat().st_mtime < time.time() - DAY:
                remove(left)
    try:
        with TemporaryDirectory(".partial", f".{path.name}.", path.parent) as folder:
            yield Path(folder, path.name)
            os.replace(Path(folder, path.name), path)
    except OSError as error:
        if error.errno:  # without a number it has only its text, which a file name would hide
            error.filename = error.filename or str(as_given)
        raise


def as_umask_allows(path: Path) -> None:
    """Give a file the mode of a new one, if a library has made it for its owner alone."""
    mask = os.umask(0)
    os.umask(mask)
    path.chmod(0o666 & ~mask)


def write_text(path: Path, text: str) -> None:
    """Write `text` to `path` in UTF-8, atomically."""
    with atomic(path) as partial:
        partial.write_text(text, encoding="utf-8")


def remove(path: Path, strict: bool = False) -> None:
    """Remove a file, a link or a folder with all that is in it, if it exists; `strict` raises
    OSError if something of the folder stays.
    """
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=not strict)
    else:
        path.unlink(missing_ok=True)


def remove_partial(folder: Path) -> None:
    """Remove files that killed processes left half-written in `folder`: the names that `atomic`
    gives, and hidden checkpoints. No other process may be writing there.
    """
    for path in folder.glob(".*"):
        if PARTIAL.fullmatch(path.name):
            remove(path)


def to_disk(path: Path) -> None:
    """Wait until a file or a folder is on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def check_writable(folder: Path) -> None:
    """Raise OSError unless files can be made in `folder`."""
    probe = folder / f".probe.{os.getpid()}"
    try:
        probe.mkdir(exist_ok=True)
        remove(probe)
    except OSError as error:
        raise OSError(f"{folder}: no file can be made there: {error.strerror}") from error


def is_full(error: BaseException | None) -> bool:
    """Return True if `error`, or one that it was raised from, is of a full disk or a quota. Errors
    of libraries and other processes have only the text.
    """
    while error is not None:
        if getattr(error, "errno", None) in FULL or any(x in str(error) for x in FULL_TEXTS):
            return True
        error = error.__cause__ or error.__context__
    return False


def one_line(error: BaseException) -> str:
    """Return the beginning of an error's text in one line, its type if it has none."""
    return " ".join(str(error)[:2000].split()) or type(error).__name__


def open_closed_streams() -> None:
    """Open the standard streams that the caller has closed, as `>&-` does, on /dev/null."""
    # Else the next file to be opened would get the number of such a stream, and what is printed
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), "r+"))


def silence_stdout() -> None:
    """Let what this process prints from now on be lost, since nobody reads it."""
    # Python flushes at exit: a closed pipe would then end the command with an error.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def exit_code(error: BaseException) -> int:
    """Return the exit code of a command that ends with `error`: FULL_DISK, 2 for a mistake (another
    ValueError or OSError), and 1 for everything else.
    """
    if not isinstance(error, ValueError | OSError):
        return 1
    return FULL_DISK if is_full(error) else 2


def printable(text: str, kept: str = "") -> str:
    """Return text that moves no cursor, but for the characters `kept`: anybody can write names of
    folders and notes of runs. White space becomes a blank.
    """
    blanks = ("\ufffd", " ")
    return "".join(x if x.isprintable() or x in kept else blanks[x.isspace()] for x in text)
