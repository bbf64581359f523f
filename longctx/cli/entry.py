"""What every command line shares: exit codes, and quick imports of large libraries."""

from __future__ import annotations

import gc
import io
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from longctx import files, garbage, stop_signal
from longctx.distributed.launched import leave_to_first, number_here

NOT_UTF8 = "not text in UTF-8; give other characters, or rename the file or folder"


@contextmanager
def libraries() -> Iterator[None]:
    """Import large libraries inside this block, in which the garbage collector pauses. On a
    terminal it is said that they load, which takes 5 to 30 s where their files are not in memory.
    """
    if "torch" not in sys.modules and sys.stderr.isatty() and number_here() == 0:
        print("loading torch ...", file=sys.stderr, flush=True)
    with garbage.paused():
        yield
        gc.freeze()  # libraries stay: later collections leave them out
    stop_signal.check()


def answer(
    argv: list[str], help_text: Callable[[], str], do: Callable[[list[str]], int | None]
) -> int:
    """Call `do(argv)` and return the exit code: its own (None: 0), 0 for help, 2 for a mistake,
    which is one line on stderr, files.FULL_DISK where a disk is full, 128 + its number for a
    signal, as 130 for Ctrl-C and 141 (SIGPIPE) where nobody reads stdout any more.

    A mistake is a ValueError or an OSError; LONGCTX_TRACEBACK=1 shows where it was raised. A signal
    is one also where a compiled module raises another error for it, as numpy's import does.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):  # an arrow must not end a run in latin-1
        sys.stdout.reconfigure(errors="replace")
    with stop_signal.caught() as stop:
        try:
            if asks_help(argv):
                print(help_text(), flush=True)
                return 0
            for argument in argv:
                files.check_utf8(argument, NOT_UTF8)
            check_given_once(argv)
            check_home()
            code = do(argv) or 0
            sys.stdout.flush()
            return code
        except BrokenPipeError:  # the reader of our output, such as `head`, has closed it
            files.silence_stdout()
            return 128 + signal.SIGPIPE
        except (Exception, KeyboardInterrupt) as error:
            if isinstance(error, KeyboardInterrupt) or stop.has_raised:
                if number_here() == 0:
                    unsaved = ", unsaved since the last checkpoint" if stop.waits else ""
                    print(f"stopped by {stop.name}{unsaved}", file=sys.stderr)
                return stop.code
            if not isinstance(error, ValueError | OSError):
                raise
            if os.environ.get("LONGCTX_TRACEBACK"):
                traceback.print_exception(error)
            line = files.printable(" ".join(str(error).split()))
            print(f"error: {line}", file=sys.stderr)
            return files.exit_code(error)


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


def check_home() -> None:
    """Raise ValueError if this user has no home folder: our caches and those of libraries are
    there.
    """
    if os.path.expanduser("~") == "~":
        leave_to_first()
        raise ValueError(
            f"HOME: not set, and user {os.getuid()} has no entry in /etc/passwd; set HOME to a "
            "folder in which this user may write"
        )
