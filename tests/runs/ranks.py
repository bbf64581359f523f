"""Ranks that are threads of one process, for tests of what they write together."""

import threading
from collections.abc import Callable

from torch import Tensor

RANKS = 3
Barrier = Callable[[], object]  # waits for all ranks


def rows_of_ranks(x: Tensor) -> list[slice]:
    """Cut as fully_shard does: equal parts, but the last may be smaller or empty."""
    size = -(-len(x) // RANKS)
    starts = [min(rank * size, len(x)) for rank in range(RANKS)]
    return [slice(start, min(start + size, len(x))) for start in starts]


def on_all_ranks(target: Callable[[int, Barrier], None]) -> list[object]:
    """Run target(rank, barrier) in a thread for each rank; return the error of each, or None."""
    barrier = threading.Barrier(RANKS)
    outcomes: list[object] = [None] * RANKS

    def run(rank: int) -> None:
        try:
            target(rank, lambda: barrier.wait(300))
        except OSError as error:
            outcomes[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(RANKS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return outcomes
