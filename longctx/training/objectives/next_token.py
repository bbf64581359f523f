"""Cross entropy: -log p of each next token."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from longctx.config.doors import OBJECTIVES, Objective, ObjectiveConfig
from longctx.config.fields import key

if TYPE_CHECKING:
    from torch import Tensor

    from longctx.model import GPT
    from longctx.training.batches import MicroBatch

LARGEST = 700.0  # the exponential of a larger number is no float


@dataclass
class CrossEntropyKeys(ObjectiveConfig):
    """The keys of cross entropy."""

    z_loss: float = key(
        0.0,
        "factor of the mean log² Σ exp(logits), whose gradient keeps logits small, such as 1e-4",
        between=(0, 1),
    )


def cross_entropy(model: GPT, batch: MicroBatch, keys: Any) -> Tensor:
    """Return the sum of -log p(target) over the target tokens, times their weight in the step."""
    # A target of -100 is not scored: padding, the end of a document, and the other side's part of a
    # conversation. The weight is applied before gradients are rounded to 16 bits
    loss: Tensor = model(
        *(batch.tokens, batch.targets, batch.mask),
        reduction="sum",
        scale=batch.weight,
        z_loss=keys.z_loss,
    )
    return loss


def cross_entropy_of_each(model: GPT, batch: MicroBatch) -> Tensor:
    """Return -log p(target) of each target token, 0 for other tokens."""
    losses: Tensor = model(batch.tokens, batch.targets, batch.mask, reduction="none")
    return losses


def perplexity(loss: float) -> dict[str, float]:
    """Return the metrics of a validation with this mean loss."""
    return {"val_loss": loss, "val_perplexity": math.exp(min(loss, LARGEST))}


OBJECTIVES.register(
    "cross_entropy",
    Objective(cross_entropy, cross_entropy_of_each, perplexity, keys=CrossEntropyKeys),
)
