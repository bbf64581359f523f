"""Bytes of a transformer block: saved by its forward, alive in its backward. Torch-free.

Letters as in spec/parts.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from longctx.kernels.attention import hopper_size
from longctx.model.mixers.description import MixerSpec
from longctx.spec.parts import FP32, AttentionSpec, BlockSpec, Norm, Pass

MLP, ATTENTION = "mlp", "attention"  # the halves of a block's backward, in their order


class Kept(NamedTuple):
    """Bytes saved by forward, and the half of backward after which they are free."""

    bytes: float
    until: str  # MLP | ATTENTION


def kept(block: BlockSpec, p: Pass) -> Iterator[Kept]:
    """Yield the bytes that the block saves, each with the half of backward that frees them."""
    e, C, N = p.activation, block.mlp.size, p.tokens
    attention, heads = block.attention, block.attention.model.heads
    if p.recompute == "block":
        yield Kept(e * C * N, ATTENTION)
        yield Kept(output(attention, p), ATTENTION)
        return
    # A product saves its input: without a norm the stream itself, or its copy in FP8
    reads_stream = block.attention_norm is None
    if not (reads_stream and p.fp8_input):
        yield Kept(e * C * N, ATTENTION)
    yield Kept((p.fp8_input if reads_stream else p.fp8_input or e) * C * N, ATTENTION)
    yield Kept(of_norm(block.attention_norm, p), ATTENTION)
    # q, k, v, the output and the lse
    yield Kept(attention_saved(attention, p), ATTENTION)
    yield Kept(p.weight_copy * attention.linears[0].weights, ATTENTION)
    if attention.model.sinks and not p.backend.fuses_sinks:
        # The output that they scaled; their share, before and after masking, and the mask
        yield Kept((e * attention.query_size + (2 * FP32 + 1) * heads) * N, ATTENTION)
    yield from kept_after(block, p)


def of_norm(norm: Norm | None, p: Pass) -> int:
    """Return the bytes that a norm saves next to its input: 1 / rms, or mean and 1 / deviation. Of
    LayerNorm the input is in fp32, unless it is compiled.
    """
    if norm is None or norm.form == "rms":
        return 0 if norm is None else FP32 * p.tokens
    wider = 0 if p.is_compiled else FP32 - p.activation
    return (2 * FP32 + wider * norm.size) * p.tokens


def output(attention: AttentionSpec, p: Pass) -> float:
    """Return the bytes of the results of attention that recompute=block saves."""
    if isinstance(attention, MixerSpec):
        return p.activation * attention.query_size * p.tokens
    # Without a backward of its own the backend runs again, and makes the lse again
    lse = FP32 * attention.model.heads if p.backend.has_backward else 0
    return (p.activation * attention.query_size + lse) * p.tokens


def kept_after(block: BlockSpec, p: Pass) -> Iterator[Kept]:
    """Yield what the half after attention saves; one that recomputes makes it again by tile."""
    e, C, N = p.activation, block.mlp.size, p.tokens
    q, gate = block.attention.query_size, block.attention.gate_size
    # The stream after attention, which a parallel block has not, unless LayerNorm casts it again;
    # and copies of the weights before it
    of_attention = sum(linear.weights for linear in block.attention.linears[1:])
    again = of_norm(block.mlp_norm, p) > 2 * FP32 * N
    stream = 0 if (block.is_parallel and not again) or not block.mlp.inner else e * C * N
    yield Kept(stream + p.weight_copy * of_attention, ATTENTION)
    # Attention's output in FP8
    yield Kept(p.fp8_input * q * N, MLP)
    if gate:  # it, and the gated output; in FP8 that is counted, but the gate's input is not
        yield Kept((e * gate + (p.fp8_input * C or e * q)) * N, MLP)
    # The input of the MLP
    has_none = not block.mlp.inner or (block.shares_norm and not p.fp8_input)
    yield Kept(0 if has_none else (p.fp8_input or e) * C * N, MLP)
    yield Kept(of_norm(block.mlp_norm, p), ATTENTION)
    yield Kept(block.mlp.saved(p), MLP)
    if block.attention_out_norm is not None:  # its input is attention's projection
        # and the stream after it is saved too, by the next norm
        stream = 0 if block.mlp_norm is None else e * C * N
        yield Kept(of_norm(block.attention_out_norm, p) + stream, ATTENTION)
    if block.mlp_out_norm is not None:
        yield Kept(e * C * N, MLP)
        yield Kept(of_norm(block.mlp_out_norm, p), ATTENTION)


def mlp_backward(block: BlockSpec, p: Pass) -> float:
    """Return the bytes that the backward of the part after attention takes, at its peak."""
    e, C, q = p.activation, block.mlp.size, block.attention.query_size
    again = p.recompute != "none"
    n = p.tile if again else p.tokens
    tile = p._replace(tokens=n, weight_copy=0)
    # Incoming gradients, and those of normalized or scaled outputs; in FP8, transposed
    scaled = (block.mlp_out_norm is not None) + (block.branch_scale != 1)
    # Made again, the norm has read its input by then; and they are free unless a kernel reads them
    scaled = scaled * p.is_fused - (block.mlp_out_norm is not None) if again else scaled
    needed: float = e * C * p.tokens + scaled * e * C * n + p.fp8_input * C * n
    needed += block.mlp.backward(p._replace(tokens=n))
    if not again:
        return needed
    # What recompute=none keeps is made again of a tile, and the output
    needed += sum(part.bytes for part in kept_after(block, tile)) + e * C * n
    if block.attention.gate_size or block.shares_norm:  # the input of attention
        needed += e * C * n + of_norm(block.attention_norm, tile)
    needed += p.weight_copy * weights_after(block)
    if n < p.tokens or p.heads_at_once:
        # Attention's output has its gradient for all tokens; of the tile before sums are left
        sums = p.gradient * weights_after(block) * (n < p.tokens)
        needed += e * q * p.tokens + sums
        # Of a small tile the gradients of weights take most, the largest in 16 bits too
        largest = p.weight_copy * max(linear.weights for linear in block.mlp.linears)
        needed = max(needed, e * (C + q) * p.tokens + 2 * sums + largest)
    return needed


def attention_backward(block: BlockSpec, p: Pass) -> float:
    """Return the bytes of attention's backward next to what its kernel takes."""
    e, C = p.activation, block.mlp.size
    q, kv = block.attention.query_size, block.attention.key_size
    if isinstance(block.attention, MixerSpec):
        # Residual; the output's gradient; what the mixer saves, if it runs again, and its backward
        again = attention_saved(block.attention, p) if p.recompute == "block" else 0
        called = block.attention.softmax
        gradients = e * (called.query_size + 2 * called.key_size)
        gradients = gradients if block.attention.softmax_calls else 0
        own = gradients + block.attention.cost(e).backward
        return (e * (C + q) + own) * p.tokens + p.gradient * block.weights + again
    if p.heads_at_once:
        # Residual; do, in whose place dq comes; of a group q, k, v, the output, dq, dk, dv
        share, group = largest_group(block.attention, p), e * (3 * q + 4 * kv) * p.tokens
        needed = e * (C + q) * p.tokens + share * group
        # dk and dv of all heads come after the kernel of the first group, and stay next to that of
        # the second, which may be smaller
        kernel, less = attention_workspace(block.attention, p), share - min(share, 1 - share)
        both = 2 * e * kv * p.tokens * (share < 1)
        needed += max(0.0, both - kernel, both - less * (group + kernel / share))
        needed += p.gradient * weights_after(block)
        return needed + p.unpacked * block.attention.linears[0].weights
    # Residual; do, dq, dk, dv; gradients of the weights after attention
    needed = e * (C + 2 * q + 2 * kv) * p.tokens + p.gradient * weights_after(block)
    if block.is_parallel and p.recompute != "block":
        needed += e * C * p.tokens  # the gradient of the MLP's input, or of x by its norm
    needed += p.unpacked * block.attention.linears[0].weights
    if p.recompute == "block":
        needed += e * (q + 2 * kv) * p.tokens
        # With one tile the norm, and q and k before rotation too
        needed += e * (C + q + kv) * p.tokens if p.tile == p.tokens else 0
    elif block.attention.model.sinks and not p.backend.fuses_sinks:
        needed += e * q * p.tokens  # the gradient of the output before they scale it
    return needed


