"""What a longer context buys: the same tokens scored with 1,024, 2,048, … tokens before them, and
which of them gain most.

Documents longer than the longest context are cut into stretches of that many tokens. The last
tokens of each, half of the shortest context, are the targets; for each context c one window shows
the c tokens that end there. So a target has between c/2 and c tokens before it at the shortest
context, and all but the same number of c at every other.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from longctx.evaluation.windows import Document, Window, window_of

MOST_GAINS = 20  # tokens that gain most, in the result
MOST_OF_ONE = 3  # of them in one document
BEFORE = 24  # tokens of text shown before one of them
AFTER = 8  # and after it


@dataclass
class Gain:
    """A token that is predicted better with a long context."""

    owner: int  # number of its document
    position: int
    short: float  # nats with the shortest context
    long: float  # nats with the longest
    ids: list[int]  # tokens around it
    at: int  # its place in `ids`

    @property
    def nats(self) -> float:
        return self.short - self.long


@dataclass
class Contexts:
    """Nats of the targets at each of `contexts`, ascending; the longest is the limit."""

    contexts: list[int]
    tokens: int = 0  # targets at each context
    documents: int = 0  # longer than the limit
    nats: list[float] = field(default_factory=list)
    gains: list[Gain] = field(default_factory=list)
    # (owner, end of the stretch) → number of the context → nats, until both ends are there.
    waiting: dict[tuple[int, int], dict[int, np.ndarray]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.nats = self.nats or [0.0] * len(self.contexts)

    @property
    def targets(self) -> int:
        """Tokens that are scored at the end of each stretch."""
        return max(1, self.contexts[0] // 2)

    def windows(self, owner: int, document: Document) -> Iterator[Window]:
        """Every stretch of a document at every context, of which there is one at least."""
        limit, tokens = self.contexts[-1], len(document.ids)
        self.documents += tokens > limit
        for end in range(limit, tokens, limit):
            for context in self.contexts:
                seen = context - self.targets
                window = window_of(owner, document, end - context, end, seen, context)
                if window.targets:
                    yield window

    def add(self, window: Window, nats: np.ndarray) -> None:
        """Take in the losses of one of `windows`."""
        number = self.contexts.index(window.context)
        self.nats[number] += math.fsum(nats)
        if number == 0:
            self.tokens += window.targets
        if len(self.contexts) > 1 and number in (0, len(self.contexts) - 1):
            end = window.begin + window.context
            both = self.waiting.setdefault((window.owner, end), {})
            both[number] = nats
            if len(both) == 2:
                del self.waiting[window.owner, end]
                self._gains(window, end, both[0], both[len(self.contexts) - 1])

    def _gains(self, window: Window, end: int, short: np.ndarray, long: np.ndarray) -> None:
        n = len(short)
        for place in np.argsort(long - short, kind="stable")[:MOST_OF_ONE].tolist():
            if short[place] <= long[place]:
                break
            at = len(window.ids) - n + place  # of the target, in the ids that this window shows
            first = max(0, at - BEFORE)
            self.gains.append(
                Gain(
                    window.owner,
                    end - n + 1 + place,
                    float(short[place]),
                    float(long[place]),
                    window.ids[first : at + 1 + AFTER].tolist(),
                    at - first,
                )
            )
        self.gains = most(self.gains)

    def rows(self) -> list[dict[str, Any]]:
        """One row per context, nothing where no document is longer than the longest."""
        if not self.tokens:
            return []
        return [
            {
                "context": context,
                "tokens": self.tokens,
                "nats": nats,
                "loss": nats / self.tokens,
                "perplexity": math.exp(min(nats / self.tokens, 700.0)),
                "gain": (self.nats[0] - nats) / self.tokens,
            }
            for context, nats in zip(self.contexts, self.nats, strict=True)
        ]


def most(gains: Sequence[Gain]) -> list[Gain]:
    """The tokens that gain most, at most a few of one document."""
    chosen: list[Gain] = []
    counts: dict[int, int] = {}
    order = sorted(gains, key=lambda gain: (gain.nats, -gain.owner, -gain.position), reverse=True)
    for gain in order:
        counts[gain.owner] = counts.get(gain.owner, 0) + 1
        if counts[gain.owner] <= MOST_OF_ONE and len(chosen) < MOST_GAINS:
            chosen.append(gain)
    return chosen
