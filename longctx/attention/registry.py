"""The registry of attention backends, and the one function that calls them.

A backend is a file of this package (or any module outside it) that registers an object with two
methods: `refusal` says why it cannot do what is asked, `run` does it. Nothing falls back: what was
asked for runs, or a ValueError says what to use instead.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, Protocol, overload

import torch
from torch import Tensor

from longctx.attention.mask import Mask


class Request(NamedTuple):
    """What a backend is asked to do, known before any tensor exists. `mask` None stands for any
    mask.
    """

    device: torch.device
    dtype: torch.dtype
    head_dim: int
    mask: Mask | None = None
    options: dict[str, Any] = {}
    deterministic: bool = False


class Backend(Protocol):
    """What `register` takes: one object per backend.

    It may also have `backward` (do, q, k, v, out, lse, mask, scale, **options) → dq, dk, dv; then
    recomputation in backward never runs its forward twice.
    """

    options: dict[str, tuple[Any, ...]]  # option name → its allowed values, the default first

    def refusal(self, request: Request) -> str | None:
        """Why this backend cannot serve the request (and what to use instead), or None."""

    @property
    def run(self) -> Callable[..., tuple[Tensor, Tensor, str]]:
        """A method (q, k, v, mask, scale, **options) → out (B, Tq, Hq, D), lse (B, Hq, Tq) float32,
        name of the kernel that ran.

        `mask` is bound, and q, k, v are contiguous in their last dimension.
        """

    # It may also have reproducible: dict[str, tuple[str, ...]], name of a kernel → which of "out",
    # "dq", "dk", "dv" have the same bits whenever that kernel runs on one machine. Their hashes
    # then stand in the kernel lock of a run.


_backends: dict[str, Backend] = {}
_ran: dict[str, str] = {}


def register(name: str, backend: Backend) -> None:
    """Make `backend` available as `attention(..., backend=name)`; raises ValueError if the name is
    taken.
    """
    if name in _backends and type(_backends[name]) is not type(backend):
        raise ValueError(f"attention backend {name!r} is already registered")
    _backends[name] = backend


@functools.cache
def load_backends() -> None:
    """Import every file of this package, so that each backend registers itself."""
    package = importlib.import_module("longctx.attention")
    for module in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"longctx.attention.{module.name}")


def backends() -> dict[str, str | None]:
    """Every registered backend: name → None if it runs on this machine, else the reason why not."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    return {name: b.refusal(Request(device, dtype, 64)) for name, b in sorted(_backends.items())}


def check(
    backend: str,
    *,
    device: torch.device | str,
    dtype: torch.dtype,
    head_dim: int,
    mask: Mask | None = None,
    options: dict[str, Any] | None = None,
    deterministic: bool = False,
) -> None:
    """Raise ValueError, saying what to use instead, if `backend` cannot serve such tensors here."""
    if backend not in _backends:
        raise ValueError(
            f"attention={backend} is not a backend; choose one of {', '.join(sorted(_backends))}"
        )
    chosen = _backends[backend]
    options = options or {}
    for key, value in options.items():
        if key not in chosen.options:
            have = ", ".join(chosen.options) or "none"
            raise ValueError(
                f"attention.options.{key}={value} is not an option of {backend}; it has: {have}"
            )
        if value not in chosen.options[key]:
            choices = ", ".join(str(x) for x in chosen.options[key])
            raise ValueError(f"attention.options.{key}={value} must be one of {choices}")
    reason = chosen.refusal(
        Request(torch.device(device), dtype, head_dim, mask, options, deterministic)
    )
    if reason:
        raise ValueError(f"attention={backend} cannot run here: {reason}")