def forward(block: BlockSpec, p: Pass) -> float:
    """Return the bytes of a forward without gradients; p.tile tokens at a time in the MLP."""
    C, q = block.mlp.size, block.attention.query_size
    is_mixer = isinstance(block.attention, MixerSpec)  # not compiled; assume that it frees nothing
    p = p._replace(is_compiled=p.is_compiled and not is_mixer)
    # The sum with attention's branch; uncompiled, names hold the branch and the normed sum too
    stream = p.activation * ((2 * C + q) * p.tokens + (C if p.is_compiled else 3 * C) * p.tile)
    mixed = attention_saved(block.attention, p) if is_mixer else 0.0
    return stream + mixed + block.mlp.forward(p)


def attention_saved(part: AttentionSpec, p: Pass) -> float:
    """Return the bytes of q, k, v, the output and the lse that attention saves for backward."""
    if isinstance(part, MixerSpec):
        softmax = part.softmax_calls * attention_saved(part.softmax, p) if part.softmax_calls else 0
        return softmax + part.cost(p.activation).saved * p.tokens
    e, q, kv = p.activation, part.query_size, part.key_size
    # rotated q and k; v is a part of the projection's output, which is saved whole
    inputs = 2 * q + 3 * kv if p.backend.score_bytes is None else q + 2 * kv
    scores = part.model.heads * p.keys * of_score(part, p)
    return (e * (q + inputs) + FP32 * part.model.heads + scores) * p.tokens


