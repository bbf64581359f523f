"""The garbage collector, kept away from what lives as long as the process: libraries, compiled
code. Looking through it again and again is a fifth of the time that importing it takes.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def paused() -> Iterator[None]:
    """Collect nothing inside this block, and leave what it made out of later collections, unless it
    raises.
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
