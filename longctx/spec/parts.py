"""A transformer block and its parts, norm, attention, feed-forward, as frozen values. Torch-free.

A part answers for its parameters, the matrices of its linear layers, its tensors in a Hugging Face
folder and its FLOPs, and builds its module. Everything else asks it and knows no layer by name.

Letters: N tokens on a device; C the hidden size, F the feed-forward size, q and kv the widths of
all query heads and all key heads; e bytes of an activation.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, NamedTuple

FP32 = 4  # bytes of a number
NF4_BLOCK = 64  # weights of a scale of lora.base=nf4; a matrix has a multiple of as many columns


def packed_width(columns: int) -> int:
    """Return the bytes of a row of `columns` weights in nf4, its scales among them: half a byte a
    weight, one for each 64, 8 for all; filled up to a multiple of 16.
    """
    return -(-(33 * columns // 64 + 8) // 16) * 16


class LinearSpec(NamedTuple):
    """A linear layer; its weight (outputs, columns) may hold several matrices, stacked by rows."""

    name: str
    tensors: tuple[str, ...]  # of a Hugging Face folder, a name per matrix
    rows: tuple[int, ...]  # of each matrix
    columns: int
    has_bias: bool
    into_residual: bool = False  # initial weights are smaller
    packs: bool = True  # frozen, it is in the format lora.base
    experts: int = 1  # whose matrices are stacked; `active` of them multiply a token
    active: int = 1

    @property
    def outputs(self) -> int:
        return sum(self.rows)

    @property
    def weights(self) -> int:
        return self.outputs * self.columns

    def frozen_bytes(self, base: str | None, each: int) -> int:
        """Return the bytes of its frozen weight: packed as `base`, or `each` of an element."""
        is_packed = base is not None and self.packs
        return self.outputs * (packed_width(self.columns) if is_packed else each * self.columns)


class Fold:
    """How a tensor of a Hugging Face folder becomes rows of a parameter, and these a tensor again.

    This one changes nothing. Folding once, at load, spares a switch in every forward pass.
    """

    def rows(self, shape: tuple[int, ...]) -> int:
        """Return the number of our rows that a tensor of this shape becomes."""
        return shape[0]

    def load(self, tensor: Any) -> Any:
        return tensor

    def save(self, rows: Any) -> Any:
        return rows


class Piece(NamedTuple):
    """A tensor of a Hugging Face folder: rows `first` and on of the parameter `ours`, folded."""

    theirs: str
    ours: str
    first: int
    shape: tuple[int, ...]
    fold: Fold = Fold()

    @property
    def rows(self) -> slice:
        """Return the rows of the parameter."""
        return slice(self.first, self.first + self.fold.rows(self.shape))


class Pass(NamedTuple):
    """A micro-batch on its way through a block; sizes are bytes of one element."""

    tokens: int  # on this device
    tile: int  # tokens that projections and MLP take at a time if they are recomputed
    recompute: str  # none | mlp | block
    activation: int
    fp8_input: int  # of a product's input in FP8; 0 if it is saved as it is
    weight_copy: int  # of a weight's copy in 16 bits
    gradient: int  # of a weight's gradient; 0 if weights are frozen
    is_fused: bool  # one kernel makes the product of gate and up again in backward
    adapted: tuple[str, ...] = ()  # linear layers with LoRA
    unpacked: int = 0  # of a packed weight during its product; 0 if weights are not packed
    is_compiled: bool = False
    on_gpu: bool = False
    # Of attention: the tokens of a sequence, the description and the options of the backend. Ranks
    # that share sequences compute their heads in parts, one after another
    keys: int = 0
    backend: Any = None
    options: Mapping[str, Any] = {}
    head_parts: int = 1
    heads_at_once: int = 0  # key heads whose q, k and v exist at one time; 0: all


@dataclass(frozen=True)
class Part:
    """A part of a block, called `name` in its module and `folder` in a Hugging Face folder."""

    name: str
    folder: str
    size: int  # hidden size of the residual stream
    module: ClassVar[str]  # the class that computes it, given the part first

    @cached_property
    def linears(self) -> tuple[LinearSpec, ...]:
        """Return its linear layers, in the order of its module."""
        return ()

    @property
    def vectors(self) -> tuple[tuple[str, int], ...]:
        """Return name and size of its other parameters."""
        return ()

    @cached_property
    def parameters(self) -> int:
        """Count its parameters."""
        linears = sum(layer.weights + layer.has_bias * layer.outputs for layer in self.linears)
        return linears + sum(size for _, size in self.vectors)

    def pieces(self, theirs: str, ours: str) -> Iterator[Piece]:
        """Yield its tensors: in layer `theirs` of a Hugging Face folder, in block `ours` here."""
        theirs, ours = f"{theirs}.{self.folder}", f"{ours}.{self.name}"
        for linear in self.linears:
            first = 0
            for tensor, rows in zip(linear.tensors, linear.rows, strict=True):
                source, target = f"{theirs}.{tensor}", f"{ours}.{linear.name}"
                yield Piece(f"{source}.weight", f"{target}.weight", first, (rows, linear.columns))
                if linear.has_bias:
                    yield Piece(f"{source}.bias", f"{target}.bias", first, (rows,))
                first += rows
        for name, size in self.vectors:
            yield Piece(f"{theirs}.{name}", f"{ours}.{name}", 0, (size,))

    def build(self, *arguments: Any) -> Any:
        """Return a new module of this part."""
        return pkgutil.resolve_name(self.module)(self, *arguments)


@dataclass(frozen=True)
class Norm(Part):
    """A norm of the residual stream or of what a branch adds to it; or a factor in its place."""

    eps: float
    plus_one: bool
    form: str  # rms | layer | centered, a LayerNorm without bias | factor: the weight, untrained
    module = "longctx.model.layers.StreamNorm"

    @property
    def vectors(self) -> tuple[tuple[str, int], ...]:
        names = ("weight", "bias") if self.form == "layer" else ("weight",)
        return tuple((name, self.size) for name in names)


class RopeSpec(NamedTuple):
    """Rotary positions: the base of the frequencies, and transformers' rope_parameters."""

    size: int  # channels of a head that rotate
    theta: float
    scaling: Mapping[str, Any]
    context: int | None
    # (beta, n): queries are multiplied by 1 + beta · ln(1 + floor(position / n))
    growth: tuple[float, ...] = ()


