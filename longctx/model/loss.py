"""Cross-entropy of the lm_head in chunks of tokens: all logits of a batch never exist at once.

For a token with hidden state h and target t:

    z = W h,  p = softmax(z),  loss = -log p[t],  dz = p - onehot(t),  dh = Wᵀ dz,  dW = Σ dz hᵀ

All of it needs z, so the gradients are computed in forward, while a chunk's z is there, and z is
never computed twice (as in Liger Kernel, arXiv 2410.10989). Backward only multiplies them with the
incoming gradient, a scalar. dW is accumulated in fp32 over the chunks; matmuls run in the dtype of
the inputs, or in autocast's.

The loss of each token alone has a gradient g per token, known in backward only: an objective may
weigh a token by the log-probability of its whole document. Then backward computes z once more, and

    dh = g (Wᵀ dz),  dW = Σ dz (g h)ᵀ

Logits may have a factor s and a cap c: z = c tanh(s W h / c), and then dz is multiplied by
s (1 - (z / c)²) on its way to h and W.

A z-loss adds a · lse² to each token's, lse = log Σ exp(z), so that lse stays near 0 (PaLM, arXiv
2204.02311). Only gradients have it: dz = (1 + 2 a lse) p - onehot(t); the loss stays as it is.

On a GPU one kernel makes dz of a chunk's z in place (elementwise/cross_entropy.py). There logits
with a gradient are rounded to 16 bits, as F.linear and F.cross_entropy would; those of an
evaluation stay in fp32.

Shapes: N tokens, C channels, V tokens in the vocabulary.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from longctx.config.layout_config import tile_size
from longctx.kernels import HAS_TRITON

if HAS_TRITON:
    from longctx.kernels import cross_entropy

IGNORED = -100
Shape = tuple[float, float | None]  # factor and softcap of logits


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
    others; its backward computes the logits again. With `scale`, a scalar on the device, a sum
    or mean is multiplied by it before anything is rounded to bf16. Gradients can be taken once
    per loss; sum and mean add `z_loss` to them. Raises ValueError for another `reduction`.
    """
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"reduction={reduction!r} must be 'mean', 'sum' or 'none'")
    flat, t = hidden.reshape(-1, hidden.shape[-1]), targets.reshape(-1)
    shape = logit_scale, softcap
    if reduction == "none":
        return _TokenLosses.apply(flat, weight, t, chunk, shape).view(targets.shape)
    wide = torch.promote_types(hidden.dtype, torch.float32)
    scale = torch.ones((), dtype=wide, device=t.device) if scale is None else scale.to(wide)
    if reduction == "mean":
        scale = scale / (t != IGNORED).sum().clamp(min=1)
    if torch.is_grad_enabled():
        return _SummedLoss.apply(flat, weight, t, scale, chunk, shape, z_loss)
    return _Chunks(flat, weight, shape).losses(t, chunk).sum() * scale


class _SummedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        scale: Tensor,
        chunk: int,
        shape: Shape,
        z_loss: ZLoss | None,
    ) -> Tensor:
        # A GradScaler multiplies in backward. Before, fp16 would round a mean's gradients to 0
        is_late = dtype_of(hidden) == torch.float16
        early, ctx.late = (None, scale) if is_late else (scale, None)
        chunks = _Chunks(hidden, weight, shape, early, *ctx.needs_input_grad[:2])
        if z_loss is not None:
            chunks.z_loss = z_loss.factor
            chunks.squares = torch.zeros(targets.shape, dtype=scale.dtype, device=targets.device)
        total = chunks.losses(targets, chunk).sum() * scale
        if z_loss is not None and chunks.squares is not None:
            z_loss.mean = chunks.squares.sum() / (targets != IGNORED).sum().clamp(min=1)
        ctx.gradients = chunks.dh, chunks.dw
        ctx.dtypes = hidden.dtype, weight.dtype
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        _refuse_second_derivatives()
        assert ctx.gradients is not None, "the gradients of this loss were already taken"
        (dh, dw), ctx.gradients = ctx.gradients, None
        grad = grad if ctx.late is None else grad * ctx.late
        dh = None if dh is None else _times(dh.to(ctx.dtypes[0]), grad)
        dw = None if dw is None else _times(dw, grad).to(ctx.dtypes[1])
        return dh, dw, None, None, None, None, None