def of_score(part: AttentionSpec, p: Pass) -> int:
    """Return the bytes that a score saves for backward, if scores are in memory."""
    if p.backend.score_bytes is None:
        return 0
    if p.is_compiled and p.recompute == "none":
        # raw scores and probabilities; the compiler computes the rest again
        return 2 * p.activation
    # masked scores, exp of them, probabilities; tanh of the scores
    return 2 * FP32 + p.activation + (0 if part.model.softcap is None else FP32)


def attention_workspace(part: AttentionSpec, p: Pass) -> float:
    """Return the bytes that attention's backward takes besides its inputs and outputs."""
    if isinstance(part, MixerSpec):
        whole = p._replace(head_parts=1, heads_at_once=0)
        return attention_workspace(part.softmax, whole) if part.softmax_calls else 0
    tokens = p.tokens * largest_group(part, p)  # a group takes as much as all heads of fewer tokens
    e, q, heads = p.activation, part.query_size, part.model.heads
    if p.backend.score_bytes is not None:
        # else probabilities make room for a part
        each = FP32 if p.is_compiled else 2 * FP32 + e
        each = of_score(part, p) + e + 2 * FP32 if p.recompute == "block" else each
        return each * heads * tokens * p.keys
    lse_and_delta = 2 * FP32 * heads
    if p.backend.kernels:  # as if every GPU were a Hopper: on others it may be a sum of dq too much
        is_summed = p.on_gpu and kernel_on("hopper", part, p) == "hopper"
        sums_of_dq = FP32 * heads * hopper_size(part.model.head_size) if is_summed else 0
        return lse_and_delta * tokens + sums_of_dq * tokens / p.head_parts
    again = e * q if p.recompute == "block" else 0
    # dk and dv of every query head, before they are summed
    repeated = 2 * e * q if heads != part.model.kv_heads else 0
    return (lse_and_delta + FP32 * q + repeated + again) * tokens


def largest_group(part: AttentionSpec, p: Pass) -> float:
    """Return the share of the heads that the first of `heads_at_once` groups has."""
    heads: int = part.model.kv_heads
    return min(p.heads_at_once or heads, heads) / heads


def kernel_on(generation: str, part: AttentionSpec, p: Pass) -> str:
    """Return the kernel that a GPU of this `generation` runs, as rates.toml names it."""
    if not p.backend.kernels:
        return "fused"
    own = p.backend.kernels.get(f"triton-{generation}")
    is_taken = own is not None and own.takes(p.activation, part.model.head_size)
    asked = p.options.get("kernel", "auto")
    return generation if (is_taken if asked == "auto" else asked == generation) else "portable"


def weights_after(block: BlockSpec) -> int:
    """Count the weights of the linear layers after attention."""
    return block.weights - block.attention.linears[0].weights