@dataclass(frozen=True)
class AttentionSpec(Part):
    """Grouped-query attention with a fused projection of q, k and v."""

    model: Any  # the GPTConfig, whose keys its attention layers have in common
    window: int | None  # keys that a query sees; None: all before it
    rope: RopeSpec
    rotates: bool  # False: a layer without positions, as in SmolLM3
    module = "longctx.model.layers.SelfAttention"

    @property
    def query_size(self) -> int:
        """Return the width of all query heads, and of attention's output."""
        return self.model.heads * self.model.head_size

    @property
    def key_size(self) -> int:
        """Return the width of all key heads, and of all value heads."""
        return self.model.kv_heads * self.model.head_size

    @cached_property
    def linears(self) -> tuple[LinearSpec, ...]:
        q, kv, C = self.query_size, self.key_size, self.size
        # A layer whose values are its keys has two
        kinds = 2 if self.model.full_shares_kv and self.window is None else 3
        projections = ("q_proj", "k_proj", "v_proj")[:kinds], (q, kv, kv)[:kinds]
        linears = (
            LinearSpec("qkv", *projections, C, self.model.qkv_bias),
            LinearSpec("out", ("o_proj",), (C,), q, self.model.out_bias, into_residual=True),
            LinearSpec("gate", ("gate_proj",), (self.gate_size,), C, has_bias=False),
        )
        return linears if self.gate_size else linears[:2]

    @property
    def gate_size(self) -> int:
        """Count the factors of its output."""
        return 0 if self.model.attention_gate == "none" else self.query_size

    @property
    def vectors(self) -> tuple[tuple[str, int], ...]:
        norms = tuple(zip(("q_norm.weight", "k_norm.weight"), self.norms, strict=False))
        return (*norms, ("sinks", self.model.heads)) if self.model.sinks else norms

    @property
    def norms(self) -> tuple[int, ...]:
        """Count the channels that the norms of q and k normalize together; none without norms."""
        if self.model.qk_norm == "whole":
            return self.query_size, self.key_size
        return (self.model.head_size,) * 2 if self.model.qk_norm == "head" else ()

    def required(self, trains: bool = True) -> dict[str, Any]:
        """Return what its backend must be able to do, as arguments of `attention.check`."""
        # Sinks ask something of it only in training: a gradient of the lse
        parts = frozenset(part for part in ("softcap", "sinks") if getattr(self.model, part))
        parts = parts if trains else parts - {"sinks"}
        group = self.model.heads // self.model.kv_heads
        return {"head_dim": self.model.head_size, "scores": parts, "group": group}

    def flops(self, pairs: float) -> float:
        """Return the FLOPs of `pairs` of a query and a visible key, forward and backward."""
        return 12 * pairs * self.model.heads * self.model.head_size


