"""The keys of optimizer=, and sizes that an optimizer and the planner share."""

from __future__ import annotations

from dataclasses import dataclass, replace

from longctx.config.doors import OPTIMIZERS, OptimizerTraits
from longctx.config.fields import Group, key

SLICE = 2**26  # weights whose state is on the GPU at one time, if it is saved on the host
STACK = 2**24  # weights that Newton-Schulz takes in one batch, unless one matrix has more


@dataclass
class OptimizerConfig(Group):
    """Which optimizer trains, and its own keys; null: the optimizer's default."""

    prefix = "optimizer."
    name: str = key("adamw", "set by optimizer=NAME", choices=OPTIMIZERS)
    momentum: float | None = key(
        None, "muon: share of the average of gradients that stays; null: 0.95", between=(0, 0.9999)
    )
    iterations: int | None = key(None, "muon: of Newton-Schulz; null: 5", between=(1, 99))

    @property
    def traits(self) -> OptimizerTraits:
        """Return the description of this optimizer."""
        return OPTIMIZERS[self.name]

    def check_together(self) -> None:
        """Raise ValueError for keys that contradict each other."""
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
