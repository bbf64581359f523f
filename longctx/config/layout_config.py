"""The keys of a step's layout: memory=, strategy= and context=. Torch-free. A layout changes speed
and memory, never the gradients beyond the order of sums.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from longctx.config.fields import Group, key, positive

# Logits of a chunk of the loss, tokens × words; 2^29 are 1 GiB in bf16. With mlp_tile=16384 they
# bring 1b at 65,536 tokens from 40.2 to 25.8 GiB; the step takes 2% longer (results/peers-1b.json)
LOGITS = 2**29
# Values with which a key does nothing
OFF: Any = {"keep_every": 1, "mlp_tile": 0, "heads_at_once": 0, "attention_again": 0.0}
OFF |= {"offload": 0.0, "offload_weights": 0.0, "recompute_share": 1.0}
NOTHING_TWICE: dict[str, Any] = {"recompute": "none", **OFF, "optimizer_state": "fp32"}
POLICIES = {"fast": NOTHING_TWICE, "balanced": NOTHING_TWICE | {"recompute": "block"}}


def tile_size(tokens: int, limit: int) -> int:
    """Return the tokens of a tile, `limit` at most; all tiles are about equal."""
    if tokens <= limit:
        return tokens
    tiles = -(-tokens // limit)
    return min(limit, -(-tokens // tiles // 128) * 128)


@dataclass
class MemoryConfig(Group):
    """Activations saved for backward, and their place; null: the value that the policy sets.

    policy: set by memory=NAME; auto: the fastest that fits of all values of the keys left null
    recompute: computed again in backward: none | block (with flash: all but attention)
    keep_every: with recompute=block: save the input of every n-th block only
    mlp_tile: with recompute=block: tokens per tile of projections and MLP; 0: no tiles
    heads_at_once: with recompute=block: key heads whose q, k and v exist at one time; 0: all
    attention_again: with recompute=block: share of blocks, short windows first, that attend again
    offload: with recompute=block: share of the saved activations in pinned host memory
    offload_weights: with recompute=block and LoRA on one device: share of the blocks whose frozen
        matrices are in pinned host memory, and arrive while the block before computes
    loss_chunk: tokens whose logits exist at one time; null: up to 16,384, on a CPU 1,024
    optimizer_state: AdamW's moments or Muon's momentum: fp32 | bf16 | host: fp32 in pinned memory
    recompute_share: with recompute=block: share of blocks, the first ones; the others save all
    """

    prefix = "memory."
    policy: str = key("auto", choices=("auto", *POLICIES), short=True)
    recompute: str | None = key(None, choices=("none", "block"))
    keep_every: int | None = positive(None, limit=2**24)
    mlp_tile: int | None = key(None, between=(0, 2**24))
    heads_at_once: int | None = key(None, between=(0, 2**24))
    attention_again: float | None = key(None, between=(0, 1))
    offload: float | None = key(None, between=(0, 1))
    offload_weights: float | None = key(None, between=(0, 1))
    loss_chunk: int | None = positive(None, limit=2**24)
    optimizer_state: str | None = key(None, choices=("fp32", "bf16", "host"))
    recompute_share: float | None = key(None, between=(0, 1))

    def problems(self) -> Iterator[str]:
        """Yield a message if no policy allows the other keys."""
        if not self.policies():
            yield self.contradiction("balanced" if self.policy == "auto" else self.policy)

    def __str__(self) -> str:
        """Return the policy and the given values that differ from it, as words after memory=."""
        usual = {"policy": self.policy} | POLICIES.get(self.policy, {})
        own = {name: x for name, x in vars(self).items() if x not in (None, usual.get(name))}
        changed = [f"memory.{name}={x}" for name, x in own.items()]
        return " ".join([self.policy, *changed])

    def policies(self) -> list[str]:
        """Return the possible policies, the fastest first: its own, or for auto all that allow
        the other keys.
        """
        names = [self.policy]
        if self.policy == "auto":
            names = [x for x in POLICIES if self.recompute in (None, POLICIES[x]["recompute"])]
        return [name for name in names if not self.contradiction(name)]

    def contradiction(self, policy: str) -> str:
        """Return which keys contradict each other under `policy`; empty if none do."""
        filled = self.filled(policy)
        for base, wanted in (("recompute", "block"), ("recompute_share", 1)):
            present = getattr(filled, base)
            for name, off in OFF.items():
                if present != wanted and name != base and (value := getattr(filled, name)) != off:
                    return f"memory.{name}={value} needs memory.{base}={wanted}, not {present}"
        return ""

    def filled(self, policy: str) -> MemoryConfig:
        """Return a copy with the values of `policy`, not auto, for all nulls but `loss_chunk`."""
        if policy not in POLICIES:
            names = ", ".join(POLICIES)
            raise ValueError(f"memory.policy={policy}: a run decides that; a model takes {names}")
        # A search asks it again of each of thousands
        if policy == self.policy and all(getattr(self, x) is not None for x in POLICIES[policy]):
            return self
        given = {name: value for name, value in vars(self).items() if value is not None}
        return replace(self, **POLICIES[policy] | given | {"policy": policy})

    @property
    def again(self) -> float:
        """Return the share of the blocks that backward computes again; the policy is chosen."""
        return (self.recompute_share or 0.0) if self.recompute == "block" else 0.0

    def chunk(self, vocab_size: int, device: str) -> int:
        """Return the tokens whose logits exist at one time on "cuda" or "cpu"."""
        if self.loss_chunk is not None or device == "cpu":
            return self.loss_chunk or 1024
        return max(128, min(16384, LOGITS // vocab_size // 128 * 128))


@dataclass
class StrategyConfig:
    """How several devices share the model.

    name: auto: with several devices ddp, or fsdp if ddp does not fit or would train 5% slower |
        ddp: a copy of the model per device | fsdp: the model in slices
    """

    name: str = key("auto", choices=("auto", "ddp", "fsdp"), short=True)


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
    """Context parallelism: several devices share each sequence, and attention sees all of it.

    degree: set by context=N: devices that share every sequence; auto: by predicted fit and speed
    method: auto: ulysses if the degree divides the heads | ulysses: each device has all tokens of
        some heads | allgather: its own queries of all heads, and all keys
    check: before the run, at a small size: test for leaks between documents, and loss and gradients
        against one device; null: true if devices share sequences and the run has plugins
    """

    degree: int | str = positive(1, limit=4096, word="auto", short=True)
    method: str = key("auto", choices=("auto", "ulysses", "allgather"))
    check: bool | None = key(None)

    def check_degree(self, devices: int) -> None:
        """Raise ValueError if `devices` devices cannot be split into groups of `degree`."""
        if isinstance(self.degree, int) and devices % self.degree:
            remedy = f"give devices={-(-devices // self.degree) * self.degree}, or another number"
            raise ValueError(f"context={self.degree}: does not divide devices={devices}; {remedy}")
        if self.check and devices == 1:
            raise ValueError("context.check=true: compares several devices with one; use devices=N")

    def method_for(self, heads: int) -> str:
        """Return the method for `heads` query heads, with auto decided.

        ValueError if the devices cannot divide the heads as asked.
        """
        assert isinstance(self.degree, int)
        if self.method == "ulysses" and heads % self.degree:
            why = f"does not divide the model's {heads} heads; give context.method=allgather"
            raise ValueError(f"context={self.degree}: context.method=ulysses {why}")
        fitting = "allgather" if heads % self.degree else "ulysses"
        return fitting if self.method == "auto" else self.method

    def layouts(self, devices: int, heads: int, takes_intervals: bool) -> list[ContextConfig]:
        """Return every possible degree and method on `devices` devices."""
        # An impossible request is returned as it is, to be refused by name
        degrees = [self.degree] if isinstance(self.degree, int) else divisors(devices)
        choices = [replace(self, degree=1)] if 1 in degrees else []
        choices += [
            replace(self, degree=degree, method=name)
            for degree in degrees
            for name in ("ulysses", "allgather")
            if degree > 1 and self.method in ("auto", name)
            if (heads % degree == 0 if name == "ulysses" else takes_intervals)
        ]
        return choices or [self]


def divisors(number: int) -> list[int]:
    """Return all whole numbers that divide `number`, in order."""
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


def kv_copies(heads: int, kv_heads: int, ranks: int) -> int:
    """Return how often each key-value head is sent when `ranks` divide the query heads: each rank
    needs those of its query heads.
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
