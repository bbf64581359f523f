"""Cross entropy: the mean of -log p(target) over the target tokens of a step.

A target of -100 is not scored: padding, the end of a document, and in conversations what others
wrote.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from longctx.training.batches import micro_batch
from longctx.training.objectives import Objective

if TYPE_CHECKING:
    from torch import Tensor

    from longctx.model import GPT
    from longctx.training.batches import MicroBatch

LARGEST = 700.0  # exp of more is no float


def loss(model: GPT, batch: MicroBatch) -> Tensor:
    """Return the sum over the targets, times their weight in the step.

    The weight is applied before gradients are rounded to 16 bits.
    """
    summed: Tensor = model(
        batch.tokens, batch.targets, batch.mask, reduction="sum", scale=batch.weight
    )
    return summed


def losses(model: GPT, batch: MicroBatch) -> Tensor:
    """Return the loss of each target, 0 if it is not scored."""
    each: Tensor = model(batch.tokens, batch.targets, batch.mask, reduction="none")
    return each


def metrics(mean: float) -> dict[str, float]:
    """Return the metrics of a validation whose targets have this mean loss."""
    return {"val_loss": mean, "val_perplexity": math.exp(min(mean, LARGEST))}


OBJECTIVE = Objective(micro_batch, loss, losses, metrics)
