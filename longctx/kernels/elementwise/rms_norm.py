"""RMSNorm of the residual (arXiv 1910.07467) with the additions around it, one pass each way.

    x = residual + branch,   r = 1 / sqrt(mean(x²) + eps),   y = x r w
    dx = dresidual + r (w dy - x r mean(w dy x r)),   dw = Σ dy x r

x is also the residual of the next branch: forward adds the output of a branch to it, and backward
adds `dresidual`, the gradient of x that does not come through the norm. A program of backward loops
over many rows and keeps its share of dw; the shares are added up in one order. Arithmetic is fp32,
whatever is stored.

Shapes: N rows, C channels.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from longctx.kernels.attention.launch import multiprocessors


@triton.jit
def rms_norm_kernel(
    residual, branch, weight, x, y, r, N, C, eps,  # (N, C); weight (C,), r (N,) fp32
    ADD: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute ROWS rows of y and r; with ADD also of x, which is the residual otherwise."""
    row, c = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK)
    at, inside = row[:, None] * C + c[None, :], (row < N)[:, None] & (c < C)[None, :]
    w = tl.load(weight + c, mask=c < C, other=0.0).to(tl.float32)
    # arithmetic is fp32, whatever is stored
    a = tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        a += tl.load(branch + at, mask=inside, other=0.0).to(tl.float32)
        # the norm is of x as stored, so that backward finds the same numbers
        rounded = a.to(x.dtype.element_ty)
        tl.store(x + at, rounded, mask=inside)
        a = rounded.to(tl.float32)
    # r is saved: backward needs no second sum of squares
    scale = tl.rsqrt(tl.sum(a * a, 1) / C + eps)
    tl.store(r + row, scale, mask=row < N)
    tl.store(y + at, (a * scale[:, None] * w[None, :]).to(y.dtype.element_ty), mask=inside)


