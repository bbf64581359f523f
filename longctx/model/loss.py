"""Cross-entropy of the lm_head in chunks of tokens: all logits of a batch never exist at once.

For a token with hidden state h and target t:

    z = W h,  p = softmax(z),  loss = -log p[t],  dz = p - onehot(t),  dh = Wᵀ dz,  dW = Σ dz hᵀ

All of it needs z, so forward computes the gradients while a chunk's z is there (as in Liger Kernel,
arXiv 2410.10989). Backward only multiplies them with the incoming gradient, a scalar. dW is
accumulated in fp32 over the chunks; matmuls run in the dtype of the inputs, or in autocast's.

The loss of each token alone has a gradient g per token, known in backward only, as objectives of
whole documents do. Then backward computes z once more, and

    dh = g (Wᵀ dz),  dW = Σ dz (g h)ᵀ

Logits may have a factor s and a cap c: z = c tanh(s W h / c), and then dz is multiplied by
s (1 - (z / c)²) on its way to h and W.

A z-loss adds a · lse² to each token's, lse = log Σ exp(z), so that lse stays near 0 (PaLM, arXiv
2204.02311). Only gradients have it: dz = (1 + 2 a lse) p - onehot(t); the loss stays as it is.

On a GPU one kernel makes dz of a chunk's z in place. There logits with a gradient are rounded to 16
bits, as F.linear and F.cross_entropy would; those of an evaluation stay in fp32.

Shapes: N tokens, C channels, V tokens in the vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from longctx.config.layout_config import tile_size
from longctx.kernels import HAS_TRITON
from longctx.model.layers import FLOATS, fused

if HAS_TRITON:
    from longctx.kernels import cross_entropy

IGNORED = -100


class Logits(NamedTuple):
    """How logits are made: of so many tokens at one time, with this factor, then capped."""

    chunk: int
    scale: float
    softcap: float | None
    dtype: torch.dtype  # of the products
    z_loss: ZLoss | None = None  # of gradients alone


@dataclass
class ZLoss:
    """The factor a of a z-loss, and the last loss's mean of lse² over its target tokens."""

    factor: float
    mean: Tensor | None = None


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    chunk: int,
    reduction: str = "mean",
    scale: Tensor | None = None,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    z_loss: ZLoss | None = None,
) -> Tensor:
    """Return the loss of the logits hidden (..., C) @ weight (V, C)ᵀ against targets (...).

    A target of -100 is not scored. Logits are multiplied by `logit_scale`, then capped:
    softcap · tanh(z / softcap).

    It is fp32, or fp64 for fp64 inputs. "mean" is over the scored tokens and "sum" over all; if no
    token is scored both are 0 with zero gradients. "none" gives -log p of each scored token, 0 for
    others; its backward computes the logits again. With `scale`, a scalar on the device, a sum or
    mean is multiplied by it before anything is rounded to bf16; both add `z_loss` to gradients.
    """
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"reduction={reduction!r} must be 'mean', 'sum' or 'none'")
    flat, wanted = hidden.reshape(-1, hidden.shape[-1]), targets.reshape(-1)
    device, dtype = hidden.device.type, hidden.dtype
    if torch.is_autocast_enabled(device) and dtype != torch.float64:
        dtype = torch.get_autocast_dtype(device)
    logits = Logits(chunk, logit_scale, softcap, dtype)
    if reduction == "none":
        return _TokenLosses.apply(flat, weight, wanted, logits).view(targets.shape)
    wide = torch.promote_types(hidden.dtype, torch.float32)
    scale = torch.ones((), dtype=wide, device=wanted.device) if scale is None else scale.to(wide)
    if reduction == "mean":
        scale = scale / (wanted != IGNORED).sum().clamp(min=1)
    if torch.is_grad_enabled():
        return _SummedLoss.apply(flat, weight, wanted, scale, logits._replace(z_loss=z_loss))
    return _in_chunks(flat, weight, wanted, logits)[0].sum() * scale


class _SummedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, scale: Tensor, logits: Logits
    ) -> Tensor:
        # A GradScaler multiplies in backward. Before, fp16 would round a mean's gradients to 0
        is_late = logits.dtype == torch.float16
        early, ctx.late = (None, scale) if is_late else (scale, None)
        needs = ctx.needs_input_grad[:2]
        losses, *ctx.gradients = _in_chunks(hidden, weight, targets, logits, needs, early)
        ctx.dtypes = hidden.dtype, weight.dtype
        return losses.sum() * scale

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        _refuse_second_derivatives()
        assert ctx.gradients is not None, "the gradients of this loss were already taken"
        (dh, dw), ctx.gradients = ctx.gradients, None
        grad = grad if ctx.late is None else grad * ctx.late
        dh = None if dh is None else _times(dh.to(ctx.dtypes[0]), grad)
        dw = None if dw is None else _times(dw, grad).to(ctx.dtypes[1])
        return dh, dw, None, None, None


