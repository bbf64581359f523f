"""How several devices share the work of a run: copies or shards of the model, rows or parts of
rows. Free of torch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from longctx.config.fields import check, key


@dataclass
class StrategyConfig:
    """How several devices share the model."""

    name: str = key(
        "auto",
        "auto: with several devices ddp, or fsdp where ddp does not fit or would train 5% slower "
        "| ddp: a copy of the model per device | fsdp: the model in slices",
        choices=("auto", "ddp", "fsdp"),
        short=True,
    )


# Backends that take a mask of free intervals, which allgather and exchange with a neighbour leave
FREE_INTERVALS = ("naive", "flash", "flex")


@dataclass
class ContextConfig:
    """Context parallelism: several devices share each row, and attention sees all of it."""

    degree: int | str = key(
        1,
        "set by context=N: devices that each hold a part of every row; auto: as many as make the "
        "run fit and fastest, by prediction",
        between=(1, 4096),
        word="auto",
        short=True,
    )
    method: str = key(
        "auto",
        "auto: ulysses where the degree divides the heads | ulysses: each device has all tokens of "
        "some heads | allgather: its own queries of all heads, and all keys",
        choices=("auto", "ulysses", "allgather"),
    )
    check: bool = key(
        False,
        "before the run, at a small size: test for leaks between documents, and loss and gradients "
        "against one device",
    )

    def validate(self, devices: int) -> None:
        """Raise ValueError where groups of `degree` cannot be made of `devices` devices."""
        check(self, "context.")
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
        """How attention of `heads` query heads sees the whole row: `method`, auto decided.

        Raises ValueError where the devices cannot divide the heads as asked.
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

    def each(self, devices: int, heads: int, backend: str) -> list[ContextConfig]:
        """Every choice of degree and method that this may stand for on `devices` devices: those
        that are possible, or itself where it asks for what is not.
        """
        degrees = [self.degree] if isinstance(self.degree, int) else divisors(devices)
        choices = [replace(self, degree=1)] if 1 in degrees else []
        for degree in degrees:
            methods = {"ulysses": heads % degree == 0, "allgather": backend in FREE_INTERVALS}
            choices += [
                replace(self, degree=degree, method=name)
                for name, possible in methods.items()
                if possible and degree > 1 and self.method in ("auto", name)
            ]
        return choices or [self]


def divisors(number: int) -> list[int]:
    """All whole numbers that divide `number`, in order."""
    return [n for n in range(1, number + 1) if number % n == 0]


def kv_copies(heads: int, kv_heads: int, ranks: int) -> int:
    """How often each key-value head is sent to `ranks` that divide a row's heads among them, so
    that each has those of its query heads.
    """
    if kv_heads % ranks == 0:
        return 1
    return ranks // kv_heads if ranks % kv_heads == 0 else heads // kv_heads


MANY_TOKENS = 262144  # of a rank: then one key-value head at a time saves memory that counts


def ulysses_parts(heads: int, tokens: int) -> int:
    """Parts, one after another, in which a rank with so many `tokens` exchanges rows of which it
    gets so many key-value `heads`.
    """
    return heads if tokens >= MANY_TOKENS else 1


def allgather_group(kv_heads: int, ranks: int) -> int:
    """Key-value heads of which `ranks` gather keys and values at a time: as many as Ulysses would
    give one of them.
    """
    return max(1, kv_heads // ranks)
