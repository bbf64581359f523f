"""Memory that the largest forward of an evaluation takes: how devices share the model for it, and
whether it can fit at all.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from longctx.config.eval_config import SHORTEST, EvalConfig, default_lengths
from longctx.config.memory_config import POLICIES
from longctx.config.model_config import GPTConfig
from longctx.config.parallel_config import STRATEGIES
from longctx.evaluation.passkey import TOKENS_TOGETHER
from longctx.evaluation.weights import skeleton
from longctx.model.kv_cache import KVCache
from longctx.planner.hardware import CLEARLY, GIB, Machine

USUAL = 4096  # tokens of RULER's shortest text, unless the model or ruler.lengths has shorter ones


class Forward(NamedTuple):
    """The largest forward of an evaluation, of `rows` rows that `sharing` devices share."""

    key: str  # what decides its length
    rows: int
    length: int  # tokens of a row
    sharing: int
    generates: bool  # from a cache of the keys and values; prompts are packed into one row

    @property
    def tokens(self) -> int:
        """Tokens of each device."""
        return -(-self.rows * self.length // self.sharing)


class Needed(NamedTuple):
    """Bytes that a device needs for a forward."""

    weights: float
    cache: float  # keys and values
    activations: float

    @property
    def total(self) -> float:
        return sum(self)


def text_lengths(config: EvalConfig, context: int) -> list[int]:
    """Tokens of the texts of pass keys or RULER, the shortest first; of other evaluations those of
    `context` alone.
    """
    if config.passkey.enabled:
        usual = [length for length in default_lengths(context) if length >= SHORTEST]
        return config.passkey.lengths or usual or [context]
    if config.ruler.enabled:
        usual = [length for length in default_lengths(context) if length >= USUAL]
        return sorted(config.ruler.lengths or usual or [context])
    return [context]


def largest_forward(config: EvalConfig, lengths: list[int], rows: int, device: str) -> Forward:
    """The forward of the longest of `lengths`; `rows` of them where an evaluation makes no texts of
    its own.
    """
    sharing, longest = config.context.degree, max(lengths)
    assert isinstance(sharing, int)
    key = "seq_len"
    if config.passkey.enabled or config.ruler.enabled:
        rows = max(1, TOKENS_TOGETHER[device] * sharing // longest)
        given = "ruler.lengths" if config.ruler.enabled else "passkey.lengths"
        is_given = (config.ruler if config.ruler.enabled else config.passkey).lengths is not None
        key = given if is_given else key
    generates = config.ruler.enabled or (bool(config.tasks) and sharing == 1)
    return Forward(key, rows, longest, sharing, generates)


def needed(
    config: EvalConfig, model: GPTConfig, dtype: torch.dtype, forward: Forward, strategy: str
) -> Needed:
    """What each device needs of `forward`, where they share the model by `strategy`."""
    whole = skeleton(model, config.attention, dtype)
    weights = float(sum(x.numel() * x.element_size() for x in whole.parameters()))
    if STRATEGIES[strategy].shards_weights:
        # a slice; of two blocks, and what is outside of them, all
        blocks = sum(x.numel() * x.element_size() for x in whole.blocks.parameters())
        gathered = weights - blocks + 2 * blocks / model.layers
        weights = min(weights, weights / config.devices + gathered)
    size, tokens = dtype.itemsize, forward.tokens
    in_mlp = min(tokens, POLICIES["long"]["mlp_tile"]) if forward.generates else tokens
    activations: float = size * model.block(0).forward_elements(tokens, in_mlp)
    if config.attention.description.score_bytes is not None:
        packed = forward.rows if forward.generates else 1
        pairs = packed * forward.rows * forward.length**2 / forward.sharing
        activations += model.heads * pairs * (2 * 4 + size)  # scores twice in fp32, probabilities
    cache = KVCache.bytes_of(model, forward.rows, forward.length, dtype)
    return Needed(weights, cache if forward.generates else 0, activations)


def room(config: EvalConfig, machine: Machine, device: str) -> float:
    """Bytes of memory that each process has on `device`."""
    if device == "cpu" or machine.gpu is None:
        return machine.host_memory / config.devices
    return machine.gpu.usable


def choose_strategy(
    config: EvalConfig, model: GPTConfig, dtype: torch.dtype, forward: Forward, there: float
) -> str:
    """How the devices share the model: as asked; with auto a copy for each, or slices where a copy
    does not fit `there` bytes beside what `forward` needs.
    """
    if config.strategy.name != "auto":
        return config.strategy.name
    if config.devices == 1:
        return "none"
    copy = needed(config, model, dtype, forward, "ddp")
    return "ddp" if copy.total <= 0.95 * there else "fsdp"


def check_fits(
    config: EvalConfig,
    model: GPTConfig,
    dtype: torch.dtype,
    forward: Forward,
    strategy: str,
    there: float,
    device: str,
) -> None:
    """Raise ValueError, with what to lower, where `forward` needs clearly more than the bytes that
    are `there`.
    """
    of_device = needed(config, model, dtype, forward, strategy)
    if of_device.total <= CLEARLY[device] * there:
        return
    kind = "memory" if device == "cpu" else "GPU memory"
    advice = ["attention=flash"] if config.attention.description.score_bytes is not None else []
    if forward.key == "seq_len" and forward.rows > 1:
        advice.append("a smaller batch_size")
    advice.append("a smaller seq_len" if forward.key == "seq_len" else f"shorter {forward.key}")
    if not STRATEGIES[strategy].shards_weights and of_device.weights > there / 2:
        advice.append("more devices with strategy=fsdp")
    given = f"[{forward.length}]" if forward.key != "seq_len" else forward.length
    texts = f"{forward.rows:,} texts" if forward.rows > 1 else "a text"
    cache = f"{of_device.cache / GIB:,.1f} for keys and values, " if of_device.cache else ""
    raise ValueError(
        f"{forward.key}={given}: {texts} of {forward.length:,} tokens at a time take "
        f"{of_device.total / GIB:,.1f} GiB of {kind}, as predicted ({cache}"
        f"{of_device.weights / GIB:,.1f} for weights), and there are {there / GIB:,.1f}; "
        f"give {' or '.join(advice)}"
    )
