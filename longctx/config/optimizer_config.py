"""The keys of optimizer=, and a torch-free description of each optimizer.

The optimizer itself is longctx/training/optimizers/NAME.py. The planner and the command line do not
import torch, and need only its traits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from longctx.config.fields import check, key

SLICE = 2**26  # weights whose state is on the GPU at one time, if it is saved on the host
STACK = 2**24  # weights that Newton-Schulz takes in one batch, unless one matrix has more


class Traits(NamedTuple):
    """What the planner and the checks know of an optimizer."""

    matrix_bytes: int = 8  # of fp32 state for a weight in a matrix of the transformer blocks
    other_bytes: int = 8  # for a weight of the embedding, of the lm_head, of a vector
    keys: Mapping[str, Any] = {}  # its own keys of OptimizerConfig, with their defaults
    states: tuple[str, ...] = ("fp32",)  # what memory.optimizer_state may be
    lora: bool = True  # it can train the additions of LoRA


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

    name: str = key("adamw", "set by optimizer=NAME", choices=TRAITS)
    momentum: float | None = key(
        None, "muon: share of the average of gradients that stays; null: 0.95", between=(0, 0.9999)
    )
    iterations: int | None = key(None, "muon: of Newton-Schulz; null: 5", between=(1, 99))

    @property
    def traits(self) -> Traits:
        """Return the description of this optimizer."""
        return TRAITS[self.name]

    def validate(self) -> None:
        """Raise ValueError for the first key that cannot be right."""
        check(self, "optimizer.")
        for name, value in vars(self).items():
            if name != "name" and value is not None and name not in self.traits.keys:
                have = ", ".join(self.traits.keys) or "none"
                raise ValueError(
                    f"optimizer.{name}={value}: not a key of optimizer={self.name}; it has: {have}"
                )

    def filled(self) -> OptimizerConfig:
        """Return a copy with the optimizer's defaults in place of nulls."""
        defaults = self.traits.keys.items()
        return replace(self, **{k: value for k, value in defaults if getattr(self, k) is None})

    def check_beside(self, optimizer_state: str | None, lora_rank: int | None) -> None:
        """Raise ValueError if this optimizer cannot keep its state so, or cannot train LoRA."""
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
