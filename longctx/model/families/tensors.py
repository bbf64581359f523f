"""Names of tensors in Hugging Face folders and here: the mapping that all Llama-like models share.

A tensor there is a block of rows of a parameter here: q, k and v are the rows of one projection,
gate and up those of another (see `longctx.model.layers`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from longctx.config.model_config import GPTConfig

EMBEDDING = "model.embed_tokens.weight"
LM_HEAD = "lm_head.weight"
# Computed, not learned; in old Llama files.
BUFFERS = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")


class Piece(NamedTuple):
    """A tensor of a Hugging Face model: rows `first` and on of the parameter `ours`."""

    theirs: str
    ours: str
    first: int
    shape: tuple[int, ...]


def llama_tensors(config: GPTConfig) -> Iterator[Piece]:
    """Yield every tensor of the Hugging Face model of `config`, with its rows here."""
    V, C = config.vocab_size or 0, config.channels
    yield Piece(EMBEDDING, "embed.weight", 0, (V, C))
    for n in range(config.layers):
        theirs, ours = f"model.layers.{n}", f"blocks.{n}"
        yield Piece(f"{theirs}.input_layernorm.weight", f"{ours}.attention_norm.weight", 0, (C,))
        yield from _attention(config, f"{theirs}.self_attn", f"{ours}.attention")
        yield Piece(f"{theirs}.post_attention_layernorm.weight", f"{ours}.mlp_norm.weight", 0, (C,))
        yield from _mlp(config, f"{theirs}.mlp", f"{ours}.mlp")
    yield Piece("model.norm.weight", "norm.weight", 0, (C,))
    if not config.tied:
        yield Piece(LM_HEAD, "head.weight", 0, (V, C))


def _attention(config: GPTConfig, theirs: str, ours: str) -> Iterator[Piece]:
    C, D = config.channels, config.head_size
    q, kv = config.heads * D, config.kv_heads * D
    for x, first, rows in (("q", 0, q), ("k", q, kv), ("v", q + kv, kv)):
        yield from _linear(
            f"{theirs}.{x}_proj", f"{ours}.qkv", first, (rows, C), bias=config.qkv_bias
        )
        if config.qk_norm and x != "v":
            yield Piece(f"{theirs}.{x}_norm.weight", f"{ours}.{x}_norm.weight", 0, (D,))
    yield from _linear(f"{theirs}.o_proj", f"{ours}.out", 0, (C, q), bias=config.out_bias)


def _mlp(config: GPTConfig, theirs: str, ours: str) -> Iterator[Piece]:
    C, F, bias = config.channels, config.ffn, config.mlp_bias
    yield from _linear(f"{theirs}.gate_proj", f"{ours}.gate_up", 0, (F, C), bias)
    yield from _linear(f"{theirs}.up_proj", f"{ours}.gate_up", F, (F, C), bias)
    yield from _linear(f"{theirs}.down_proj", f"{ours}.down", 0, (C, F), bias)


def _linear(
    theirs: str, ours: str, first: int, shape: tuple[int, int], bias: bool
) -> Iterator[Piece]:
    yield Piece(f"{theirs}.weight", f"{ours}.weight", first, shape)
    if bias:
        yield Piece(f"{theirs}.bias", f"{ours}.bias", first, shape[:1])
