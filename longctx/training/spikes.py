"""Steps whose loss or gradient norm leaps out of those before: said, and with spike=skip dropped.

After SkipStepAdamW of OLMo-core: x is an outlier among the last 128 values where

    x > mean + 6 · standard deviation

and here also above the mean by a tenth of it, so that a loss that hardly moves is no alarm.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from statistics import fmean, pstdev
from typing import Any

WINDOW = 128  # values
LEAST = 8  # of them, before which nothing is an outlier
SIGMAS = 6.0
SHARE = 0.1  # of the mean that an outlier lies above it at least


class Spikes:
    """Counts outliers among the losses of a run; the same on every rank.

    With spike=flag it looks at the losses of logged rows, for which no step waits; with spike=skip
    at every step, of which it drops at most `budget` of the last WINDOW.
    """

    def __init__(self, kind: str, budget: int) -> None:
        self.kind, self.budget = kind, budget
        self.losses: deque[float] = deque(maxlen=WINDOW)
        self.norms: deque[float] = deque(maxlen=WINDOW)
        self.dropped: deque[int] = deque(maxlen=WINDOW)  # 1 for each of the last steps dropped
        self.found = self.skipped = 0  # since the run began
        self.lost = False  # the last step was dropped, and its loss or norm is not finite

    def drops(self, loss: float | None, norm: float) -> bool:
        """Whether a step is to be dropped, which then leaves weights and optimizer as they are.

        A step without a target has no loss and counts nowhere.
        """
        if loss is None:
            self.lost = False
            return False
        finite = math.isfinite(loss) and math.isfinite(norm)
        outlier = is_outlier(loss, self.losses) or is_outlier(norm, self.norms)
        drop = outlier and sum(self.dropped) < self.budget
        self.lost = drop and not finite
        self.dropped.append(int(drop))
        self.found += outlier
        self.skipped += drop
        if finite and not drop:
            self.losses.append(loss)
            self.norms.append(norm)
        return drop

    def row(self, row: dict[str, Any]) -> dict[str, int]:
        """The counts for a logged `row`, absent where they are 0."""
        if self.kind == "flag" and "loss" in row:
            self.found += is_outlier(row["loss"], self.losses)
            if math.isfinite(row["loss"]):
                self.losses.append(row["loss"])
        counts = {"loss_spikes": self.found, "steps_skipped": self.skipped}
        return {key: count for key, count in counts.items() if count}

    def state(self) -> dict[str, Any]:
        """What a checkpoint holds of it."""
        values = {name: list(getattr(self, name)) for name in ("losses", "norms", "dropped")}
        return values | {"found": self.found, "skipped": self.skipped}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from `state`."""
        for name in ("losses", "norms", "dropped"):
            setattr(self, name, deque(state[name], maxlen=WINDOW))
        self.found, self.skipped = state["found"], state["skipped"]


def is_outlier(value: float, before: Sequence[float]) -> bool:
    """Whether `value` leaps out of the values `before` it, or is not finite."""
    if not math.isfinite(value):
        return True
    if len(before) < LEAST:
        return False
    mean = fmean(before)
    return value > mean + max(SIGMAS * pstdev(before, mean), SHARE * abs(mean))