@dataclass(frozen=True)
class FeedForward(Part):
    """SwiGLU with a fused projection of gate and up, which keeps its name if there is no gate."""

    inner: int
    has_bias: bool
    activation: str  # silu | gelu_tanh; gelu and relu2 without gate
    has_gate: bool
    module = "longctx.model.layers.MLP"

    @property
    def projections(self) -> tuple[str, ...]:
        """Return the names of its first matrices, each `inner` wide."""
        return ("gate_proj", "up_proj") if self.has_gate else ("up_proj",)

    @cached_property
    def linears(self) -> tuple[LinearSpec, ...]:
        C, F, names = self.size, self.inner, self.projections
        return (
            LinearSpec("gate_up", names, (F,) * len(names), C, self.has_bias),
            LinearSpec("down", ("down_proj",), (C,), F, self.has_bias, into_residual=True),
        )

    @property
    def moved(self) -> int:
        """Return the width that the elementwise kernels of SwiGLU would move in the same time."""
        return self.inner if self.has_gate else 5 * self.inner // 9

    def saved(self, p: Pass) -> int:
        """Return the bytes saved for backward: gate and up, and their product unless fused."""
        inner = (2 if p.is_fused or not self.has_gate else 3) * self.inner
        weights = sum(linear.weights for linear in self.linears)
        return p.activation * inner * p.tokens + p.weight_copy * weights

    def backward(self, p: Pass) -> int:
        """Return the bytes alive just after the gradients of gate and up were computed."""
        # The gradient of their product is still there then, with LoRA on the down projection in two
        # tensors. Fused, the product itself is too, and the down projection has no gradient yet but
        # has given up its copy in 16 bits; else the other way round.
        is_fused = p.is_fused and self.has_gate
        tensors = 4 if is_fused or self.activation == "relu2" else 2 + ("down" in p.adapted)
        down = -p.weight_copy if is_fused else p.gradient
        inner = p.activation * self.inner * p.tokens
        unpacked = inner + p.unpacked * self.linears[0].weights  # then, for their input's gradient
        return max(tensors * inner + down * self.size * self.inner, unpacked)

    def forward(self, p: Pass) -> int:
        """Return the bytes alive in a forward without gradients, uncompiled."""
        tensors = 6 if "gate_up" in p.adapted else 3 if p.is_fused else 4
        is_squared = self.activation == "relu2"
        tensors = tensors if self.has_gate else 2 + ("gate_up" in p.adapted or is_squared)
        inner = p.activation * self.inner * p.tile
        return max(tensors * inner, 2 * inner + p.unpacked * self.linears[0].weights)


@dataclass(frozen=True)
class BlockSpec:
    """A transformer block: x + attention(norm(x)), then x + mlp(norm(x)); norms may be missing, and
    the MLP, which is 0 wide then. If it `is_parallel`, it is x + attention(norm(x)) + mlp(norm(x)).
    """

    attention_norm: Norm | None
    attention: AttentionSpec
    mlp_norm: Norm | None
    mlp: FeedForward
    mlp_scale: float = 1.0  # factor of what the MLP reads
    branch_scale: float = 1.0  # factor of what attention and MLP add to the residual stream
    attention_out_norm: Norm | None = None  # of that, if it is normalized
    mlp_out_norm: Norm | None = None
    is_parallel: bool = False
    out_factor: Norm | None = None  # of the sum of the residual stream and both

    @property
    def shares_norm(self) -> bool:
        """Return True if attention and MLP have one input."""
        return self.is_parallel and self.mlp_norm is None

    def parts(self) -> tuple[Part, ...]:
        """Return the parts in the order in which they compute."""
        of_attention = self.attention_norm, self.attention, self.attention_out_norm
        of_mlp = self.mlp_norm, self.mlp if self.mlp.inner else None, self.mlp_out_norm
        return tuple(part for part in (*of_attention, *of_mlp, self.out_factor) if part is not None)

    @cached_property
    def linears(self) -> dict[str, LinearSpec]:
        """Return every linear layer by the path of its module in the block."""
        return {
            f"{part.name}.{linear.name}": linear for part in self.parts() for linear in part.linears
        }

    @cached_property
    def weights(self) -> int:
        """Count the weights of all linear layers."""
        return sum(linear.weights for linear in self.linears.values())

    @cached_property
    def multiplied(self) -> int:
        """Count the weights that multiply each token."""
        return sum(x.weights * x.active // x.experts for x in self.linears.values())
