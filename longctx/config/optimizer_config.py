"""The keys of optimizer=, and what is known of each optimizer without torch.

The optimizer itself is longctx/training/optimizers/NAME.py. The planner and the checks of the
command line, which do not import torch, need only its traits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from longctx.config.fields import check, key

SLICE = 2**26  # weights whose state is with the GPU at one time, where it is kept on the host
STACK = 2**24  # weights that Newton-Schulz takes in one batch, unless one matrix has more


class Traits(NamedTuple):
    """What the planner and the checks know of an optimizer."""

    matrix_bytes: int = 8  # of fp32 state for a weight in a matrix of the transformer blocks
    other_bytes: int = 8  # for a weight of the embedding, of the lm_head, of a vector
    keys: Mapping[str, Any] = {}  # those keys of OptimizerConfig that it has, with their defaults
    states: tuple[str, ...] = ("fp32",)  # what memory.optimizer_state may be
    lora: bool = True  # whether it can train the additions of LoRA


TRAITS = {
    "adamw": Traits(states=("fp32", "bf16", "host")),
    "muon": Traits(
        matrix_bytes=4,
        keys={"momentum": 0.95, "iterations": 5},
        states=("fp32", "bf16", "host"),
        lora=False,
    ),
}


@dataclass
class OptimizerConfig:
    """Which optimizer trains, and its own keys; null: the optimizer's default."""

    name: str = key("adamw", "set by optimizer=NAME")
    momentum: float | None = key(
        None, "muon: share of the average of gradients that stays; null: 0.95", between=(0, 0.9999)
    )
    iterations: int | None = key(None, "muon: of Newton-Schulz; null: 5", between=(1, 99))

    @property
    def traits(self) -> Traits:
        """What is known of this optimizer without torch."""
        return TRAITS[self.name]

    def validate(self) -> None:
        """Raise ValueError naming the first key that cannot be right."""
        if self.name not in TRAITS:
            raise ValueError(f"optimizer={self.name}: one of {', '.join(TRAITS)}")
        check(self, "optimizer.")
        for name, value in vars(self).items():
            if name != "name" and value is not None and name not in self.traits.keys:
                have = ", ".join(self.traits.keys) or "none"
                raise ValueError(
                    f"optimizer.{name}={value}: not a key of optimizer={self.name}; it has: {have}"
                )

    def filled(self) -> OptimizerConfig:
        """The same with the optimizer's defaults in place of nulls."""
        defaults = self.traits.keys.items()
        return replace(self, **{k: value for k, value in defaults if getattr(self, k) is None})

    def check_beside(self, optimizer_state: str | None, lora_rank: int | None) -> None:
        """Raise ValueError where this optimizer cannot keep its state so, or cannot train LoRA."""
        if (optimizer_state or "fp32") not in self.traits.states:
            raise ValueError(
                f"memory.optimizer_state={optimizer_state} with optimizer={self.name}: "
                f"its state can be {', '.join(self.traits.states)}"
            )
        if lora_rank is not None and not self.traits.lora:
            raise ValueError(
                f"optimizer={self.name} with lora.rank={lora_rank}: does not train the thin "
                "matrices of LoRA; use optimizer=adamw"
            )
