"""Objectives: what a step minimizes.

objective=NAME is one file in this folder with one description, `OBJECTIVE`: how sequences become a
micro-batch, the loss of a micro-batch, the metrics of a validation. The loop, the step and the
checkpoints know no objective by name.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor

    from longctx.model import GPT
    from longctx.training.batches import MicroBatch

Windows = Mapping[int | None, int]  # layers by window, as `GPTConfig.windows` has them


class Objective(NamedTuple):
    """What a step minimizes.

    collate: sequences of the data set, as dictionaries of tensors → a micro-batch. Its `scored`
        counts what the loss of a step is divided by, over all ranks.
    loss: the () sum over a micro-batch, times its weight, for training.
    losses: (B, T) the loss of each target, 0 for a token that is none, for validation.
    metrics: the mean of a validation → keys of its row.
    """

    collate: Callable[[Sequence[dict[str, Tensor]], Windows], MicroBatch]
    loss: Callable[[GPT, MicroBatch], Tensor]
    losses: Callable[[GPT, MicroBatch], Tensor]
    metrics: Callable[[float], dict[str, float]]


def named(name: str) -> Objective:
    """Return the objective `name`."""
    objective: Objective = importlib.import_module(f"{__name__}.{name}").OBJECTIVE
    return objective
