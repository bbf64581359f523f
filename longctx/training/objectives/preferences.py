"""The objectives of preferences: DPO, ORPO and SimPO of pairs, KTO of labelled answers.

Their losses are in answers.py, and what DPO and KTO compare with in reference.py. Both import
torch, so they are imported when a step needs them.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from functools import partial
from typing import Any

from longctx.config.doors import OBJECTIVES, Objective, ObjectiveConfig
from longctx.config.fields import key

OF_PAIRS = (
    *("rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies"),
    *("logps/chosen", "logps/rejected"),
)
OF_LABELS = ("rewards/chosen", "logps/chosen", "rewards/rejected", "logps/rejected", "kl")


@dataclass
class OrpoKeys(ObjectiveConfig):
    """The keys of ORPO."""

    beta: float = key(0.1, "how steep rewards are; of simpo 2", above=0)


@dataclass
class SimpoKeys(ObjectiveConfig):
    """The keys of SimPO."""

    beta: float = key(2.0, "how steep rewards are", above=0)
    gamma: float = key(1.0, "margin that rewards of a pair should have", between=(0, 99))


@dataclass
class DpoKeys(OrpoKeys):
    """The keys of DPO."""

    reference: str | None = key(
        None,
        "log-probabilities of the model that training began with: step: with LoRA off in each "
        "step | cached: once for all answers | null: step with LoRA, else cached",
        choices=("step", "cached"),
    )


@dataclass
class KtoKeys(DpoKeys):
    """The keys of KTO."""

    desirable_weight: float = key(1.0, "weight of desirable answers", between=(0, 99))
    undesirable_weight: float = key(1.0, "weight of undesirable answers", between=(0, 99))


def call(module: str, function: str, *arguments: Any) -> Any:
    """Call a `function` of a module of this folder, which is imported for it."""
    return getattr(importlib.import_module(f"{__package__}.{module}"), function)(*arguments)


def register(name: str, data: str, keys: type[ObjectiveConfig]) -> None:
    """Register an objective of `data`, pairs or labels, with its own `keys`."""
    objective = Objective(
        loss=partial(call, "answers", name),
        collate=partial(call, "answers", "collate"),
        figures=OF_PAIRS if data == "pairs" else OF_LABELS,
        keys=keys,
        data=data,
        prepare=partial(call, "reference", "prepare") if issubclass(keys, DpoKeys) else None,
        slower=20,
    )
    OBJECTIVES.register(name, objective)


register("dpo", "pairs", DpoKeys)
register("orpo", "pairs", OrpoKeys)
register("simpo", "pairs", SimpoKeys)
register("kto", "labels", KtoKeys)
