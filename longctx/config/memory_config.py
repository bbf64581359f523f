"""The keys of memory=: activations saved for backward, and their place. Torch-free.

A policy is a set of values for the other keys: a key that is null has the policy's value. They
change speed and memory, never the gradients beyond the order of sums.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from longctx.config.fields import Group, key, positive

# Logits of a chunk of the loss, tokens × words; 2^29 are 1 GiB in bf16. With mlp_tile=16384 they
# bring 1b at 65,536 tokens from 40.2 to 25.8 GiB; the step takes 2% longer (results/peers-1b.json)
LOGITS = {"fast": 2**29, "balanced": 2**29, "long": 2**27}
NOTHING_TWICE: dict[str, Any] = {
    "recompute": "none",
    "keep_every": 1,
    "mlp_tile": 0,
    "offload": 0.0,
    "optimizer_state": "fp32",
}
POLICIES = {
    "fast": NOTHING_TWICE,
    "balanced": NOTHING_TWICE | {"recompute": "block"},
    "long": {
        "recompute": "block",
        "keep_every": 2,
        "mlp_tile": 32768,
        "offload": 0.6,
        "optimizer_state": "host",
    },
}


def tile_size(tokens: int, limit: int) -> int:
    """Return the tokens of a tile, `limit` at most; all tiles are about equal."""
    if tokens <= limit:
        return tokens
    tiles = -(-tokens // limit)
    return min(limit, -(-tokens // tiles // 128) * 128)


@dataclass
class MemoryConfig(Group):
    """Activations saved for backward, and their place; null: as in the policy."""

    prefix = "memory."
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
    keep_every: int | None = positive(
        None, "with recompute=block: save the input of every n-th block only", limit=2**24
    )
    mlp_tile: int | None = key(
        None,
        "with recompute: tokens per tile of projections and MLP; 0: no tiles",
        between=(0, 2**24),
    )
    offload: float | None = key(
        None,
        "with recompute=block: share of the saved activations in pinned host memory",
        between=(0, 1),
    )
    loss_chunk: int | None = positive(
        None,
        "tokens whose logits exist at one time; null: 2^29 logits, 2^27 in long, at most 16,384 "
        "tokens; on a CPU 1,024 tokens",
        limit=2**24,
    )
    optimizer_state: str | None = key(
        None,
        "AdamW's moments, Muon's momentum: fp32 | bf16 | host: fp32 in pinned host memory",
        choices=("fp32", "bf16", "host"),
    )

    def check_together(self) -> None:
        """Raise ValueError for keys that contradict each other."""
        self.policies()

    def __str__(self) -> str:
        """Return the policy and its values that differ from fast, for a run's first lines."""
        values = vars(self if self.policy == "auto" else self.filled(self.policy))
        usual = POLICIES.get(self.policy, {})
        if changed := self._changes(values, usual):
            return f"{changed}, all else as {self.policy}"
        beyond_fast = self._changes(values, NOTHING_TWICE | {"loss_chunk": None})
        return f"{self.policy}, {beyond_fast}" if beyond_fast else self.policy

    @staticmethod
    def _changes(values: Mapping[str, Any], usual: Mapping[str, Any]) -> str:
        """Return the `values` that are given and differ from the `usual` ones."""
        differing = [name for name in usual if values[name] not in (None, usual[name])]
        return ", ".join(f"{name}={values[name]}" for name in differing)

    def policies(self) -> list[str]:
        """Return the possible policies, the fastest first: its own, or for auto all that allow
        the other keys. ValueError if none does.
        """
        names = list(POLICIES) if self.policy == "auto" else [self.policy]
        possible = [name for name in names if not self._contradiction(name)]
        if not possible:
            raise ValueError(self._contradiction(names[0]))
        return possible

    def _contradiction(self, policy: str) -> str:
        """Return which keys contradict each other under `policy`; empty if none do."""
        filled = self.filled(policy)
        unusable = {"keep_every": 1, "offload": 0.0} if filled.recompute != "block" else {}
        unusable |= {"mlp_tile": 0} if filled.recompute == "none" else {}
        for name, unused in unusable.items():
            if (value := getattr(filled, name)) != unused:
                needed = "mlp or block" if name == "mlp_tile" else "block"
                return (
                    f"memory.{name}={value} needs memory.recompute={needed}, not {filled.recompute}"
                )
        return ""

    def filled(self, policy: str) -> MemoryConfig:
        """Return a copy with the values of `policy`, which is not auto, for all nulls but
        `loss_chunk`.
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
        """Return the tokens whose logits exist at one time on "cuda" or "cpu"."""
        if self.loss_chunk is not None:
            return self.loss_chunk
        if device == "cpu":
            return 1024
        return max(128, min(16384, LOGITS[self.policy] // vocab_size // 128 * 128))
