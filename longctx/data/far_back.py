"""How far tokens look back: how many tokens of their own document come before them.

A long context teaches only what such tokens need. `table` counts in whole documents; `line` counts
in the sequences of training, in the shares in which they are drawn.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

SHOWN = (4096, 32768, 131072)  # tokens before a token, in a run's first lines
BINS = (0, 1024, 4096, 8192, 16384, 32768, 65536, 131072)
BAR = 40  # characters for all tokens
FEW = 0.01  # of the tokens: with fewer beyond half of a sequence, its length is not reached


def beyond(lengths: np.ndarray, limit: int) -> int:
    """Count the tokens with more than `limit` tokens before them in documents of `lengths`."""
    return int(np.maximum(lengths - limit - 1, 0).sum())


def table(lengths: Mapping[str, np.ndarray]) -> list[dict[str, str]]:
    """Return a row for each of BINS: the share of tokens beyond it by source and, if there are
    several, of all; the bar is the share of all tokens up to the next bin.
    """
    everything = np.concatenate(list(lengths.values()))
    columns = {"tokens": everything} if len(lengths) == 1 else {**lengths, "all": everything}
    rows = []
    for limit, following in zip(BINS, [*BINS[1:], int(everything.max())], strict=True):
        within = (beyond(everything, limit) - beyond(everything, following)) / everything.sum()
        bar = "█" * round(BAR * within) or "▏" * int(within > 0)
        shares = {name: f"{beyond(own, limit) / own.sum():.1%}" for name, own in columns.items()}
        rows.append({"N": f"{limit:,}", **shares, "up to the next N": bar})
    return rows


def line(shares: Mapping[str, Callable[[int], float]], longest: int, seq_len: int) -> str:
    """Return how far the tokens of each source look back, and if documents, the `longest` of which
    has so many tokens, hardly reach `seq_len`. `shares` tell the share of tokens beyond a limit.
    """
    each = []
    for limit in [limit for limit in SHOWN if limit < seq_len] or [seq_len // 2]:
        found = ", ".join(f"{name} {share(limit):.1%}".strip() for name, share in shares.items())
        each.append(f"more than {limit:,}: {found}")
    each[0] = "tokens that follow " + each[0].replace(":", " of their own document:", 1)
    if max((share(seq_len // 2) for share in shares.values()), default=0) < FEW:
        problem = f"documents hardly reach half of seq_len={seq_len:,}"
        each.append(f"{problem} (the longest has {longest:,} tokens)")
    return "; ".join(each) if shares else ""
