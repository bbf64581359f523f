"""Ranks that are threads of one process, for tests of what they write together."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from torch import Tensor

RANKS = 3


def rows_of_ranks(x: Tensor) -> list[slice]:
    """Cut as fully_shard does: equal parts, but the last may be smaller or empty."""
    size = -(-len(x) // RANKS)
    starts = [min(rank * size, len(x)) for rank in range(RANKS)]
    return [slice(start, min(start + size, len(x))) for start in starts]


def on_all_ranks(target: Callable[[int], None]) -> None:
    """Call target(rank) in a thread for each rank."""
    with ThreadPoolExecutor(RANKS) as pool:
        list(pool.map(target, range(RANKS)))