class _TokenLosses(torch.autograd.Function):
    """-log p of each target (N,), from which objectives of whole documents are made."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, logits: Logits
    ) -> Tensor:
        ctx.save_for_backward(hidden, weight, targets)
        ctx.logits = logits
        return _in_chunks(hidden, weight, targets, logits)[0]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        _refuse_second_derivatives()
        hidden, weight, targets = ctx.saved_tensors
        needs = ctx.needs_input_grad[:2]
        _, dh, dw = _in_chunks(hidden, weight, targets, ctx.logits, needs, grad=grad)
        dh = None if dh is None else dh.to(hidden.dtype)
        return dh, None if dw is None else dw.to(weight.dtype), None, None


def _refuse_second_derivatives() -> None:
    """Raise RuntimeError in a backward with create_graph=True: its result would be a constant."""
    # once_differentiable refuses only if the loss's own gradient is differentiated too
    if torch.is_grad_enabled():
        remedy = "torch.nn.functional.cross_entropy of the logits, model(tokens)"
        raise RuntimeError(f"a loss of first derivatives only; for create_graph=True take {remedy}")


def _times(x: Tensor, by: Tensor) -> Tensor:
    return cross_entropy.multiply_(x, by) if fused(x, FLOATS) else x.mul_(by)


def shaped(z: Tensor, scale: float, softcap: float | None) -> Tensor:
    """Return the logits z times `scale`, then capped; z itself may be overwritten."""
    if scale != 1:
        z = z.mul_(scale)
    if softcap is None:
        return z
    z = z.div_(softcap).tanh_()
    # The gradient of tanh needs its value
    return z * softcap if torch.is_grad_enabled() else z.mul_(softcap)


def _in_chunks(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    logits: Logits,
    needs: Sequence[bool] = (False, False),
    scale: Tensor | None = None,
    grad: Tensor | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return the loss (N,) of each token, and dh (N, C) and dw (V, C) if it `needs` them: gradients
    of `scale` · the sum of losses and the z-loss, each times its `grad` (N,).
    """
    dtype, device, z_loss = logits.dtype, hidden.device, logits.z_loss
    wide, weight = torch.promote_types(dtype, torch.float32), weight.to(dtype)
    dh = torch.empty_like(hidden, dtype=dtype) if needs[0] else None
    dw = torch.zeros_like(weight, dtype=wide) if needs[1] else None
    losses = torch.empty(targets.shape, dtype=wide, device=device)
    squares = None if z_loss is None else torch.zeros_like(losses)  # lse² of target tokens
    scale = torch.ones((), dtype=wide, device=device) if scale is None else scale
    # dz is that of scaled logits, so dh and dW have the factor once more
    by = (scale if logits.scale == 1 else scale * logits.scale) if any(needs) else None
    is_fused, size = fused(hidden, FLOATS), tile_size(len(targets), logits.chunk)
    entropy = cross_entropy.cross_entropy_ if is_fused else cross_entropy_
    # With gradients the kernel's logits are rounded; all chunks share their memory
    shared = hidden.new_empty(size, len(weight), dtype=dtype) if is_fused and any(needs) else None
    # The matmul's fp32 sums as they are, never rounded to 16 bits
    exact: Any = {"out_dtype": wide} if hidden.is_cuda and dtype != wide else {}

    for start in range(0, len(targets), size):
        z = capped = slope = dz = None  # frees those of the chunk before
        rows = slice(start, start + size)
        # (n, C); an ignored token adds nothing to dW
        h = hidden[rows].to(dtype).masked_fill(targets[rows, None] == IGNORED, 0)
        if shared is None:
            z = torch.mm(h, weight.t(), **exact).to(wide)
            z = capped = shaped(z, logits.scale, logits.softcap)
        else:  # scaled before anything is rounded
            z = capped = shared[: len(h)]
            torch.addmm(z, h, weight.t(), beta=0, alpha=logits.scale, out=z)
            if logits.softcap is not None:
                capped = shaped(z.to(wide, copy=True), 1.0, logits.softcap)
                z.copy_(capped)
        if logits.softcap is not None and by is not None:
            slope = 1 - (capped / logits.softcap).square_()
        extra: Any = () if z_loss is None or squares is None else (z_loss.factor, squares[rows])
        entropy(z, targets[rows], losses[rows], by, *extra)
        if by is None:
            continue
        dz = (z if slope is None else z.mul_(slope)).to(dtype)
        own = None if grad is None else grad[rows, None]
        if dh is not None:
            torch.mm(dz, weight, out=dh[rows])
            if own is not None:
                dh[rows].mul_(own)
        if dw is not None:
            h = h if own is None else (h * own).to(dtype)
            if exact or dtype == wide:
                torch.addmm(dw, dz.t(), h, **exact, out=dw)
            else:
                dw += dz.t() @ h
    if z_loss is not None and squares is not None:
        z_loss.mean = squares.sum() / (targets != IGNORED).sum().clamp(min=1)
    return losses, dh, dw


def cross_entropy_(
    z: Tensor,
    targets: Tensor,
    losses: Tensor,
    scale: Tensor | None,
    z_loss: float = 0.0,
    squares: Tensor | None = None,
) -> None:
    """Write losses, and gradients over the logits, as the kernel of that name does."""
    logp = z.log_softmax(dim=-1)
    losses.copy_(F.nll_loss(logp, targets, reduction="none", ignore_index=IGNORED))
    if scale is None:
        return
    ignored, loss = targets[:, None] == IGNORED, losses[:, None]
    t = targets[:, None].masked_fill(ignored, 0)
    # p[t] - 1 by expm1: for p[t] near 1 the difference would round to 0
    growth, dz_t = None, torch.expm1(-loss)
    if squares is not None:
        # loss = lse - z[t], so lse costs no second pass over V
        lse = z.gather(1, t) + loss
        squares.copy_(lse.square().masked_fill(ignored, 0)[:, 0])
        growth = 2 * z_loss * lse
        dz_t = dz_t + growth * torch.exp(-loss)
    torch.exp(logp, out=z)
    if growth is not None:
        z.mul_(1 + growth)
    z.scatter_(1, t, dz_t).mul_(scale).masked_fill_(ignored, 0)
