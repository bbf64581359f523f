"""The flash operator, registered with torch.

Autograd, torch.compile and CUDA graphs see one opaque call. For plain tensors, neither compiled nor
traced, `forward_for` and `flash_backward` pass by torch's dispatcher, which takes as long as the
launches.

Implementations: "triton-portable" (any GPU, and a CPU under TRITON_INTERPRET=1), "triton-ampere"
(mma.sync), "triton-hopper" (Hopper's own instructions), "torch-tiled" (a CPU). "-ordered" after
ampere or hopper says that the backward sums dq in one order; otherwise its last bits may change
from run to run. All else has the same bits every time.
"""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Callable
from contextlib import suppress
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from longctx.kernels import warn_of_triton
from longctx.kernels.attention import IMPLEMENTATIONS, Gradients, Intervals, Saved, Scores
from longctx.kernels.attention.launch import HOPPER, configure
from longctx.kernels.attention.selftest import trust


def implementation(
    device: torch.device, dtype: torch.dtype, head_dim: int, kernel: str = "auto"
) -> str:
    """Return the implementation that serves such tensors; on a GPU `kernel` chooses it.

    "auto" is the first of IMPLEMENTATIONS that is for this GPU and takes the tensors. It is ordered
    if torch uses deterministic algorithms.
    """
    if device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        return "torch-tiled"
    if kernel == "auto":
        for_device = (name for name, x in IMPLEMENTATIONS.items() if _major(device) in x.chosen_on)
        name = next((x for x in for_device if runs(x, device, dtype, head_dim)), "triton-portable")
    else:
        name = f"triton-{kernel}"
    if IMPLEMENTATIONS[name].is_ordered or not torch.are_deterministic_algorithms_enabled():
        return name
    return f"{name}-ordered"