class _TokenLosses(torch.autograd.Function):
    """-log p of each target (N,), from which objectives of whole documents are made."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, chunk: int, shape: Shape
    ) -> Tensor:
        ctx.save_for_backward(hidden, weight, targets)
        ctx.chunk, ctx.shape = chunk, shape
        device = hidden.device.type  # backward runs outside of autocast
        enabled = torch.is_autocast_enabled(device)
        ctx.autocast = torch.autocast(device, torch.get_autocast_dtype(device), enabled)
        return _Chunks(hidden, weight, shape).losses(targets, chunk)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        _refuse_second_derivatives()
        hidden, weight, targets = ctx.saved_tensors
        with ctx.autocast:
            chunks = _Chunks(hidden, weight, ctx.shape, None, *ctx.needs_input_grad[:2])
            chunks.losses(targets, ctx.chunk, grad)
        dh = None if chunks.dh is None else chunks.dh.to(hidden.dtype)
        dw = None if chunks.dw is None else chunks.dw.to(weight.dtype)
        return dh, dw, None, None, None


def _refuse_second_derivatives() -> None:
    """Raise RuntimeError in a backward with create_graph=True: its result would be a constant."""
    # once_differentiable refuses only if the loss's own gradient is differentiated too
    if torch.is_grad_enabled():
        raise RuntimeError(
            "this loss supports first derivatives only; for create_graph=True take "
            "torch.nn.functional.cross_entropy of the logits, model(tokens)"
        )


def dtype_of(hidden: Tensor) -> torch.dtype:
    """Return the dtype of the products: that of `hidden`, or autocast's."""
    is_cast = torch.is_autocast_enabled(hidden.device.type) and hidden.dtype != torch.float64
    return torch.get_autocast_dtype(hidden.device.type) if is_cast else hidden.dtype


def _times(x: Tensor, by: Tensor) -> Tensor:
    """x times a scalar, in place."""
    if not fused(x.device, x.dtype):
        return x.mul_(by)
    return cross_entropy.multiply_(x, by)


def shaped(z: Tensor, scale: float, softcap: float | None) -> Tensor:
    """Return the logits z times `scale`, then capped; z itself may be overwritten."""
    if scale != 1:
        z = z.mul_(scale)
    if softcap is None:
        return z
    z = z.div_(softcap).tanh_()
    # The gradient of tanh needs its value
    return z * softcap if torch.is_grad_enabled() else z.mul_(softcap)


def fused(device: torch.device, dtype: torch.dtype) -> bool:
    """Return True if the kernel serves such logits: on a GPU, or in Triton's interpreter."""
    on = device.type != "cpu" or os.environ.get("TRITON_INTERPRET") == "1"
    return on and dtype != torch.float64 and HAS_TRITON


