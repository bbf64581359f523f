"""What a model keeps for backward, and where: the keys of memory=. Free of torch, so that the command line answers at once.

A policy is a set of values for the keys below it; a key that is given stands, one that is null is the policy's. They
change speed and memory, never the gradients beyond the order of sums.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

LOGITS = {"fast": 2**29, "balanced": 2**29, "long": 2**27}  # of a chunk of the loss: tokens × words
POLICIES: dict[str, dict[str, Any]] = {
    "fast": {"recompute": "none", "keep_every": 1, "mlp_tile": 0, "offload": 0.0, "optimizer": "fp32"},
    "balanced": {"recompute": "block", "keep_every": 1, "mlp_tile": 0, "offload": 0.0, "optimizer": "fp32"},
    "long": {"recompute": "block", "keep_every": 2, "mlp_tile": 32768, "offload": 0.6, "optimizer": "host"},
}


@dataclass
class MemoryConfig:
    """What is kept for backward, and where; null: as the policy says."""

    policy: str = "auto"  # set by memory=NAME; auto: the first of fast, balanced, long that fits
    recompute: str | None = None  # computed again in backward: none | mlp | block: all but attention itself
    keep_every: int | None = None  # with recompute=block: keep the input of every so many-th block only
    mlp_tile: int | None = None  # with recompute: tokens that pass through projections and MLP at one time; 0: all
    offload: float | None = None  # with recompute=block: the share of what is kept that lies in pinned host memory
    loss_chunk: int | None = None  # tokens whose logits exist at one time; null: 1 GiB of logits, 256 MiB in long
    optimizer: str | None = None  # AdamW's averages: fp32 | bf16 | host: fp32 in pinned host memory

    def validate(self) -> None:
        """Raise ValueError naming `memory.<key>` for values that make no sense, or not together."""
        _one_of("policy", self.policy, ("auto", *POLICIES))
        for key, allowed in (("recompute", ("none", "mlp", "block")), ("optimizer", ("fp32", "bf16", "host"))):
            if getattr(self, key) is not None:
                _one_of(key, getattr(self, key), allowed)
        for key, least in (("keep_every", 1), ("mlp_tile", 0), ("loss_chunk", 1)):
            value = getattr(self, key)
            if value is not None and not least <= value <= 2**24:
                raise ValueError(f"memory.{key}={value}: a number from {least} to {2**24:,}")
        if self.offload is not None and not 0 <= self.offload <= 1:
            raise ValueError(f"memory.offload={self.offload}: a share from 0 to 1")
        self.policies()

    def __str__(self) -> str:
        """The policy, and where it is not plain fast its parts: what a run says at its beginning."""
        plain = POLICIES["fast"] | {"loss_chunk": None}
        parts = [f"{key}={getattr(self, key)}" for key in plain if getattr(self, key) not in (None, plain[key])]
        return ", ".join([self.policy, *parts])

    def policies(self) -> list[str]:
        """The policies that this may stand for, the fastest first: its own, or if it is auto all that go with what is given.

        ValueError where none does.
        """
        names = list(POLICIES) if self.policy == "auto" else [self.policy]
        found = [name for name in names if not self._contradiction(name)]
        if not found:
            raise ValueError(self._contradiction(names[0]))
        return found

    def _contradiction(self, policy: str) -> str:
        """What does not go together where nulls are filled in as `policy` says; empty if all does."""
        whole = self.filled(policy)
        if whole.recompute != "block" and (whole.keep_every != 1 or whole.offload):
            given = f"keep_every={whole.keep_every}" if whole.keep_every != 1 else f"offload={whole.offload}"
            return f"memory.{given} needs memory.recompute=block, not {whole.recompute}"
        if whole.recompute == "none" and whole.mlp_tile:
            return f"memory.mlp_tile={whole.mlp_tile} needs memory.recompute=mlp or block, not none"
        return ""

    def filled(self, policy: str) -> MemoryConfig:
        """Every null but `loss_chunk` filled in as `policy`, fast, balanced or long, says; what is given stands."""
        if policy not in POLICIES:
            raise ValueError(f"memory.policy={policy}: a run decides that; a model takes one of {', '.join(POLICIES)}")
        values = {key: value for key, value in POLICIES[policy].items() if getattr(self, key) is None}
        return replace(self, policy=policy, **values)

    def chunk(self, vocab_size: int, device: str) -> int:
        """Tokens whose logits exist at one time: `loss_chunk`, or as many as the policy allows on "cuda" or "cpu"."""
        if self.loss_chunk is not None:
            return self.loss_chunk
        return 1024 if device == "cpu" else max(128, min(16384, LOGITS[self.policy] // vocab_size // 128 * 128))


def _one_of(key: str, value: Any, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"memory.{key}={value}: one of {', '.join(allowed)}")
