"""Ranks that are threads of one process, for tests of what they write together."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from torch import Tensor

RANKS = 3
Barrier = Callable[[], object]


def rows_of_ranks(x: Tensor) -> list[slice]:
    """Cut as fully_shard does: equal parts, but the last may be smaller or empty."""
    size = -(-len(x) // RANKS)
    starts = [min(rank * size, len(x)) for rank in range(RANKS)]
    return [slice(start, min(start + size, len(x))) for start in starts]


def on_all_ranks(target: Callable[[int, Barrier], None]) -> list[BaseException | None]:
    """Run target(rank, barrier) in a thread for each rank; return the error of each, or None."""
    barrier = threading.Barrier(RANKS, timeout=300)
    with ThreadPoolExecutor(RANKS) as pool:
        ranks = [pool.submit(target, rank, barrier.wait) for rank in range(RANKS)]
    return [rank.exception() for rank in ranks]
