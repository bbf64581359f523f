"""How several devices share the work of a run: copies or shards of the model, rows or parts of
rows. Free of torch.
"""

from __future__ import annotations

from dataclasses import dataclass

from longctx.config.fields import check, key


@dataclass
class StrategyConfig:
    """How several devices share the model."""

    name: str = key(
        "auto",
        "auto: with several devices ddp if that fits, else fsdp | ddp: a copy of the model per "
        "device | fsdp: the model in slices",
        choices=("auto", "ddp", "fsdp"),
        short=True,
    )


@dataclass
class ContextConfig:
    """Context parallelism: several devices share each row, and attention sees all of it."""

    degree: int = key(
        1,
        "set by context=N: devices that each hold a part of every row",
        between=(1, 4096),
        short=True,
    )

    def validate(self, devices: int) -> None:
        """Raise ValueError where groups of `degree` cannot be made of `devices` devices."""
        check(self, "context.")
        if devices % self.degree:
            raise ValueError(
                f"context={self.degree}: does not divide devices={devices}; give a number that does"
            )


def kv_copies(heads: int, kv_heads: int, ranks: int) -> int:
    """How often each key-value head is sent to `ranks` that divide a row's heads among them, so
    that each has those of its query heads.
    """
    if kv_heads % ranks == 0:
        return 1
    return ranks // kv_heads if ranks % kv_heads == 0 else heads // kv_heads