@triton.jit
def rms_norm_backward_kernel(
    dy, x, r, weight, dresidual, dx, dw, N, C,  # (N, C); r (N,), weight (C,), dw (programs, C)
    ADD: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Compute dx, and dw (programs, C) over this program's rows; with ADD dresidual counts."""
    program, programs, c = tl.program_id(0), tl.num_programs(0), tl.arange(0, BLOCK)
    w = tl.load(weight + c, mask=c < C, other=0.0).to(tl.float32)
    # this program's share of dw stays in registers over all of its rows
    share = tl.zeros([ROWS, BLOCK], tl.float32)
    for start in tl.range(program * ROWS, N, programs * ROWS, num_stages=STAGES):
        row = start + tl.arange(0, ROWS).to(tl.int64)
        at, inside = row[:, None] * C + c[None, :], (row < N)[:, None] & (c < C)[None, :]
        scale = tl.load(r + row, mask=row < N, other=0.0)[:, None]
        g = tl.load(dy + at, mask=inside, other=0.0).to(tl.float32)
        # x r is computed again: reading x is cheaper than storing y
        normed = tl.load(x + at, mask=inside, other=0.0).to(tl.float32) * scale
        wg = g * w[None, :]
        d = scale * (wg - normed * (tl.sum(wg * normed, 1) / C)[:, None])
        if ADD:
            d += tl.load(dresidual + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(dx + at, d.to(dx.dtype.element_ty), mask=inside)
        share += g * normed
    # one row of dw per program; the host adds them up in one order
    tl.store(dw + program.to(tl.int64) * C + c, tl.sum(share, 0), mask=c < C)


def launch_config(C: int) -> tuple[int, int, int, int]:
    """Return rows of a tile, its width, warps, and programs of backward per multiprocessor."""
    block = triton.next_power_of_2(C)
    return max(1, 1024 // block), block, min(8, max(4, block // 256)), 8 if block <= 1024 else 2


def stages(block: int) -> int:
    """Return the stages of backward's loop."""
    # Rows of more than 8,192 numbers fit into the shared memory of some GPUs only once
    return 3 if block <= 8192 else 1


@torch.library.custom_op("longctx::rms_norm", mutates_args=())
def rms_norm(residual: Tensor, branch: Tensor | None, weight: Tensor, eps: float) -> list[Tensor]:
    """Return x and y (N, C) and r (N,) of a residual and a branch (N, C), contiguous; y and r alone
    if there is no branch.
    """
    N, C = residual.shape
    outputs = _outputs(residual, branch, weight, eps)
    # x may be the residual of the next branch, so it has its own memory
    x, y, r = outputs if branch is not None else (None, *outputs)
    rows, block, warps, _ = launch_config(C)
    with torch.cuda.device_of(residual):
        rms_norm_kernel[(triton.cdiv(N, rows),)](
            *(residual, branch, weight, x, y, r, N, C, eps, branch is not None, rows, block),
            num_warps=warps,
        )
    return outputs


@rms_norm.register_fake
def _outputs(residual: Tensor, branch: Tensor | None, weight: Tensor, eps: float) -> list[Tensor]:
    r = residual.new_empty(residual.shape[0], dtype=torch.float32)
    return [*(torch.empty_like(residual) for _ in range(1 + (branch is not None))), r]


@torch.library.custom_op("longctx::rms_norm_backward", mutates_args=())
def rms_norm_backward(
    dy: Tensor, x: Tensor, r: Tensor, weight: Tensor, dresidual: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return dx (N, C) and dw (C,) fp32 for dy, and dresidual from other uses of x.

    All are contiguous.
    """
    N, C = x.shape
    rows, block, warps, per_processor = launch_config(C)
    # 1 in the interpreter, so that a program of a small test has several rows too
    processors = multiprocessors(x.device) if x.is_cuda else 1
    programs = max(1, min(per_processor * processors, triton.cdiv(N, rows)))
    dx, dw = torch.empty_like(x), x.new_empty(programs, C, dtype=torch.float32)
    with torch.cuda.device_of(x):
        rms_norm_backward_kernel[(programs,)](
            dy, x, r, weight, dresidual, dx, dw, N, C,
            dresidual is not None, rows, block, stages(block), num_warps=warps,
        )  # fmt: skip
    return dx, dw.sum(0)


@rms_norm_backward.register_fake
def _(
    dy: Tensor, x: Tensor, r: Tensor, weight: Tensor, dresidual: Tensor | None
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), x.new_empty(x.shape[1], dtype=torch.float32)


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, residual: Tensor, branch: Tensor | None, weight: Tensor, eps: float, both: bool
    ) -> tuple[Tensor, Tensor] | Tensor:
        outputs = rms_norm(residual, branch, weight, eps)
        x, y, r = outputs if branch is not None else (residual, *outputs)
        ctx.save_for_backward(x, r, weight)
        ctx.added, ctx.both = branch is not None, both
        ctx.set_materialize_grads(False)
        return (x, y) if both else y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        # x may have no other use than the norm
        dresidual, dy = gradients if ctx.both else (None, *gradients)
        x, r, weight = ctx.saved_tensors
        if dy is None:
            return dresidual, dresidual if ctx.added else None, None, None, None
        dresidual = None if dresidual is None else dresidual.contiguous()
        dx, dw = rms_norm_backward(dy.contiguous(), x, r, weight, dresidual)
        dweight = dw.to(weight.dtype) if ctx.needs_input_grad[2] else None
        return dx, dx if ctx.added else None, dweight, None, None


def add_and_norm(
    residual: Tensor, branch: Tensor | None, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Return x = residual + branch, or the residual if there is no branch, and the norm of x.

    Tensors are (..., C), weight (C,).
    """
    C = residual.shape[-1]
    rows = [None if t is None else t.reshape(-1, C).contiguous() for t in (residual, branch)]
    x, y = _Norm.apply(*rows, weight, eps, True)
    return x.view(residual.shape), y.view(residual.shape)


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return the norm of x (..., C), weight (C,), if x is no residual too."""
    y: Tensor = _Norm.apply(x.reshape(-1, x.shape[-1]).contiguous(), None, weight, eps, False)
    return y.view(x.shape)
