"""Objectives: `objective=NAME`, what a step minimizes. Torch-free until one is computed.

A new one is a file that calls `register` with its description, see `Objective`. Loop, step and
checkpoints know no objective by name. Cross entropy is here; preferences.py learns from answers
that are preferred, by their log-probabilities.
"""

from __future__ import annotations

import math
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

from longctx.config.doors import OBJECTIVES, Objective

if TYPE_CHECKING:
    from torch import Tensor

    from longctx.model import GPT
    from longctx.training.batches import MicroBatch

__all__ = ["Objective", "register"]

LARGEST = 700.0  # the exponential of a larger number is no float
register = OBJECTIVES.register


def cross_entropy(model: GPT, batch: MicroBatch, keys: Any) -> Tensor:
    """Return the sum of -log p(target) over the target tokens, times their weight in the step.

    A target of -100 is not scored: padding, the end of a document, and the other side's part of a
    conversation.
    """
    # The weight is applied before gradients are rounded to 16 bits
    loss: Tensor = model(
        *(batch.tokens, batch.targets, batch.mask),
        reduction="sum",
        scale=batch.weight,
        z_loss=keys.z_loss or 0.0,  # None: the keys of another objective
    )
    return loss


def cross_entropy_of_each(model: GPT, batch: MicroBatch) -> Tensor:
    """Return -log p(target) of each target token, 0 for other tokens."""
    losses: Tensor = model(batch.tokens, batch.targets, batch.mask, reduction="none")
    return losses


def perplexity(loss: float) -> dict[str, float]:
    """Return the metrics of a validation with this mean loss."""
    return {"val_loss": loss, "val_perplexity": math.exp(min(loss, LARGEST))}


def found_in(module: str, name: str, *arguments: Any) -> Any:
    """Call `name` of a file of this package, which imports torch."""
    return getattr(import_module(f"{__name__}.{module}"), name)(*arguments)


register(
    "cross_entropy",
    Objective(cross_entropy, cross_entropy_of_each, perplexity, keys={"z_loss": 0.0}),
)

PAIRS = Objective(
    loss=partial(found_in, "preferences", "simpo"),
    collate=partial(found_in, "preferences", "collate"),
    figures=(
        *("rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies"),
        *("logps/chosen", "logps/rejected"),
    ),
    keys={"beta": 2.0, "gamma": 1.0},
    data="pairs",
    rate=0.05,
)
register("simpo", PAIRS)
register("orpo", PAIRS._replace(loss=partial(found_in, "preferences", "orpo"), keys={"beta": 0.1}))
WITH_REFERENCE = PAIRS._replace(
    loss=partial(found_in, "preferences", "dpo"),
    keys={"beta": 0.1, "reference": None},
    prepare=partial(found_in, "preferences", "prepare"),
)
register("dpo", WITH_REFERENCE)
register(
    "kto",
    WITH_REFERENCE._replace(
        loss=partial(found_in, "preferences", "kto"),
        figures=(*("rewards/chosen", "logps/chosen", "rewards/rejected", "logps/rejected", "kl"),),
        keys={
            **WITH_REFERENCE.keys,
            "desirable_weight": 1.0,
            "undesirable_weight": 1.0,
        },
        data="labels",
    ),
)