@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask | None = None,
    backend: str = "flash",
    scale: float | None = None,
    return_lse: Literal[False] = False,
    **options: Any,
) -> Tensor: ...
@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask | None = None,
    backend: str = "flash",
    scale: float | None = None,
    *,
    return_lse: Literal[True],
    **options: Any,
) -> tuple[Tensor, Tensor]: ...
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask | None = None,
    backend: str = "flash",
    scale: float | None = None,
    return_lse: bool = False,
    **options: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """Exact softmax attention: q (B, Tq, Hq, D), k and v (B, Tk, Hkv, D) → out like q; Hq a
    multiple of Hkv (grouped-query).

    `mask` defaults to `Mask.causal()`, `scale` to D**-0.5. With `return_lse` also the log-sum-exp
    of each query's scores, (B, Hq, Tq) float32, natural log; its gradient flows in naive, flash and
    flex and is not defined in sdpa and flash_attn. A query that sees nothing gets output 0, lse
    -inf and zero gradients. Under autocast the inputs are cast first. fp32, bf16, fp16; any
    strides; any length from 1 up. Raises ValueError for shapes that do not fit and for a backend
    that cannot do what is asked.
    """
    mask = Mask.causal() if mask is None else mask
    _check_inputs(q, k, v, scale)
    if torch.is_autocast_enabled(q.device.type):
        dtype = torch.get_autocast_dtype(q.device.type)
        q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    B, Tq, _, D = q.shape
    check(backend, device=q.device, dtype=q.dtype, head_dim=D, mask=mask, options=options)
    bound = mask.bind(B, Tq, k.shape[1], q.device)
    with torch.autocast(q.device.type, enabled=False):
        out, lse, kernel = _backends[backend].run(
            q, k, v, bound, D**-0.5 if scale is None else scale, **options
        )
    _record(backend, kernel)
    return (out, lse) if return_lse else out


def reproducible(backend: str) -> dict[str, tuple[str, ...]]:
    """Kernel → the outputs that have the same bits in every run of it; empty where `backend`
    promises none.
    """
    return dict(getattr(_backends[backend], "reproducible", {}))


def keeps_output(backend: str) -> bool:
    """Whether `attention_backward` takes this backend's out and lse as they are."""
    return hasattr(_backends[backend], "backward")


def attention_backward(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor | None,
    mask: Mask,
    backend: str,
    scale: float | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv for the gradient `do` of `out`, where `attention` gave out and lse for these q, k,
    v some time before.

    A backend that has no such backward (see `keeps_output`) computes its forward again and needs no
    lse.
    """
    if lse is None or not keeps_output(backend):
        with torch.enable_grad():
            leaves = [x.detach().requires_grad_() for x in (q, k, v)]
            again = attention(leaves[0], leaves[1], leaves[2], mask, backend, scale, **options)
        dq, dk, dv = torch.autograd.grad(again, leaves, do)
        return dq, dk, dv
    B, Tq, _, D = q.shape
    bound = mask.bind(B, Tq, k.shape[1], q.device)
    q16, k16, v16 = (x.to(out.dtype) for x in (q, k, v))
    chosen: Any = _backends[backend]
    with torch.autocast(q.device.type, enabled=False):
        found = chosen.backward(
            do, q16, k16, v16, out, lse, bound, D**-0.5 if scale is None else scale, **options
        )
    dq, dk, dv = (g.to(x.dtype) for g, x in zip(found, (q, k, v), strict=True))
    return dq, dk, dv


def kernels_run() -> dict[str, str]:
    """Backend → the kernel that it last ran with in this process."""
    return dict(_ran)


@torch.compiler.assume_constant_result
def _record(backend: str, kernel: str) -> None:
    _ran[backend] = kernel


def _check_inputs(q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> None:
    if (
        q.ndim != 4
        or k.ndim != 4
        or k.shape != v.shape
        or q.shape[0] != k.shape[0]
        or q.shape[3] != k.shape[3]
    ):
        raise ValueError(
            "attention takes q (B, Tq, Hq, D) and k, v (B, Tk, Hkv, D), "
            f"got {tuple(q.shape)}, {tuple(k.shape)}, {tuple(v.shape)}"
        )
    if min(q.shape) < 1 or min(k.shape) < 1:
        raise ValueError(
            f"attention needs sizes of at least 1, got q {tuple(q.shape)} and k {tuple(k.shape)}"
        )
    if q.shape[2] % k.shape[2]:
        raise ValueError(
            f"{q.shape[2]} query heads are not a multiple of {k.shape[2]} key-value heads"
        )
    if not q.dtype == k.dtype == v.dtype and not torch.is_autocast_enabled(q.device.type):
        raise ValueError(f"q, k and v must have one dtype, got {q.dtype}, {k.dtype}, {v.dtype}")
    if q.dtype not in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(f"attention takes fp32, bf16 or fp16, got {q.dtype}")
    if not q.device == k.device == v.device:
        raise ValueError(
            f"q, k and v must be on one device, got {q.device}, {k.device}, {v.device}"
        )
    if scale is not None and not scale > 0:
        raise ValueError(f"scale={scale} must be above 0")