def runs(name: str, device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    """Return True if the implementation `name` runs on `device`, with such tensors."""
    own = IMPLEMENTATIONS[name]
    on_device = own.generations is None or _major(device) in own.generations
    return on_device and own.takes(dtype.itemsize, head_dim)


def _major(device: torch.device) -> int:
    """Return the generation of an NVIDIA GPU, such as 8 for sm_86; 0 for all else, and for a GPU
    that a plan without one asks about.
    """
    if device.type != "cuda" or torch.version.hip is not None:
        return 0
    # torch.compile takes it as a constant, and warns of functools caches; asking torch each time
    # would be a tenth of an eager call
    is_compiling = torch.compiler.is_compiling()
    properties = torch.cuda.get_device_properties if is_compiling else _properties
    return int(properties(device).major)


@functools.cache
def _properties(device: torch.device) -> Any:
    with suppress(AssertionError, RuntimeError):  # as torch says that there is no GPU
        return torch.cuda.get_device_properties(device)
    return SimpleNamespace(major=0)


class Kernels(NamedTuple):
    """Both passes of an implementation, as longctx/kernels/attention/__init__.py describes them."""

    forward: Callable[..., tuple[Tensor, Tensor]]
    backward: Callable[..., Gradients]


def kernels(implementation: str, device: torch.device) -> Kernels:
    """Return the kernels of `implementation`, imported and configured for `device`."""
    forward, backward = (_module(name, device) for name in IMPLEMENTATIONS[implementation].modules)
    if implementation == "triton-hopper-ordered":
        return Kernels(forward.forward, functools.partial(backward.backward, ordered=True))
    return Kernels(forward.forward, backward.backward)


@functools.cache
def _module(name: str, device: torch.device) -> Any:
    """Return a module of this folder; Triton's are imported on first use."""
    if device.type == "cuda":
        warn_of_triton()
    module = importlib.import_module(f"longctx.kernels.attention.{name}")
    if name in HOPPER:
        configure(module, name, device)
    return module


@torch.library.custom_op("longctx::flash_forward", mutates_args=())
def forward_op(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    first: Tensor,
    last: Tensor,
    qfirst: Tensor,
    qlast: Tensor,
    short: bool,
    scale: float,
    softcap: float | None,
    implementation: str,
) -> tuple[Tensor, Tensor]:
    """Return out (B, Tq, Hq, D) and lse (B, Hq, Tq) float32 under an interval mask.

    q is (B, Tq, Hq, D), k and v (B, Tk, Hkv, D), sinks (Hq,) float32.
    """
    intervals = Intervals(first, last, qfirst, qlast, short)
    return _forward(q, k, v, sinks, *intervals, Scores(scale, softcap, sinks), implementation)


@torch.library.custom_op("longctx::flash_backward", mutates_args=())
def backward_op(
    do: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    sinks: Tensor | None,
    first: Tensor,
    last: Tensor,
    qfirst: Tensor,
    qlast: Tensor,
    scale: float,
    softcap: float | None,
    implementation: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return dq, dk, dv, dsinks for the gradient `do` of out and `dlse` (or None) of lse.

    Without sinks theirs is empty. The operator has no derivative of its own.
    """
    intervals = Intervals(first, last, qfirst, qlast)
    saved, scores = Saved(q, k, v, out, lse), Scores(scale, softcap, sinks)
    dq, dk, dv, dsinks = _backward(do, dlse, saved, intervals, scores, implementation)
    return dq, dk, dv, lse.new_empty(0) if dsinks is None else dsinks


def _forward(
    q: Tensor, k: Tensor, v: Tensor, _sinks: Tensor | None, *others: Any
) -> tuple[Tensor, Tensor]:
    """Run the forward kernels; `others` are the ends of intervals, scores and implementation.

    The sinks are those of the scores, once more for autograd.
    """
    *intervals, scores, implementation = others
    # self-tested once per process
    run = trusted("forward", implementation, q, k, scores.sinks is not None, intervals[4])
    output: tuple[Tensor, Tensor] = run(q, k, v, Intervals(*intervals), scores)
    return output


def _backward(do: Tensor, dlse: Tensor | None, saved: Saved, *others: Any) -> Gradients:
    """Run the backward kernels; `others` are intervals, scores and implementation."""
    run = trusted("backward", others[-1], saved.q, saved.k, others[-2].sinks is not None)
    gradients: Gradients = run(do, dlse, saved, *others[:-1])
    return gradients


def trusted(
    part: str, implementation: str, q: Tensor, k: Tensor, *variant: bool
) -> Callable[..., Any]:
    """Return the kernels of a pass, "forward" or "backward", self-tested for tensors like q, k.

    `variant`: whether there are sinks, and whether intervals are short.
    """
    run: Callable[..., Any] = getattr(kernels(implementation, q.device), part)
    if _needs_trust(q, implementation):
        trust(part, implementation, q, k, run, *variant)
    return run


def _needs_trust(q: Tensor, implementation: str) -> bool:
    """Return True if a compiler could have broken the kernels: a CPU runs torch, or interprets."""
    return q.device.type != "cpu" and implementation.startswith("triton")


@forward_op.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    B, Tq, Hq, _D = q.shape
    return q.new_empty(q.shape), q.new_empty(B, Hq, Tq, dtype=torch.float32)


@backward_op.register_fake
def _(
    do: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, *others: Any
) -> tuple[Tensor, ...]:
    lse, sinks, *_ = others
    dsinks = lse.new_empty(0 if sinks is None else len(sinks))
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), dsinks


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, _, ctx.scale, ctx.softcap, ctx.implementation = inputs
    ctx.save_for_backward(*tensors, *output)
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, do: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
    q, k, v, sinks, first, last, qfirst, qlast, out, lse = ctx.saved_tensors
    do = torch.zeros_like(out) if do is None else do
    intervals = Intervals(first, last, qfirst, qlast)
    scores = Scores(ctx.scale, ctx.softcap, sinks)
    saved = Saved(q, k, v, out, lse)
    gradients = flash_backward(do, dlse, saved, intervals, scores, ctx.implementation)
    return *gradients, *[None] * 8


forward_op.register_autograd(_differentiate, setup_context=_save)


class _Flash(torch.autograd.Function):
    """`forward_op` without the dispatcher, which takes as long as the launches."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, *others: Any
    ) -> tuple[Tensor, Tensor]:
        *intervals, scores, implementation = others
        ctx.others = Intervals(*intervals), scores._replace(sinks=None), implementation
        # no call of ours between this one and the kernels
        run = trusted("forward", implementation, q, k, sinks is not None, intervals[4])
        out, lse = run(q, k, v, ctx.others[0], scores)
        # the intervals have no gradient and need not be saved by autograd
        ctx.save_for_backward(q, k, v, out, lse, sinks)
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, do: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        *tensors, sinks = ctx.saved_tensors
        saved, (intervals, scores, implementation) = Saved(*tensors), ctx.others
        do = torch.zeros_like(saved.out) if do is None else do
        scores = scores._replace(sinks=sinks)
        gradients = flash_backward(do, dlse, saved, intervals, scores, implementation)
        return *gradients, *[None] * 7


def forward_for(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None
) -> Callable[..., tuple[Tensor, Tensor]]:
    """Return the shortest way to the forward kernels, with the arguments of `_forward`.

    Compilers, transforms and profilers see the operator. Raises NotImplementedError for
    derivatives that the kernels do not have.
    """
    has_duals = forward_ad._current_level >= 0 and not torch.compiler.is_compiling()
    # a dual tensor's derivative would be dropped without an error
    tensors = (q, k, v) if sinks is None else (q, k, v, sinks)
    if has_duals and any(forward_ad.unpack_dual(x).tangent is not None for x in tensors):
        raise NotImplementedError("flash has no forward-mode derivative; use attention=naive")
    if not unobserved(*tensors):
        return _by_operator
    # without gradients autograd's Function would cost time for nothing
    needs_gradient = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
    return _Flash.apply if needs_gradient else _forward


def _by_operator(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, *others: Any
) -> tuple[Tensor, Tensor]:
    """Do as `_forward` through the operator, whose arguments are flat."""
    *intervals, scores, implementation = others
    scale, softcap, _ = scores
    given = q, k, v, sinks, *intervals, scale, softcap, implementation
    output: tuple[Tensor, Tensor] = forward_op(*given)
    return output


def flash_backward(
    do: Tensor,
    dlse: Tensor | None,
    saved: Saved,
    intervals: Intervals,
    scores: Scores,
    implementation: str,
) -> Gradients:
    """Return the gradients of `backward_op`; the operator refuses second derivatives."""
    if torch.is_grad_enabled() or not unobserved(do, saved.q, saved.k, saved.v):
        scale, softcap, sinks = scores
        given = do, dlse, *saved, sinks, *intervals[:4], scale, softcap, implementation
        dq, dk, dv, dsinks = backward_op(*given)
        return Gradients(dq, dk, dv, None if sinks is None else dsinks)
    return _backward(do, dlse, saved, intervals, scores, implementation)


def unobserved(*tensors: Tensor) -> bool:
    """Return True if no compiler, transform, mode, subclass or profiler has to see an operator."""
    for x in tensors:
        if type(x) is not Tensor and type(x) is not torch.nn.Parameter:
            return False
    return (
        not torch.compiler.is_compiling()
        and torch._C._len_torch_dispatch_stack() == 0
        and torch._C._len_torch_function_stack() == 0
        and torch._C._functorch.peek_interpreter_stack() is None
        and not torch.autograd._profiler_enabled()
    )
