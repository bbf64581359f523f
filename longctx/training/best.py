"""The step with the lowest validation loss: its checkpoint stays, and a run may end when no later
one is lower.
"""

from __future__ import annotations

from typing import Any


class Best:
    """Follows the validation losses of a run; the same on every rank.

    `patience` is how many validations in a row may bring no lower loss before the run ends; None:
    any number.
    """

    def __init__(self, patience: int | None) -> None:
        self.patience = patience
        self.loss: float | None = None
        self.step = 0
        self.since = 0  # validations

    def add(self, step: int, row: dict[str, Any]) -> None:
        """Take note of a validation; one before the first step has no checkpoint."""
        if step == 0 or "val_loss" not in row:
            return
        if self.loss is None or row["val_loss"] < self.loss:
            self.loss, self.step, self.since = row["val_loss"], step, 0
        else:
            self.since += 1

    @property
    def is_over(self) -> bool:
        """Whether the run ends here."""
        return self.patience is not None and self.since >= self.patience

    def describe(self, step: int) -> str:
        """Why the run ends after `step`."""
        return (
            f"ended after step {step:,}: {self.since:,} validations without a lower loss than "
            f"{self.loss:.4f} after step {self.step:,} (patience={self.patience})"
        )

    def state(self) -> dict[str, Any]:
        """What a checkpoint holds of it."""
        return {"loss": self.loss, "step": self.step, "since": self.since}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from `state`."""
        self.loss, self.step, self.since = state["loss"], state["step"], state["since"]
