"""What a model keeps for backward, and where: the keys of memory=. Free of torch, so that the
command line answers at once.

A policy is a set of values for the keys below it; a key that is given stands, one that is null is
the policy's. They change speed and memory, never the gradients beyond the order of sums.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from longctx.config.fields import check, key

LOGITS = {"fast": 2**29, "balanced": 2**29, "long": 2**27}  # of a chunk of the loss: tokens × words
POLICIES: dict[str, dict[str, Any]] = {
    "fast": {
        "recompute": "none",
        "keep_every": 1,
        "mlp_tile": 0,
        "offload": 0.0,
        "optimizer_state": "fp32",
    },
    "balanced": {
        "recompute": "block",
        "keep_every": 1,
        "mlp_tile": 0,
        "offload": 0.0,
        "optimizer_state": "fp32",
    },
    "long": {
        "recompute": "block",
        "keep_every": 2,
        "mlp_tile": 32768,
        "offload": 0.6,
        "optimizer_state": "host",
    },
}


@dataclass
class MemoryConfig:
    """What is kept for backward, and where; null: as the policy says."""

    policy: str = key(
        "auto",
        "set by memory=NAME; auto: the first of fast, balanced, long that fits",
        choices=("auto", *POLICIES),
        short=True,
    )
    recompute: str | None = key(
        None,
        "computed again in backward: none | mlp | block: all (attention=flash: all but attention)",
        choices=("none", "mlp", "block"),
    )
    keep_every: int | None = key(
        None,
        "with recompute=block: save the input of every n-th block only",
        between=(1, 2**24),
    )
    mlp_tile: int | None = key(
        None,
        "with recompute: tokens per tile of projections and MLP; 0: no tiles",
        between=(0, 2**24),
    )
    offload: float | None = key(
        None,
        "with recompute=block: share of the saved activations that lies in pinned host memory",
        between=(0, 1),
    )
    loss_chunk: int | None = key(
        None,
        "tokens whose logits exist at one time; null: 2^29 logits, 2^27 in long, at most 16,384 "
        "tokens; on a CPU 1,024 tokens",
        between=(1, 2**24),
    )
    optimizer_state: str | None = key(
        None,
        "AdamW's moments, Muon's momentum: fp32 | bf16 | host: fp32 in pinned host memory",
        choices=("fp32", "bf16", "host"),
    )

    def validate(self) -> None:
        """Raise ValueError naming `memory.<key>` for values that make no sense, or not together."""
        check(self, "memory.")
        self.policies()

    def __str__(self) -> str:
        """The policy and its values other than those of fast, as a run's first lines show them."""
        plain = POLICIES["fast"] | {"loss_chunk": None}
        values = vars(self if self.policy == "auto" else self.filled(self.policy))
        parts = [
            f"{name}={values[name]}"
            for name, usual in plain.items()
            if values[name] not in (None, usual)
        ]
        usual = POLICIES.get(self.policy, {})
        if any(values[name] not in (None, of_policy) for name, of_policy in usual.items()):
            changed = [f"{n}={values[n]}" for n, x in usual.items() if values[n] not in (None, x)]
            return f"{', '.join(changed)}, all else as {self.policy}"
        return ", ".join([self.policy, *parts])

    def policies(self) -> list[str]:
        """The policies that this may stand for, the fastest first: its own, or if it is auto all
        that go with what is given.

        ValueError where none does.
        """
        names = list(POLICIES) if self.policy == "auto" else [self.policy]
        possible = [name for name in names if not self._contradiction(name)]
        if not possible:
            raise ValueError(self._contradiction(names[0]))
        return possible

    def _contradiction(self, policy: str) -> str:
        """Which keys contradict each other under `policy`; empty if none do."""
        filled = self.filled(policy)
        if filled.recompute != "block" and (filled.keep_every != 1 or filled.offload):
            needing = (
                f"keep_every={filled.keep_every}"
                if filled.keep_every != 1
                else f"offload={filled.offload}"
            )
            return f"memory.{needing} needs memory.recompute=block, not {filled.recompute}"
        if filled.recompute == "none" and filled.mlp_tile:
            return (
                f"memory.mlp_tile={filled.mlp_tile} needs memory.recompute=mlp or block, not none"
            )
        return ""

    def filled(self, policy: str) -> MemoryConfig:
        """Every null but `loss_chunk` filled in as `policy`, fast, balanced or long, says; what is
        given stands.
        """
        if policy not in POLICIES:
            raise ValueError(
                f"memory.policy={policy}: a run decides that; a model takes one of "
                f"{', '.join(POLICIES)}"
            )
        values = {
            name: value for name, value in POLICIES[policy].items() if getattr(self, name) is None
        }
        return replace(self, policy=policy, **values)

    def chunk(self, vocab_size: int, device: str) -> int:
        """Tokens whose logits exist at one time: `loss_chunk`, or as many as the policy allows on
        "cuda" or "cpu".
        """
        if self.loss_chunk is not None:
            return self.loss_chunk
        return (
            1024
            if device == "cpu"
            else max(128, min(16384, LOGITS[self.policy] // vocab_size // 128 * 128))
        )
