"""A GPT in Llama's architecture: embedding, blocks, norm, head or loss. Nothing in forward waits
for the device.
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
from longctx.model import recompute
from longctx.model.layers import Block, RMSNorm, StreamNorm
from longctx.model.loss import linear_cross_entropy
from longctx.model.rope import Rope


class GPT(nn.Module):
    """The model of `config`, with attention by the named backend; raises ValueError where `config`
    makes no model.

    `memory` says what is kept for backward and where; its default is the policy fast.
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
        chosen = AttentionConfig(attention) if isinstance(attention, str) else attention
        self.config = config
        memory = MemoryConfig(memory) if isinstance(memory, str) else memory
        memory.validate()
        self.memory = memory.filled(memory.policy)
        self.embed = nn.Embedding(config.vocab_size, config.channels)
        self.rope = Rope(config.head_size, config.rope_theta, config.rope_scaling, config.context)
        self.blocks: Any = nn.ModuleList(
            Block(config, chosen, n not in config.nope_layers) for n in range(config.layers)
        )
        self.norm = StreamNorm(config.channels, config.norm_eps)
        self.head = (
            None if config.tied else nn.Linear(config.channels, config.vocab_size, bias=False)
        )
        self.init_weights()

    @property
    def unembedding(self) -> Tensor:
        """(V, C) weight of the output head: the embedding itself where they are tied."""
        return self.embed.weight if self.head is None else self.head.weight

    @torch.no_grad()
    def init_weights(self) -> None:
        """Draw all weights anew: normal(0, init_std), as in GPT-2 less by sqrt(2 · layers) into the
        residual stream.
        """
        std = self.config.init_std
        for name, module in self.named_modules():
            if isinstance(module, RMSNorm):
                nn.init.ones_(module.weight)
            elif isinstance(module, nn.Linear | nn.Embedding):
                into_residual = name.endswith((".attention.out", ".mlp.down"))
                nn.init.normal_(
                    module.weight,
                    std=std / math.sqrt(2 * self.config.layers) if into_residual else std,
                )
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)

    def compile_blocks(self) -> None:
        """Compile every block in place with torch.compile; parameter names stay as they are.

        All blocks share one compiled graph, or two, before and after attention, where backward runs
        them again. A backend that torch.compile cannot trace splits it too. Where torch would stop
        compiling and run on without a word, it raises instead.
        """
        torch._dynamo.config.recompile_limit = 64
        torch._dynamo.config.fail_on_recompile_limit_hit = True
        for block in self.blocks:
            if self.memory.recompute == "none":
                block.compile()
            else:
                block.before, block.after = torch.compile(block.before), torch.compile(block.after)

    def forward(
        self,
        tokens: Tensor,
        targets: Tensor | None = None,
        mask: Mask | None = None,
        reduction: str = "mean",
        scale: Tensor | None = None,
        at: Tensor | None = None,
    ) -> Tensor:
        """tokens (B, T) int64 → logits (B, T, V), or with targets (B, T), where -100 is not scored,
        their loss in fp32.

        `mask` defaults to `Mask.causal()`. `reduction` is "mean" over the scored tokens, "sum", or
        "none": losses (B, T), 0 where not scored, without gradient. `scale`, a scalar on the
        device, multiplies mean and sum. `at` (B, n) int64 gives logits for these places in the rows
        alone, (B, n, V). Raises ValueError where tokens, targets or mask do not fit together.
        """
        if tokens.ndim != 2 or (targets is not None and targets.shape != tokens.shape):
            shapes = tuple(tokens.shape), None if targets is None else tuple(targets.shape)
            raise ValueError(
                f"tokens and targets must both be (B, T), got {shapes[0]} and {shapes[1]}"
            )
        B, T = tokens.shape
        mask = (Mask.causal() if mask is None else mask).bind(B, T, T, tokens.device)
        cos, sin = self.rope(mask.positions(B, T, tokens.device))
        masks: dict[int | None, Mask] = {
            None: mask
        }  # by window; each made once, for all layers that have it
        if self.config.window is not None:
            masks[self.config.window] = mask.windowed(self.config.window)
        embedding, unembedding = self.embed.weight, self.unembedding
        together = self.head is None and targets is not None and self._adds_in_place(tokens)
        if together:
            embedding, unembedding = _Tied.apply(self.embed.weight)
        x = F.embedding(tokens, embedding, sparse=together)
        if torch.is_autocast_enabled(x.device.type):  # the residual stream too is in 16 bits
            x = x.to(torch.get_autocast_dtype(x.device.type))
        in_turn = [masks[self.config.window_of(n)] for n in range(len(self.blocks))]
        x = self.norm(self._through_blocks(x, cos, sin, in_turn))
        if targets is None:
            x = x if at is None else x.gather(1, at[..., None].expand(-1, -1, x.shape[-1]))
            return F.linear(x, unembedding)
        chunk = self.memory.chunk(self.embed.num_embeddings, x.device.type)
        return linear_cross_entropy(x, unembedding, targets, chunk, reduction, scale)

    def _adds_in_place(self, tokens: Tensor) -> bool:
        """Whether a tied weight's two gradients are added up in place: on a GPU by atomics, in any
        order, and in fp32.
        """
        any_order = tokens.is_cuda and not torch.are_deterministic_algorithms_enabled()
        return any_order and torch.is_grad_enabled() and self.embed.weight.dtype == torch.float32

    def _through_blocks(self, x: Tensor, cos: Tensor, sin: Tensor, masks: list[Mask]) -> Tensor:
        again = self.memory.recompute if torch.is_grad_enabled() else "none"
        if again == "block":
            return recompute.through(self.blocks, x, cos, sin, masks, self.memory)
        for block, mask in zip(self.blocks, masks, strict=True):
            if again == "mlp":
                out = block.attention(*block.before(x, cos, sin), mask)
                x = recompute.after(block, x, out, self.memory.mlp_tile or 0)
            elif self.memory.mlp_tile and not torch.is_grad_enabled():
                x = recompute.without_gradient(block, x, cos, sin, mask, self.memory.mlp_tile)
            else:
                x = block(x, cos, sin, mask)
        return x


class _Tied(torch.autograd.Function):
    """A weight once for the embedding, whose gradient is sparse, and once for the head: their sum
    takes the head's place.
    """

    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        return weight.view_as(weight), weight.view_as(weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, embedding: Tensor | None, head: Tensor | None) -> Tensor:
        assert head is not None  # the loss makes it wherever this weight is trained
        return head if embedding is None else head.add_(embedding)
