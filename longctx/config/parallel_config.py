"""The keys of several devices: the model in copies or shards, sequences whole or in parts.

Torch-free.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from longctx.config.fields import key, positive


@dataclass
class StrategyConfig:
    """How several devices share the model."""

    name: str = key(
        "auto",
        "auto: with several devices ddp, or fsdp if ddp does not fit or would train 5% slower "
        "| ddp: a copy of the model per device | fsdp: the model in slices",
        choices=("auto", "ddp", "fsdp"),
        short=True,
    )

    @property
    def shards_weights(self) -> bool:
        """Return True if slices are asked for."""
        return STRATEGIES.get(self.name, STRATEGIES["none"]).shards_weights


@dataclass(frozen=True)
class Strategy:
    """How devices share the model, for code that predicts or saves it."""

    shards_weights: bool = False  # and gradients and optimizer state
    buckets_gradients: bool = False  # kept from step to step


STRATEGIES = {
    "none": Strategy(),
    "ddp": Strategy(buckets_gradients=True),
    "fsdp": Strategy(shards_weights=True),
}


@dataclass
class ContextConfig:
    """Context parallelism: several devices share each sequence, and attention sees all of it."""

    degree: int | str = positive(
        1,
        "set by context=N: devices that each hold a part of every sequence; auto: as many as make "
        "the run fit and fastest, by prediction",
        limit=4096,
        word="auto",
        short=True,
    )
    method: str = key(
        "auto",
        "auto: ulysses if the degree divides the heads | ulysses: each device has all tokens of "
        "some heads | allgather: its own queries of all heads, and all keys",
        choices=("auto", "ulysses", "allgather"),
    )
    check: bool = key(
        False,
        "before the run, at a small size: test for leaks between documents, and loss and gradients "
        "against one device",
    )

    def check_degree(self, devices: int) -> None:
        """Raise ValueError if `devices` devices cannot be split into groups of `degree`."""
        if isinstance(self.degree, int) and devices % self.degree:
            raise ValueError(
                f"context={self.degree}: does not divide devices={devices}; give a number that does"
            )
        if self.check and devices == 1:
            raise ValueError(
                "context.check=true: compares several devices with one, and there is one; use "
                "context.check=false"
            )

    def method_for(self, heads: int) -> str:
        """Return the method for `heads` query heads, with auto decided.

        ValueError if the devices cannot divide the heads as asked.
        """
        assert isinstance(self.degree, int)
        if self.method == "ulysses" and heads % self.degree:
            raise ValueError(
                f"context={self.degree}: context.method=ulysses divides the model's {heads} heads, "
                "and they cannot be; choose a number that divides them, or context.method=allgather"
            )
        if self.method != "auto":
            return self.method
        return "allgather" if heads % self.degree else "ulysses"

    def each(self, devices: int, heads: int, takes_intervals: bool) -> list[ContextConfig]:
        """Return every possible degree and method on `devices` devices.

        An impossible request is returned as it is, to be refused by name.
        """
        degrees = [self.degree] if isinstance(self.degree, int) else divisors(devices)
        choices = [replace(self, degree=1)] if 1 in degrees else []
        for degree in degrees:
            methods = {"ulysses": heads % degree == 0, "allgather": takes_intervals}
            choices += [
                replace(self, degree=degree, method=name)
                for name, possible in methods.items()
                if possible and degree > 1 and self.method in ("auto", name)
            ]
        return choices or [self]


def divisors(number: int) -> list[int]:
    """Return all whole numbers that divide `number`, in order."""
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


def kv_copies(heads: int, kv_heads: int, ranks: int) -> int:
    """Return how often each key-value head is sent when `ranks` divide the query heads.

    Each rank needs the key-value heads of its query heads.
    """
    if kv_heads % ranks == 0:
        return 1
    return ranks // kv_heads if ranks % kv_heads == 0 else heads // kv_heads


MANY_TOKENS = 262144  # of a rank: then one key-value head at a time saves memory that counts


def ulysses_parts(heads: int, tokens: int) -> int:
    """Return the parts in which a rank with `tokens` exchanges its key-value `heads`."""
    return heads if tokens >= MANY_TOKENS else 1


def allgather_group(kv_heads: int, ranks: int) -> int:
    """Return the key-value heads gathered per round: as many as Ulysses gives one rank."""
    return max(1, kv_heads // ranks)
