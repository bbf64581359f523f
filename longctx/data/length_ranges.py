"""data.lengths={8k-32k: 1, 32k-128k: 3, 128k-: 5}: weights of documents by their tokens.

No numpy here: the command line reads this file for every command.
"""

from __future__ import annotations

import re
import sys
from itertools import pairwise
from typing import NamedTuple

from longctx.config.data_config import DataConfig
from longctx.config.fields import Key, refuse, typed

_RANGE = re.compile(r"(\d+[km]?)?-(\d+[km]?)?", re.IGNORECASE)
_TOKENS, _WEIGHT = Key(type=int, unit=1024), Key(type=float)


def check_selection(config: DataConfig) -> None:
    """Raise ValueError for wrong ranges of lengths, and for a filter that is none."""
    length_ranges(config)
    is_known = config.filter in (None, "gzip") or str(config.filter).endswith(".jsonl")
    advice = "gzip, or the FILE.jsonl that longctx score writes"
    refuse((not is_known, f"data.filter={config.filter}: {advice}"))


class Range(NamedTuple):
    """Documents of `first` to `end` - 1 tokens, and the weight of their sequences."""

    first: int
    end: int
    weight: float


def length_ranges(config: DataConfig) -> list[Range]:
    """Return the ranges of data.lengths in ascending order; raise ValueError for a wrong one."""
    ranges = []
    for name, given in config.lengths.items():
        key, match = f"data.lengths.{name}", _RANGE.fullmatch(str(name))
        problem = f"{key}={given}: {name} is no range of tokens; give one such as 8k-32k or 128k-"
        bounds = match.groups() if match else (None, None)
        refuse((bounds == (None, None), problem))
        texts = zip(bounds, (0, sys.maxsize), strict=True)
        first, end = (typed(key, text or default, _TOKENS) for text, default in texts)
        refuse((first >= end, problem))
        weight = typed(key, given, _WEIGHT)
        advice = "above 0 to 10^6; data.min_tokens and data.max_tokens leave documents out"
        refuse((not 0 < weight <= 1e6, f"{key}={given}: {advice}"))
        ranges.append(Range(first, end, weight))
    for before, after in pairwise(sorted(ranges)):
        problem = f"data.lengths: two ranges have documents of {after.first:,} tokens"
        refuse((before.end > after.first, f"{problem}; let one end where the other begins"))
    return sorted(ranges)
