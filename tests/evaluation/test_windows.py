"""Windows: every token scored once, all of them in rows that are nearly full, read only a little
ahead.
"""

import numpy as np
import pytest

from longctx.evaluation.windows import AHEAD, Window, batches, spans


@pytest.mark.parametrize("context", [1, 2, 5, 8, 64])
@pytest.mark.parametrize("tokens", [0, 1, 2, 3, 8, 9, 10, 33, 64, 65, 66])
def test_every_token_is_scored_once_with_enough_context(tokens: int, context: int) -> None:
    for stride in range(1, context + 1):
        scored: list[int] = []
        for begin, end, first in spans(tokens, context, stride):
            assert 0 < end - begin <= context
            assert begin < first <= end < tokens
            assert begin == 0 or first - begin == context - stride + 1
            scored += range(first, end + 1)
        assert scored == list(range(1, tokens))


def windows(lengths: list[int]) -> list[Window]:
    return [Window(n, 0, np.arange(length + 1), 0) for n, length in enumerate(lengths)]


@pytest.mark.parametrize("rows", [1, 3, 16])
def test_rows_hold_every_window_once_and_never_too_much(rows: int) -> None:
    unpacked = windows(np.random.default_rng(0).integers(1, 101, size=400).tolist())
    packed = list(batches(iter(unpacked), 100, rows))
    assert sorted(window.owner for batch in packed for row in batch for window in row) == list(
        range(400)
    )
    assert all(len(batch) == rows for batch in packed[:-1])
    used = [sum(len(window.ids) - 1 for window in row) for batch in packed for row in batch]
    assert max(used) <= 100
    assert sum(used) > 0.93 * 100 * len(used)


def test_windows_are_read_a_few_batches_ahead() -> None:
    read = []
    source = (read.append(window.owner) or window for window in windows([10] * 1000))
    next(batches(source, 10, 2))
    assert len(read) == max(AHEAD[0] * 2, AHEAD[1])
