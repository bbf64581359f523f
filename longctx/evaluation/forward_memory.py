"""Memory of the largest forward of an evaluation, and how devices share the model for it."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
from torch import nn

from longctx.config.eval_config import SHORTEST, EvalConfig, default_lengths
from longctx.config.layout_config import POLICIES, STRATEGIES
from longctx.config.model_config import GPTConfig
from longctx.evaluation.load import skeleton
from longctx.evaluation.passkey import TOKENS_TOGETHER
from longctx.model.decoder import KVCache
from longctx.planner.hardware import CLEARLY, GIB, Machine

USUAL = 4096  # tokens of RULER's shortest text, unless the model or ruler.lengths has shorter ones


class Forward(NamedTuple):
    """The largest forward of an evaluation, of `rows` sequences that `sharing` devices share."""

    key: str  # the key that decides its length
    rows: int
    length: int  # tokens of a sequence
    sharing: int
    generates: bool  # from a cache of the keys and values; prompts are packed into one sequence

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
    """Return the tokens of the texts of pass keys or RULER; `context` for other evaluations."""
    usual = default_lengths(context)
    if config.passkey.enabled:
        usual = [length for length in usual if length >= SHORTEST]
        return config.passkey.lengths or usual or [context]
    if config.ruler.enabled:
        usual = [length for length in usual if length >= USUAL]
        return sorted(config.ruler.lengths or usual or [context])
    return [context]


def largest_forward(config: EvalConfig, lengths: list[int], rows: int, device: str) -> Forward:
    """Return the forward of the longest text, or of `rows` sequences of documents."""
    sharing, longest = config.context.degree, max(lengths)
    assert isinstance(sharing, int)
    key = "seq_len"
    for name, texts in (("passkey", config.passkey), ("ruler", config.ruler)):
        if texts.enabled:
            rows = max(1, TOKENS_TOGETHER[device] * sharing // longest)
            key = "seq_len" if texts.lengths is None else f"{name}.lengths"
    generates = config.ruler.enabled or (bool(config.tasks) and sharing == 1)
    return Forward(key, rows, longest, sharing, generates)


def needed(
    config: EvalConfig, model: GPTConfig, dtype: torch.dtype, forward: Forward, strategy: str
) -> Needed:
    """Return the memory that each device needs if they share the model by `strategy`."""
    whole = skeleton(model, config.attention, dtype)
    weights = float(weight_bytes(whole))
    # A slice of everything, and all of the tensors outside of blocks and of two blocks: FSDP
    # gathers the next one while one computes
    if STRATEGIES[strategy].shards_weights:
        blocks = weight_bytes(whole.blocks)
        gathered = weights - blocks + 2 * blocks / model.layers
        weights = min(weights, weights / config.devices + gathered)
    size, tokens = dtype.itemsize, forward.tokens
    in_mlp = min(tokens, POLICIES["long"]["mlp_tile"]) if forward.generates else tokens
    activations: float = size * max(
        block.forward_elements(tokens, in_mlp) for block in model.blocks()
    )
    # Scores twice in fp32, and the probabilities.
    if config.attention.description.score_bytes is not None:
        packed = forward.rows if forward.generates else 1
        pairs = packed * forward.rows * forward.length**2 / forward.sharing
        activations += model.heads * pairs * (2 * 4 + size)
    cache = KVCache.bytes_of(model, forward.rows, forward.length, dtype)
    return Needed(weights, cache if forward.generates else 0, activations)


def weight_bytes(module: nn.Module) -> int:
    """Return the bytes of the parameters of `module`."""
    return sum(weight.nbytes for weight in module.parameters())


def choose_strategy(
    config: EvalConfig,
    model: GPTConfig,
    dtype: torch.dtype,
    forward: Forward,
    machine: Machine,
    device: str,
) -> str:
    """Return the strategy of `config`; for auto, a copy per device, or slices if none has room.

    Raises ValueError with advice if `forward` needs clearly more memory than a process has.
    """
    room = machine.host_memory / config.devices
    if device != "cpu" and machine.gpu is not None:
        room = machine.gpu.usable
    need = partial(needed, config, model, dtype, forward)
    strategy = config.strategy.name
    if strategy == "auto" and config.devices == 1:
        strategy = "none"
    elif strategy == "auto":
        # 5% stay free, as `longctx plan` has it
        strategy = "ddp" if need("ddp").total <= 0.95 * room else "fsdp"
    memory = need(strategy)
    # A prediction may be a tenth off, and more on a CPU
    if memory.total <= CLEARLY[device] * room:
        return strategy
    # Whatever would make the forward smaller.
    advice = ["attention=flash"] if config.attention.description.score_bytes is not None else []
    if forward.key == "seq_len" and forward.rows > 1:
        advice.append("a smaller batch_size")
    advice.append("a smaller seq_len" if forward.key == "seq_len" else f"shorter {forward.key}")
    if not STRATEGIES[strategy].shards_weights and memory.weights > room / 2:
        advice.append("more devices with strategy=fsdp")
    value = f"[{forward.length}]" if forward.key != "seq_len" else forward.length
    raise ValueError(
        f"{forward.key}={value}: {forward.rows:,} × {forward.length:,} tokens at a time are "
        f"predicted to need {memory.total / GIB:,.1f} GiB of "
        f"{'memory' if device == 'cpu' else 'GPU memory'}, and there are {room / GIB:,.1f}; give "
        f"{' or '.join(advice)}"
    )
