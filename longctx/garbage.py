"""The garbage collector, kept away from what is made once and stays: libraries, compiled code.
Looking through it again and again is a fifth of the time that importing it takes.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def paused() -> Iterator[None]:
    """Collect nothing inside this block."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
