"""The objective of a step and its optimizer: each has a name, and keys of its own."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeVar

from longctx.config.doors import OBJECTIVES, OPTIMIZERS, Objective, OptimizerTraits
from longctx.config.fields import Group, check_own, key, positive

Chosen = TypeVar("Chosen", bound="NamedGroup")


@dataclass
class NamedGroup(Group):
    """A name from a door, and keys of which each name has some; null: the default of the name."""

    name: str = ""

    @property
    def traits(self) -> OptimizerTraits | Objective:
        """Return the description of this name."""
        raise NotImplementedError

    def check_together(self) -> None:
        """Raise ValueError for a key that other names have."""
        own = {f"{self.prefix}{key}": value for key, value in vars(self).items() if key != "name"}
        check_own(own, self.traits.keys, f"{self.prefix.rstrip('.')}={self.name}")

    def filled(self: Chosen) -> Chosen:
        """Return a copy with the defaults of its name in place of nulls."""
        defaults = self.traits.keys.items()
        return replace(
            self, **{key: value for key, value in defaults if getattr(self, key) is None}
        )


@dataclass
class OptimizerConfig(NamedGroup):
    """Which optimizer trains, and its own keys; null: the optimizer's default."""

    prefix = "optimizer."
    name: str = key("adamw", "set by optimizer=NAME", choices=OPTIMIZERS, short=True)
    momentum: float | None = key(
        None, "muon: share of the average of gradients that stays; null: 0.95", between=(0, 0.9999)
    )
    iterations: int | None = positive(None, "muon: of Newton-Schulz; null: 5", limit=99)

    @property
    def traits(self) -> OptimizerTraits:
        """Return the description of this optimizer."""
        return OPTIMIZERS[self.name]

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


@dataclass
class ObjectiveConfig(NamedGroup):
    """What a step minimizes, and its own keys; null: the objective's default."""

    prefix = "objective."
    name: str = key("cross_entropy", "set by objective=NAME", choices=OBJECTIVES, short=True)
    z_loss: float | None = key(
        None,
        "cross_entropy: factor of the mean log² Σ exp(logits), whose gradient keeps logits small, "
        "such as 1e-4; null: 0",
        between=(0, 1),
    )
    beta: float | None = key(
        None, "dpo, orpo, kto: null: 0.1; simpo: 2: how steep rewards are", above=0
    )
    gamma: float | None = key(
        None,
        "simpo: margin that a reward of the chosen answer should have; null: 1",
        between=(0, 99),
    )
    desirable_weight: float | None = key(
        None, "kto: weight of desirable answers; null: 1", between=(0, 99)
    )
    undesirable_weight: float | None = key(
        None, "kto: weight of undesirable answers; null: 1", between=(0, 99)
    )
    reference: str | None = key(
        None,
        "dpo, kto: log-probabilities of the model that training began with: step: with LoRA off in "
        "each step | cached: once for all answers | null: step with LoRA, else cached",
        choices=("step", "cached"),
    )

    @property
    def traits(self) -> Objective:
        """Return the description of this objective."""
        return OBJECTIVES[self.name]
