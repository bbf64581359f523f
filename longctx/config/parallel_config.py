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
    method: str = key(
        "auto",
        "auto: ulysses where the degree divides the heads | ulysses: each device attends with some "
        "heads over the row | allgather: with all heads, its own queries over all keys",
        choices=("auto", "ulysses", "allgather"),
    )
    check: bool = key(
        False,
        "before the run, small: do documents leak, are loss and gradients those of one device?",
    )

    def validate(self, devices: int) -> None:
        """Raise ValueError where groups of `degree` cannot be made of `devices` devices."""
        check(self, "context.")
        if devices % self.degree:
            raise ValueError(
                f"context={self.degree}: does not divide devices={devices}; give a number that does"
            )
        if self.check and devices == 1:
            raise ValueError(
                "context.check=true: compares several devices with one, and there is one; use "
                "context.check=false"
            )

    def method_for(self, heads: int) -> str:
        """How attention of `heads` query heads sees the whole row: `method`, auto decided.

        Raises ValueError where the devices cannot divide the heads as asked.
        """
        if self.method == "ulysses" and heads % self.degree:
            raise ValueError(
                f"context={self.degree}: context.method=ulysses divides the model's {heads} heads, "
                "and they cannot be; choose a number that divides them, or context.method=allgather"
            )
        if self.method != "auto":
            return self.method
        return "allgather" if heads % self.degree else "ulysses"


def kv_copies(heads: int, kv_heads: int, ranks: int) -> int:
    """How often each key-value head is sent to `ranks` that divide a row's heads among them, so
    that each has those of its query heads.
    """
    if kv_heads % ranks == 0:
        return 1
    return ranks // kv_heads if ranks % kv_heads == 0 else heads // kv_heads
