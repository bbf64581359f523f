"""What the command lines share: exit codes, and key=value words into a dataclass of options.

The fields of such a dataclass carry their meaning as `metadata`; their defaults tell the types.
"""

from __future__ import annotations

import dataclasses
import difflib
import gc
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def libraries() -> Iterator[None]:
    """Around their imports: Python's garbage collector rests, which else takes a quarter of the
    time to look through what stays.
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
    """The exit code of `do(argv)`, None for 0: help is 0, a mistake one line on stderr and 2,
    Ctrl-C 130.

    A mistake is a ValueError or an OSError; LONGCTX_TRACEBACK=1 shows where it came from. Ctrl-C is
    Ctrl-C also where a compiled module makes another error of it, as numpy's import does.
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
    except BrokenPipeError:  # the reader of our output, such as `head`, has seen enough
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
        return 2
    finally:
        if ours:
            signal.signal(signal.SIGINT, before)


def asks_help(argv: list[str]) -> bool:
    """Whether a word asks for help."""
    return any(word in ("-h", "--help", "help") for word in argv)


def read(options: type, words: list[str]) -> Any:
    """`options` filled from key=value words; lists are separated by commas. ValueError names the
    word that is wrong.
    """
    fields = {field.name: field for field in dataclasses.fields(options)}
    values: dict[str, Any] = {}
    for word in words:
        key, equals, text = word.partition("=")
        if not equals:
            raise ValueError(f"{word}: not of the form key=value; see --help")
        if key not in fields:
            close = difflib.get_close_matches(key, fields, n=1)
            raise ValueError(
                f"{key} is not a key{f'; did you mean {close[0]}?' if close else ''} (keys: {', '.join(fields)})"
            )
        values[key] = _value(key, text, fields[key].default)
    return options(**values)


def check_given_once(argv: list[str]) -> None:
    """ValueError where a key is given two values, of which one would do nothing."""
    given: dict[str, str] = {}
    for word in argv:
        key, equals, value = word.lstrip("+").partition("=")
        if equals and "/" not in key and given.setdefault(key, value) != value:
            raise ValueError(f"{word}: {key}={given[key]} is given too; leave one of them out")


def _value(key: str, text: str, default: Any) -> Any:
    if isinstance(default, tuple):
        kind: type = type(default[0])
        parts = [part for part in text.split(",") if part]
    else:
        kind, parts = type(default), [text]
    try:
        values = tuple(kind(part) for part in parts)
    except ValueError:
        several, one = (
            ("whole numbers", "a whole number") if kind is int else ("numbers", "a number")
        )
        raise ValueError(
            f"{key}={text}: not {several if isinstance(default, tuple) else one}"
        ) from None
    if not values or any(isinstance(value, int | float) and not value > 0 for value in values):
        wanted = "give at least one, above 0" if isinstance(default, tuple) else "must be above 0"
        raise ValueError(f"{key}={text}: {wanted}")
    return values if isinstance(default, tuple) else values[0]


def help_lines(options: type) -> list[str]:
    """Each key with its default and meaning."""
    lines = []
    for field in dataclasses.fields(options):
        default = (
            ",".join(map(str, field.default)) if isinstance(field.default, tuple) else field.default
        )
        lines.append(f"      {f'{field.name}={default}':<60}  {field.metadata['help']}")
    return lines
