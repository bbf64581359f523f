"""RMSNorm of a stream and its backward (arXiv 1910.07467), one pass over the rows each way, with
what else happens to the stream there.

    x = stream + branch,   r = 1 / sqrt(mean(x²) + eps),   y = x r w
    dx = past + r (w dy - x r mean(w dy x r)),   dw = Σ dy x r

x goes on past the norm: forward adds a branch's output to the stream on its way, and backward the
gradient `past` of what went on. A program of backward walks over many rows and keeps its share of
dw; the shares are added up in one order. Arithmetic is fp32, whatever is stored.

Shapes: N rows, C channels.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def rms_norm_kernel(
    x,
    branch,
    weight,
    total,
    y,
    r,
    N,
    C,
    eps,
    ADD: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row, c = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK)
    at, inside = row[:, None] * C + c[None, :], (row < N)[:, None] & (c < C)[None, :]
    w = tl.load(weight + c, mask=c < C, other=0.0).to(tl.float32)
    a = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        rounded = (a + tl.load(branch + at, mask=inside, other=0.0).to(tl.float32)).to(
            total.dtype.element_ty
        )
        tl.store(total + at, rounded, mask=inside)
        a = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(a * a, 1) / C + eps)
    tl.store(r + row, scale, mask=row < N)
    tl.store(y + at, (a * scale[:, None] * w[None, :]).to(y.dtype.element_ty), mask=inside)


@triton.jit
def rms_norm_backward_kernel(
    dy,
    x,
    r,
    weight,
    past,
    dx,
    dw,
    N,
    C,
    PAST: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):
    """`dw` (programs, C): the sum of this program's rows. With STAGES the next rows are on their
    way.
    """
    program, programs, c = tl.program_id(0), tl.num_programs(0), tl.arange(0, BLOCK)
    w = tl.load(weight + c, mask=c < C, other=0.0).to(tl.float32)
    share = tl.zeros([ROWS, BLOCK], tl.float32)
    for start in tl.range(program * ROWS, N, programs * ROWS, num_stages=STAGES):
        row = start + tl.arange(0, ROWS).to(tl.int64)
        at, inside = row[:, None] * C + c[None, :], (row < N)[:, None] & (c < C)[None, :]
        scale = tl.load(r + row, mask=row < N, other=0.0)[:, None]
        g = tl.load(dy + at, mask=inside, other=0.0).to(tl.float32)
        normed = tl.load(x + at, mask=inside, other=0.0).to(tl.float32) * scale
        wg = g * w[None, :]
        d = scale * (wg - normed * (tl.sum(wg * normed, 1) / C)[:, None])
        if PAST:
            d += tl.load(past + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(dx + at, d.to(dx.dtype.element_ty), mask=inside)
        share += g * normed
    tl.store(dw + program.to(tl.int64) * C + c, tl.sum(share, 0), mask=c < C)


def launch(C: int) -> tuple[int, int, int, int]:
    """Rows of a tile, its width, warps, and programs of backward on a multiprocessor."""
    block = triton.next_power_of_2(C)
    return max(1, 1024 // block), block, min(8, max(4, block // 256)), 8 if block <= 1024 else 2


def stages(block: int) -> int:
    """Of backward's loop; rows wider than 8,192 channels would not fit into the shared memory of
    every GPU more than once.
    """
    return 3 if block <= 8192 else 1


@torch.library.custom_op("longctx::rms_norm", mutates_args=())
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """y (N, C) and r (N,) of x (N, C), contiguous."""
    y, r = torch.empty_like(x), x.new_empty(x.shape[0], dtype=torch.float32)
    _run(x, None, weight, None, y, r, eps)
    return y, r


@torch.library.custom_op("longctx::add_rms_norm", mutates_args=())
def add_rms_norm(
    stream: Tensor, branch: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """x, y (N, C) and r (N,) of a stream and a branch (N, C), contiguous."""
    x, y, r = (
        torch.empty_like(stream),
        torch.empty_like(stream),
        stream.new_empty(stream.shape[0], dtype=torch.float32),
    )
    _run(stream, branch, weight, x, y, r, eps)
    return x, y, r


def _run(
    x: Tensor,
    branch: Tensor | None,
    weight: Tensor,
    total: Tensor | None,
    y: Tensor,
    r: Tensor,
    eps: float,
) -> None:
    (N, C), (rows, block, warps, _) = x.shape, launch(x.shape[1])
    with torch.cuda.device_of(x):
        rms_norm_kernel[(triton.cdiv(N, rows),)](
            x,
            branch,
            weight,
            total,
            y,
            r,
            N,
            C,
            eps,
            branch is not None,
            rows,
            block,
            num_warps=warps,
        )


@torch.library.custom_op("longctx::rms_norm_backward", mutates_args=())
def rms_norm_backward(
    dy: Tensor, x: Tensor, r: Tensor, weight: Tensor, past: Tensor | None
) -> tuple[Tensor, Tensor]:
    """dx (N, C) and dw (C,), that in fp32, for the gradients dy of y and `past` of x; all
    contiguous.
    """
    (N, C), (rows, block, warps, each) = x.shape, launch(x.shape[1])
    processors = (
        torch.cuda.get_device_properties(x.device).multi_processor_count if x.is_cuda else 1
    )
    programs = max(1, min(each * processors, triton.cdiv(N, rows)))
    dx, dw = torch.empty_like(x), x.new_empty(programs, C, dtype=torch.float32)
    with torch.cuda.device_of(x):
        rms_norm_backward_kernel[(programs,)](
            dy,
            x,
            r,
            weight,
            past,
            dx,
            dw,
            N,
            C,
            past is not None,
            rows,
            block,
            stages(block),
            num_warps=warps,
        )
    return dx, dw.sum(0)


@rms_norm.register_fake
def _(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), x.new_empty(x.shape[0], dtype=torch.float32)


@add_rms_norm.register_fake
def _(stream: Tensor, branch: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    return (
        torch.empty_like(stream),
        torch.empty_like(stream),
        stream.new_empty(stream.shape[0], dtype=torch.float32),
    )


@rms_norm_backward.register_fake
def _(
    dy: Tensor, x: Tensor, r: Tensor, weight: Tensor, past: Tensor | None
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), x.new_empty(x.shape[1], dtype=torch.float32)


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, stream: Tensor, branch: Tensor | None, weight: Tensor, eps: float, onward: bool
    ) -> tuple[Tensor, Tensor] | Tensor:
        if branch is None:
            x = stream
            y, r = rms_norm(x, weight, eps)
        else:
            x, y, r = add_rms_norm(stream, branch, weight, eps)
        ctx.save_for_backward(x, r, weight)
        ctx.added, ctx.onward = branch is not None, onward
        ctx.set_materialize_grads(False)
        return (x, y) if onward else y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        past, dy = gradients if ctx.onward else (None, *gradients)
        x, r, weight = ctx.saved_tensors
        if dy is None:
            return past, past if ctx.added else None, None, None, None
        dx, dw = rms_norm_backward(
            dy.contiguous(), x, r, weight, None if past is None else past.contiguous()
        )
        return (
            dx,
            dx if ctx.added else None,
            dw.to(weight.dtype) if ctx.needs_input_grad[2] else None,
            None,
            None,
        )


def add_and_norm(
    stream: Tensor, branch: Tensor | None, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """x = stream + branch, or the stream where there is none, and its norm; both (..., C), weight
    (C,).
    """
    shape = stream.shape
    flat = [None if t is None else t.reshape(-1, shape[-1]).contiguous() for t in (stream, branch)]
    x, y = _Norm.apply(*flat, weight, eps, True)
    return x.view(shape), y.view(shape)


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The norm of x (..., C) alone, weight (C,): nothing goes on past it."""
    y: Tensor = _Norm.apply(x.reshape(-1, x.shape[-1]).contiguous(), None, weight, eps, False)
    return y.view(x.shape)
