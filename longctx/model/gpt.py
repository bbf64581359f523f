"""A GPT in Llama's architecture: embedding, blocks, norm, lm_head, and the loss.

Nothing in forward waits for the device.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from longctx.attention import Mask
from longctx.config.memory_config import MemoryConfig
from longctx.config.model_config import AttentionConfig, GPTConfig
from longctx.model.layers import Block, RMSNorm, StreamNorm
from longctx.model.loss import linear_cross_entropy
from longctx.model.recompute import (
    checkpointed_after,
    checkpointed_blocks,
    forward_in_tiles,
)
from longctx.model.rope import Rope


class GPT(nn.Module):
    """The model of `config`; raises ValueError where `config` makes no model.

    `attention` names the backend. `memory` says which activations are saved for backward, and
    where; its default is the policy fast.
    """

    def __init__(
        self,
        config: GPTConfig,
        attention: AttentionConfig | str = "flash",
        memory: MemoryConfig | str = "fast",
    ) -> None:
        super().__init__()
        config.validate()
        if config.vocab_size is None:
            raise ValueError("model.vocab_size is not set; give it, or take it from a tokenizer")
        attention = AttentionConfig(attention) if isinstance(attention, str) else attention
        memory = MemoryConfig(memory) if isinstance(memory, str) else memory
        memory.validate()
        self.config = config
        self.memory = memory.filled(memory.policy)
        V, C = config.vocab_size, config.channels
        self.embed = nn.Embedding(V, C)
        self.rope = Rope(config.head_size, config.rope_theta, config.rope_scaling, config.context)
        self.blocks: Any = nn.ModuleList(
            Block(config, attention, rotary=n not in config.nope_layers)
            for n in range(config.layers)
        )
        self.norm = StreamNorm(C, config.norm_eps)
        self.head = None if config.tied else nn.Linear(C, V, bias=False)
        self.init_weights()

    @property
    def lm_head_weight(self) -> Tensor:
        """(V, C) weight of the lm_head: that of the embedding where they are tied."""
        return self.embed.weight if self.head is None else self.head.weight

    @torch.no_grad()
    def init_weights(self) -> None:
        """Draw all weights anew from normal(0, init_std).

        As in GPT-2, those into the residual stream are smaller by sqrt(2 · layers).
        """
        std = self.config.init_std
        for name, module in self.named_modules():
            if isinstance(module, RMSNorm):
                nn.init.ones_(module.weight)
            elif isinstance(module, nn.Linear | nn.Embedding):
                into_residual = name.endswith((".attention.out", ".mlp.down"))
                shrink = math.sqrt(2 * self.config.layers) if into_residual else 1.0
                nn.init.normal_(module.weight, std=std / shrink)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)

    def compile_blocks(self) -> None:
        """Compile every block in place with torch.compile; parameter names stay as they are.

        All blocks share one compiled graph, or two, before and after attention, where backward runs
        them again. A backend that torch.compile cannot trace splits it too. Where torch would stop
        compiling and go on without a word, it raises instead.
        """
        torch._dynamo.config.recompile_limit = 64
        torch._dynamo.config.fail_on_recompile_limit_hit = True
        for block in self.blocks:
            if self.memory.recompute == "none":
                block.compile()
            else:
                block.before = torch.compile(block.before)
                block.after = torch.compile(block.after)

    def forward(
        self,
        tokens: Tensor,
        targets: Tensor | None = None,
        mask: Mask | None = None,
        reduction: str = "mean",
        scale: Tensor | None = None,
        at: Tensor | None = None,
    ) -> Tensor:
        """tokens (B, T) int64 → logits (B, T, V), or with `targets` (B, T) their loss in fp32.

        A target of -100 is not scored. `mask` defaults to `Mask.causal()`. `reduction` is "mean"
        over the scored tokens, "sum", or "none": losses (B, T), 0 where not scored, without
        gradient. `scale`, a scalar on the device, multiplies mean and sum. `at` (B, n) int64 gives
        the logits of these places alone, (B, n, V). Raises ValueError where tokens, targets or mask
        do not fit together.
        """
        if tokens.ndim != 2 or (targets is not None and targets.shape != tokens.shape):
            shapes = tuple(tokens.shape), None if targets is None else tuple(targets.shape)
            raise ValueError(
                f"tokens and targets must both be (B, T), got {shapes[0]} and {shapes[1]}"
            )
        B, T = tokens.shape
        mask = (Mask.causal() if mask is None else mask).bind(B, T, T, tokens.device)
        cos, sin = self.rope(mask.positions(B, T, tokens.device))
        embedding, lm_head = self.embed.weight, self.lm_head_weight
        tied_in_place = (
            self.head is None and targets is not None and self._adds_tied_gradients_in_place(tokens)
        )
        if tied_in_place:
            embedding, lm_head = _TiedWeight.apply(self.embed.weight)

        x = F.embedding(tokens, embedding, sparse=tied_in_place)
        if torch.is_autocast_enabled(x.device.type):  # the residual stream too is in 16 bits
            x = x.to(torch.get_autocast_dtype(x.device.type))
        x = self._through_blocks(x, cos, sin, self._masks(mask))
        x = self.norm(x)

        if targets is None:
            x = x if at is None else x.gather(1, at[..., None].expand(-1, -1, x.shape[-1]))
            return F.linear(x, lm_head)
        chunk = self.memory.chunk(self.embed.num_embeddings, x.device.type)
        return linear_cross_entropy(x, lm_head, targets, chunk, reduction, scale)

    def _masks(self, mask: Mask) -> list[Mask]:
        """The mask of each layer; each window's is made once, for all layers that have it."""
        by_window: dict[int | None, Mask] = {None: mask}
        if self.config.window is not None:
            by_window[self.config.window] = mask.windowed(self.config.window)
        return [by_window[self.config.window_of(n)] for n in range(len(self.blocks))]

    def _through_blocks(self, x: Tensor, cos: Tensor, sin: Tensor, masks: list[Mask]) -> Tensor:
        """x (B, T, C) through all blocks; with gradients, saving what the memory policy says."""
        training, tile = torch.is_grad_enabled(), self.memory.mlp_tile or 0
        recompute = self.memory.recompute if training else "none"
        if recompute == "block":
            return checkpointed_blocks(self.blocks, x, cos, sin, masks, self.memory)
        for block, mask in zip(self.blocks, masks, strict=True):
            if recompute == "mlp":
                out = block.attention(*block.before(x, cos, sin), mask)
                x = checkpointed_after(block, x, out, tile)
            elif tile and not training:
                x = forward_in_tiles(block, x, cos, sin, mask, tile)
            else:
                x = block(x, cos, sin, mask)
        return x

    def _adds_tied_gradients_in_place(self, tokens: Tensor) -> bool:
        """Whether a tied weight's two gradients are added up in place: on a GPU, in fp32, and only
        where any order will do, since it is done by atomics.
        """
        any_order = tokens.is_cuda and not torch.are_deterministic_algorithms_enabled()
        return any_order and torch.is_grad_enabled() and self.embed.weight.dtype == torch.float32


class _TiedWeight(torch.autograd.Function):
    """A weight twice: for the embedding, whose gradient is sparse, and for the lm_head.

    The sum of the two gradients takes the place of the lm_head's: one (V, C) tensor, not two.
    """

    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        return weight.view_as(weight), weight.view_as(weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, embedding: Tensor | None, lm_head: Tensor | None) -> Tensor:
        assert lm_head is not None  # the loss makes it wherever this weight is trained
        return lm_head if embedding is None else lm_head.add_(embedding)