class _Chunks:
    """Losses chunk by chunk, with the gradients of `scale` · their sum if they are needed.

    The gradients are `dh` (N, C) and `dw` (V, C).
    """

    def __init__(
        self,
        hidden: Tensor,
        weight: Tensor,
        shape: Shape,
        scale: Tensor | None = None,
        need_dh: bool = False,
        need_dw: bool = False,
    ) -> None:
        dtype = dtype_of(hidden)
        self.hidden, self.weight = hidden, weight.to(dtype)
        self.dtype, self.accumulate = dtype, torch.promote_types(dtype, torch.float32)
        self.logit_scale, self.softcap = shape
        one = torch.ones((), dtype=self.accumulate, device=hidden.device)
        self.scale = one if scale is None else scale
        # dz is that of scaled logits, so dh and dW have the factor once more
        if self.logit_scale != 1:
            self.scale = self.scale * self.logit_scale
        self.dh = torch.empty_like(hidden, dtype=dtype) if need_dh else None
        self.dw = torch.empty_like(weight, dtype=self.accumulate) if need_dw else None
        self.z_loss = 0.0
        self.squares: Tensor | None = None  # (N,) lse² of target tokens, if there is a z-loss
        # True if dw is the sum of earlier chunks: the first one overwrites memory that nobody set
        self.begun = False
        # Logits of a chunk; all chunks share the memory
        self.z: Tensor | None = None

    def losses(self, targets: Tensor, chunk: int, grad: Tensor | None = None) -> Tensor:
        """(N,) loss of each token, with the logits of at most `chunk` tokens at one time.

        `grad` (N,) weighs each token in the gradients.
        """
        losses = torch.empty(targets.shape, dtype=self.accumulate, device=self.hidden.device)
        size = tile_size(len(targets), chunk)
        gradients_of = self._fused if fused(self.hidden.device, self.dtype) else self._plain
        for start in range(0, len(targets), size):
            rows = slice(start, start + size)
            # (n, C); an ignored token adds nothing to dW
            is_ignored = targets[rows, None] == IGNORED
            h = self.hidden[rows].to(self.dtype).masked_fill(is_ignored, 0)
            dz = gradients_of(h, targets[rows], losses[rows], rows, size)
            own = None if grad is None else grad[rows, None]
            if dz is not None and self.dh is not None:
                torch.mm(dz, self.weight, out=self.dh[rows])
                if own is not None:
                    self.dh[rows].mul_(own)
            if dz is not None and self.dw is not None:
                self._add_to_dw(dz, h if own is None else (h * own).to(h.dtype))
        return losses

    def _plain(
        self, h: Tensor, targets: Tensor, losses: Tensor, rows: slice, _: int
    ) -> Tensor | None:
        """Write the losses of the tokens `rows` and return dz, if it is needed, by torch."""
        ignored = targets[:, None] == IGNORED
        t = targets[:, None].masked_fill(ignored, 0)
        z = self._logits(h)  # (n, V)
        logp = z.log_softmax(dim=-1)
        loss = -logp.gather(1, t)
        # loss = lse - z[t], so lse costs no second pass over V
        lse = z.gather(1, t) + loss
        slope = self._slope_(z)
        del z
        losses.copy_(loss.masked_fill(ignored, 0).squeeze(1))
        if self.dh is None and self.dw is None:
            return None
        # p[t] - 1 by expm1: for p[t] near 1 the difference would round to 0
        dz, dz_t = logp.exp_(), torch.expm1(-loss)
        if self.squares is not None:
            self.squares[rows] = lse.square().masked_fill(ignored, 0).squeeze(1)
            growth = 2 * self.z_loss * lse
            dz, dz_t = dz.mul_(1 + growth), dz_t + growth * torch.exp(-loss)
        dz = dz.scatter_(1, t, dz_t).mul_(self.scale).masked_fill_(ignored, 0)
        return (dz if slope is None else dz.mul_(slope)).to(self.dtype)

    def _fused(
        self, h: Tensor, targets: Tensor, losses: Tensor, rows: slice, size: int
    ) -> Tensor | None:
        """As `_plain`, by the kernel; chunks have `size` tokens at most."""
        if self.dh is None and self.dw is None:
            cross_entropy.cross_entropy_(self._logits(h), targets, losses, scale=None)
            return None
        if self.z is None:
            self.z = torch.empty(size, self.weight.shape[0], dtype=self.dtype, device=h.device)
        z, slope = self.z[: len(h)], None
        if self.logit_scale == 1:
            torch.mm(h, self.weight.t(), out=z)
        else:  # before anything is rounded
            torch.addmm(z, h, self.weight.t(), beta=0, alpha=self.logit_scale, out=z)
        if self.softcap is not None:
            wide = shaped(z.to(self.accumulate, copy=True), 1.0, self.softcap)
            z.copy_(wide)
            slope = self._slope_(wide)
        squares = None if self.squares is None else self.squares[rows]
        cross_entropy.cross_entropy_(z, targets, losses, self.scale, self.z_loss, squares)
        return z if slope is None else z.mul_(slope)

    def _logits(self, h: Tensor) -> Tensor:
        if h.is_cuda and self.dtype != self.accumulate:
            # The matmul's fp32 sums as they are, never rounded to 16 bits.
            z = torch.mm(h, self.weight.t(), out_dtype=self.accumulate)
        else:
            z = (h @ self.weight.t()).to(self.accumulate)
        return shaped(z, self.logit_scale, self.softcap)

    def _slope_(self, z: Tensor) -> Tensor | None:
        """Return the cap's derivative at capped logits z, in their memory; None: no cap."""
        if self.softcap is None:
            return None
        return z.div_(self.softcap).square_().neg_().add_(1)

    def _add_to_dw(self, dz: Tensor, h: Tensor) -> None:
        """dw += dzᵀ h, or dw = dzᵀ h with the first chunk."""
        assert self.dw is not None
        wide = {"out_dtype": self.accumulate} if h.is_cuda and self.dtype != self.accumulate else {}
        if not wide and self.dtype != self.accumulate:
            part = dz.t() @ h
            self.dw = self.dw.add_(part) if self.begun else self.dw.copy_(part)
        elif self.begun:
            torch.addmm(self.dw, dz.t(), h, **wide, out=self.dw)  # type: ignore[call-overload]
        else:
            torch.mm(dz.t(), h, **wide, out=self.dw)
        self.begun = True
