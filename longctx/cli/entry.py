"""What every command line shares: exit codes, and quick imports of large libraries."""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from longctx import files

FULL_DISK = 74  # EX_IOERR of sysexits.h: nothing about the request is wrong


@contextmanager
def libraries() -> Iterator[None]:
    """Import large libraries inside this block: the garbage collector pauses, which otherwise takes
    a quarter of the time to look through objects that stay.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
        gc.freeze()
    finally:
        gc.enable()


def answer(
    argv: list[str], help_text: Callable[[], str], do: Callable[[list[str]], int | None]
) -> int:
    """Call `do(argv)` and return the exit code: its own (None: 0), 0 for help, 2 for a mistake,
    which is one line on stderr, FULL_DISK where a disk is full, 130 for Ctrl-C.

    A mistake is a ValueError or an OSError; LONGCTX_TRACEBACK=1 shows where it was raised. Ctrl-C
    is 130 also where a compiled module raises another error for it, as numpy's import does.
    """
    interrupts: list[int] = []

    def interrupt(number: int, frame: Any) -> None:
        interrupts.append(number)
        signal.default_int_handler(number, frame)

    before = signal.getsignal(signal.SIGINT)
    ours = (
        before is signal.default_int_handler
        and threading.current_thread() is threading.main_thread()
    )
    if ours:
        signal.signal(signal.SIGINT, interrupt)
    try:
        if asks_help(argv):
            print(help_text(), flush=True)
            return 0
        check_given_once(argv)
        code = do(argv) or 0
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # the reader of our output, such as `head`, has closed it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        if interrupts:
            return 130
        if not isinstance(error, ValueError | OSError):
            raise
        if os.environ.get("LONGCTX_TRACEBACK"):
            traceback.print_exception(error)
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return FULL_DISK if files.is_full(error) else 2
    finally:
        if ours:
            signal.signal(signal.SIGINT, before)


def asks_help(argv: list[str]) -> bool:
    """Tell whether an argument asks for help."""
    return any(argument in ("-h", "--help", "help") for argument in argv)


def check_given_once(argv: list[str]) -> None:
    """Raise ValueError where a key is given two values, one of which would be ignored."""
    values: dict[str, str] = {}
    for argument in argv:
        key, equals, value = argument.lstrip("+").partition("=")
        if equals and "/" not in key and values.setdefault(key, value) != value:
            raise ValueError(f"{argument}: {key}={values[key]} is given too; leave one of them out")
