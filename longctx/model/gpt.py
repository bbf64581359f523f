"""A GPT in Llama's architecture: embedding, blocks, norm, lm_head, and the loss.

Nothing in forward waits for the device.
"""

from __future__ import annotations

import math
import pkgutil
from collections.abc import Callable, Iterator, Mapping
from functools import cache, partial
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from longctx.attention import Mask
from longctx.attention.context_parallel import Context, Shards, padded
from longctx.attention.description import AttentionConfig
from longctx.config.layout_config import MemoryConfig
from longctx.model.experts import Balance, balancing
from longctx.model.layers import Block, RMSNorm
from longctx.model.loss import IGNORED, ZLoss, linear_cross_entropy, shaped
from longctx.model.mixer import Batch, Mixer
from longctx.model.packed import is_packed
from longctx.model.recompute import COMPILED, checkpointed_blocks, forward_in_tiles
from longctx.model.rope import Angles, Rope, Ropes
from longctx.runs import compile_cache
from longctx.spec.model_config import GPTConfig

Draw = Callable[[Tensor, Callable[[Tensor], Any]], None]  # (weight, what fills it at random)
Backend = AttentionConfig | str  # or its name
Memory = MemoryConfig | str  # or its policy


class GPT(nn.Module):
    """The model of `config`; raises ValueError if `config` makes no model.

    `attention` names the backend. `memory` is the policy of activations saved for backward, on the
    GPU or the host.
    """

    # Class that decodes this model; None: `Decoder`
    decoder: ClassVar[Any] = None
    # True if the length of a document changes the frequencies of its positions
    follows_length = False
    # Key of metrics → value of the last micro-batch, on the device
    measured: Mapping[str, Tensor] = {}

    def __init__(
        self, config: GPTConfig, attention: Backend = "flash", memory: Memory = "fast"
    ) -> None:
        super().__init__()
        config.validate()
        if config.vocab_size is None:
            raise ValueError("model.vocab_size is not set; give it, or take it from a tokenizer")
        attention, self.memory = settings_of(attention, memory)
        self.config, self.recomputed_blocks = config, round(self.memory.again * config.layers)
        V, C = config.vocab_size, config.channels
        self.embed = nn.Embedding(V, C)
        self.ropes: Any = Ropes([block.attention.rope for block in config.blocks])
        self.follows_length = any(rope.follows_length for rope in self.ropes)
        self.blocks: Any = nn.ModuleList(Block(block, attention) for block in config.blocks)
        self.norm = config.norm("norm", "norm").build()
        self.head = None if config.tied else nn.Linear(C, V, bias=False)
        # Weights that no export rounds, or routers would choose other experts
        self.exact = {
            f"{path}.{name}" if name in module._parameters else f"{path}.{name}.weight"
            for path, module in self.named_modules()
            for name in getattr(module, "exact", ())
        }
        # The ranks that share the tokens of each sequence, see `forward`: this one alone
        self.context = Context()
        if not self.embed.weight.is_meta:  # or there is nothing to draw yet
            self.init_weights()

    @property
    def lm_head_weight(self) -> Tensor:
        """Return the weight (V, C) of the lm_head; it is the embedding's if they are tied."""
        return self.embed.weight if self.head is None else self.head.weight

    @torch.no_grad()
    def init_weights(self, draw: Draw = lambda x, fill: fill(x)) -> None:
        """Draw all weights anew from normal(0, init_std).

        As in GPT-2, those into the residual stream are smaller by sqrt(2 · layers). `draw` fills a
        weight of which this rank holds a part.
        """
        into_residual = {
            f"blocks.{n}.{path}"
            for n, block in enumerate(self.config.blocks)
            for path, linear in block.linears.items()
            if linear.into_residual
        }
        # Biases, sinks, corrections; of packed weights any byte may be half of a NaN
        for weight in self.parameters():
            if weight.ndim == 1 or is_packed(weight):
                nn.init.zeros_(weight)
        for name, module in self.named_modules():
            if isinstance(module, RMSNorm):
                nn.init.constant_(module.weight, 0.0 if module.plus_one else 1.0)
            elif isinstance(module, nn.Linear | nn.Embedding) and not is_packed(module.weight):
                shrink = math.sqrt(2 * self.config.layers) if name in into_residual else 1.0
                draw(module.weight, partial(nn.init.normal_, std=self.config.init_std / shrink))
            if isinstance(module, Mixer):
                for own, weight in module.named_parameters(recurse=False):
                    draw(weight, partial(module.start, own))

    def compile_blocks(self) -> None:
        """Compile blocks of attention in place; parameter names stay as they are."""
        # All blocks share one compiled graph, or two if backward runs them again: before and after
        # attention. Raise if torch would stop compiling and go on without a word.
        compile_cache.use()
        torch._dynamo.config.recompile_limit = 64
        torch._dynamo.config.fail_on_recompile_limit_hit = True
        if COMPILED.append not in torch._dynamo.callback_handler.end_callbacks:
            torch._dynamo.callback.on_compile_end(COMPILED.append)
        for layer, block in enumerate(self.blocks):
            is_mixer = isinstance(block.attention, Mixer)  # its kernels may not be traceable
            if layer >= self.recomputed_blocks and not is_mixer:
                block.compile()
            elif not is_mixer:
                block.before = torch.compile(block.before)
                block.after = torch.compile(block.after)

    @property
    def rounded(self) -> set[str]:
        """Return the names of the weights that compute in 16 bits if the run does: of matrices and
        their biases. Norms, sinks, what mixers have besides matrices and `exact` stay in fp32.
        """
        linear = nn.Linear, nn.Embedding
        owners = [(path, x) for path, x in self.named_modules() if isinstance(x, linear)]
        return {f"{path}.{name}" for path, x in owners for name in x._parameters} - self.exact

    def cast(self, dtype: torch.dtype) -> None:
        """Convert the `rounded` weights to `dtype`."""
        rounded = self.rounded
        for name, weight in self.named_parameters():
            if name in rounded and weight.is_floating_point():
                weight.data = weight.data.to(dtype)

    def linears(self) -> Iterator[tuple[Any, str, str, bool]]:
        """Yield block, path, target of LoRA, True if lora.base packs it, for each linear layer."""
        for block, parts in zip(self.blocks, self.config.blocks, strict=True):
            for path, linear in parts.linears.items():
                yield block, path, path.rpartition(".")[2], linear.packs

    def figures(self) -> dict[str, float]:
        """Return what was `measured`; waits for the device."""
        return {key: value.item() for key, value in self.measured.items()}

    def forward(
        self,
        tokens: Tensor,
        targets: Tensor | None = None,
        mask: Mask | None = None,
        reduction: str = "mean",
        scale: Tensor | None = None,
        at: Tensor | None = None,
        z_loss: float = 0.0,
    ) -> Tensor:
        """Return logits (B, T, V) of tokens (B, T) int64, or with `targets` (B, T) a loss in fp32.

        A target of -100 is not scored. `mask` defaults to `Mask.causal()`. `reduction` is "mean"
        over the scored tokens, "sum", or "none": losses (B, T), 0 for the others. `scale`, a scalar
        on the device, multiplies mean and sum. `at` (B, n) int64 gives the logits of these
        positions alone, (B, n, V).

        The values are cross entropy alone. Gradients of mean and sum include the loss that balances
        experts, for each target token, and `z_loss` times the mean or sum of lse², see loss.py.

        If ranks share sequences, every rank is given whole ones. Its "mean" and "sum" are its part
        of the loss, and all parts add up to it; "none" and logits are whole on every rank.
        """
        shapes = [tuple(x.shape) for x in (tokens, targets) if x is not None]
        if tokens.ndim != 2 or len({*shapes}) > 1 or not tokens.numel():
            wanted = "tokens and targets must both be (B, T), of at least one token"
            raise ValueError(f"{wanted}, got {' and '.join(map(str, shapes))}")
        mask, (B, T), context = Mask.of(mask), tokens.shape, self.context
        # Ranks take equal shares of a sequence, so T is padded to N, a multiple of their number
        N = padded(T, context.ranks.count, context.method)
        mask = mask.padded(T, N).bind(B, N, N, tokens.device)
        shards = context.shards(mask, N)
        tokens = shards.local(F.pad(tokens, (0, N - T)))
        # While the model trains, every router counts its tokens for the loss that balances experts
        factor = self.config.experts.balance
        trains = targets is not None and reduction != "none" and torch.is_grad_enabled()
        balance = Balance(factor) if factor and trains else None
        with balancing(balance):
            x = self.hidden(tokens, mask, shards, T)

        lm_head = self.lm_head_weight
        if targets is None:
            x = shards.gathered(x)[:, :T] if at is None else shards.at(x, at)
            return self.logits(x, lm_head)
        # A mean is over target tokens of whole sequences; a rank knows only its own share
        is_shared = reduction == "mean" and context.ranks.count > 1
        scored: Any = (targets != IGNORED).sum() if balance is not None or is_shared else 0
        if is_shared:
            mean = 1.0 / scored.clamp(min=1)
            reduction, scale = "sum", mean if scale is None else mean * scale
        targets = shards.local(F.pad(targets, (0, N - T), value=IGNORED))
        chunk = self.memory.chunk(len(lm_head), x.device.type)
        multipliers, extra = self.config.multipliers, ZLoss(z_loss) if z_loss else None
        of_logits = chunk, reduction, scale, multipliers.logits, multipliers.logit_softcap, extra
        loss = linear_cross_entropy(x, lm_head, targets, *of_logits)
        if extra is not None and extra.mean is not None:
            self.measured = {**self.measured, "z_loss": extra.mean}
        if balance is not None:
            weight = (scored if reduction == "sum" else 1) * (1.0 if scale is None else scale)
            balance.join(loss, weight, context.ranks)
            self.measured = {**self.measured, **balance.figures}
        return shards.gathered(loss)[:, :T] if reduction == "none" else loss

    def hidden(self, tokens: Tensor, mask: Mask, shards: Shards, length: int) -> Tensor:
        """Return the normed x (B, n, C) of this rank's tokens (B, n). `mask` is bound, of whole
        sequences: `length` tokens and padding.
        """
        angles = self.angles(mask, shards, (len(tokens), length), tokens.device)
        masks = self.masks(mask, shards, len(tokens))
        return self.norm(self._through_blocks(tokens, angles, masks))

    def masks(self, mask: Mask, shards: Shards, sequences: int) -> list[Any]:
        """Return each layer's mask, or a mixer's `Batch`; `mask` is bound to these `sequences`."""

        @cache  # for all layers that have the window
        def made(window: int | None, is_mixer: bool) -> Any:
            windowed = mask if window is None else mask.windowed(window)
            return Batch(windowed, sequences, shards.ranks) if is_mixer else shards.mask(windowed)

        are_mixers = [isinstance(block.attention, Mixer) for block in self.blocks]
        return list(map(made, map(self.config.window_of, range(len(self.blocks))), are_mixers))

    def angles(
        self, mask: Mask, shards: Shards, shape: tuple[int, int], device: torch.device
    ) -> list[Angles]:
        """Return each layer's angles of this rank's tokens (B, n), of sequences `shape` (B, T)."""
        (B, T), N = shape, shards.length
        positions = shards.local(mask.positions(B, N, device))

        def angles_of(rope: Rope) -> Angles:
            if not rope.follows_length:
                return rope(positions)
            # Each document's length decides, without padding
            table, number = rope.of_documents(mask.lengths or (N,) * B, T)
            number = shards.local(number.view(B, N).to(device, non_blocking=True))
            return rope(positions, table.to(device, non_blocking=True)[number])

        return self.ropes.per_layer(angles_of)

    def embedded(self, tokens: Tensor) -> Tensor:
        """Return the embedded tokens (B, T, C), which enter the first block."""
        x = self.embed(tokens)
        factor = self.config.multipliers.embedding
        # Rounded to the weight's dtype, as Gemma does
        x = x if factor == 1 else x * torch.tensor(factor, dtype=x.dtype).item()
        # Autocast leaves embeddings in fp32, so the residual stream would take twice the memory
        is_cast = torch.is_autocast_enabled(x.device.type)
        return x.to(torch.get_autocast_dtype(x.device.type)) if is_cast else x

    def logits(self, x: Tensor, lm_head: Tensor) -> Tensor:
        """Return the logits (..., V) of the normed x (..., C)."""
        multipliers = self.config.multipliers
        return shaped(F.linear(x, lm_head), multipliers.logits, multipliers.logit_softcap)

    def _through_blocks(self, tokens: Tensor, angles: list[Angles], masks: list[Any]) -> Tensor:
        """Return x (B, T, C) after all blocks; the memory policy decides what they save."""
        memory, again = self.memory, self.recomputed_blocks if torch.is_grad_enabled() else 0
        if again and torch.compiler.is_compiling():
            # torch.compile of the whole model cannot trace what saves its own activations
            return torch.compiler.disable(self._through_blocks)(tokens, angles, masks)
        # No name holds the first x while later blocks run: it may be a quarter of all memory
        if again:
            blocks = self.blocks[:again]
            x = checkpointed_blocks(blocks, self.embedded(tokens), angles, masks, memory)
        else:
            x = self.embedded(tokens)
        in_parts = memory.mlp_tile or memory.offload_weights
        for block, *own in list(zip(self.blocks, angles, masks, strict=True))[again:]:
            x = block.calling(forward_in_tiles, x, *own, memory) if in_parts else block(x, *own)
        return x


def settings_of(attention: Backend, memory: Memory) -> tuple[AttentionConfig, MemoryConfig]:
    """Return both as settings."""
    attention = AttentionConfig(attention) if isinstance(attention, str) else attention
    memory = MemoryConfig(memory) if isinstance(memory, str) else memory
    memory.validate()
    return attention, memory.filled(memory.policy)


def build(config: GPTConfig, attention: Backend = "flash", memory: Memory = "fast") -> GPT:
    """Return the model of `config`, by the class that computes its kind."""
    return pkgutil.resolve_name(config.implementation)(config, attention, memory)
