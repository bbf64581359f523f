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
from longctx.kernels.attention.selftest import Variant, trust


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
        major = _major(device)
        for_device = (name for name, x in IMPLEMENTATIONS.items() if major in x.chosen_on)
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
    ordered = {"ordered": True} if implementation == "triton-hopper-ordered" else {}
    return Kernels(forward.forward, functools.partial(backward.backward, **ordered))


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
    key_bias: Tensor | None,
    first: Tensor,
    last: Tensor,
    qfirst: Tensor,
    qlast: Tensor,
    span: str,
    starts: Tensor,
    scale: float,
    softcap: float | None,
    implementation: str,
) -> tuple[Tensor, Tensor]:
    """Return out (B, Tq, Hq, D) and lse (B, Hq, Tq) float32 under an interval mask.

    q is (B, Tq, Hq, D), k and v (B, Tk, Hkv, D), sinks (Hq,) and key_bias (B, Hq, Tk) float32.
    """
    intervals, learned = Intervals(first, last, qfirst, qlast, span, starts), (sinks, key_bias)
    return _forward(q, k, v, *learned, intervals, Scores(scale, softcap, *learned), implementation)


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
    key_bias: Tensor | None,
    first: Tensor,
    last: Tensor,
    qfirst: Tensor,
    qlast: Tensor,
    span: str,
    scale: float,
    softcap: float | None,
    implementation: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return `Gradients` for the gradient `do` of out and `dlse` (or None) of lse.

    Without sinks or key bias theirs is empty. The operator has no derivative of its own.
    """
    intervals = Intervals(first, last, qfirst, qlast, span)
    saved, scores = Saved(q, k, v, out, lse), Scores(scale, softcap, sinks, key_bias)
    found = _backward(do, dlse, saved, intervals, scores, implementation)
    dsinks, dkey_bias = (lse.new_empty(0) if x is None else x for x in found[3:])
    return *found[:3], dsinks, dkey_bias


def _forward(
    q: Tensor, k: Tensor, v: Tensor, _sinks: Tensor | None, _bias: Tensor | None, *others: Any
) -> tuple[Tensor, Tensor]:
    """Run the forward kernels; `others` are intervals, scores and implementation.

    Sinks and key bias are those of the scores, once more for autograd.
    """
    intervals, scores, implementation = others
    run = trusted("forward", implementation, q, k, scores, intervals.span)
    output: tuple[Tensor, Tensor] = run(q, k, v, intervals, scores)
    return output


def _backward(do: Tensor, dlse: Tensor | None, saved: Saved, *others: Any) -> Gradients:
    """Run the backward kernels; `others` are intervals, scores and implementation."""
    run = trusted("backward", others[-1], saved.q, saved.k, others[-2], others[0].span)
    gradients: Gradients = run(do, dlse, saved, *others[:-1])
    return gradients


def trusted(
    part: str, implementation: str, q: Tensor, k: Tensor, scores: Scores, span: str = "long"
) -> Callable[..., Any]:
    """Return the kernels of a pass, "forward" or "backward", self-tested for tensors like q, k."""
    run: Callable[..., Any] = getattr(kernels(implementation, q.device), part)
    if _needs_trust(q, implementation):
        sinks, bias, softcap = (x is not None for x in (*scores[2:], scores.softcap))
        trust(part, implementation, q, k, run, Variant(sinks, span, bias, softcap))
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
    lse, *learned = others[:3]
    dsinks, dkey_bias = (lse.new_empty(0 if x is None else x.shape) for x in learned)
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), dsinks, dkey_bias


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.span, _, ctx.scale, ctx.softcap, ctx.implementation = inputs
    ctx.save_for_backward(*tensors, *output)
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, do: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
    q, k, v, sinks, key_bias, *intervals, out, lse = ctx.saved_tensors
    do = torch.zeros_like(out) if do is None else do
    scores = Scores(ctx.scale, ctx.softcap, sinks, key_bias)
    saved, ends = Saved(q, k, v, out, lse), Intervals(*intervals)._replace(span=ctx.span)
    gradients = flash_backward(do, dlse, saved, ends, scores, ctx.implementation)
    return *gradients, *[None] * 9


forward_op.register_autograd(_differentiate, setup_context=_save)


class _Flash(torch.autograd.Function):
    """`forward_op` without the dispatcher, which takes as long as the launches."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
        sinks, key_bias, intervals, scores, implementation = others
        ctx.others = intervals, scores[:2], implementation
        out, lse = _forward(q, k, v, *others)
        # the intervals have no gradient and need not be saved by autograd
        ctx.save_for_backward(q, k, v, out, lse, sinks, key_bias)
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, do: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        *tensors, sinks, key_bias = ctx.saved_tensors
        saved, (intervals, (scale, softcap), implementation) = Saved(*tensors), ctx.others
        do = torch.zeros_like(saved.out) if do is None else do
        scores = Scores(scale, softcap, sinks, key_bias)
        gradients = flash_backward(do, dlse, saved, intervals, scores, implementation)
        return *gradients, None, None, None


def forward_for(
    q: Tensor, k: Tensor, v: Tensor, *learned: Tensor | None
) -> Callable[..., tuple[Tensor, Tensor]]:
    """Return the shortest way to the forward kernels, with the arguments of `_forward`.

    Compilers, transforms and profilers see the operator. Raises NotImplementedError for
    derivatives that the kernels do not have.
    """
    has_duals = forward_ad._current_level >= 0 and not torch.compiler.is_compiling()
    # a dual tensor's derivative would be dropped without an error
    tensors = q, k, v, *(x for x in learned if x is not None)
    if has_duals and any(forward_ad.unpack_dual(x).tangent is not None for x in tensors):
        raise NotImplementedError("flash has no forward-mode derivative; use attention=naive")
    if not unobserved(*tensors):
        return _by_operator
    # without gradients autograd's Function would cost time for nothing
    needs_gradient = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
    return _Flash.apply if needs_gradient else _forward


def _by_operator(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, key_bias: Tensor | None, *others: Any
) -> tuple[Tensor, Tensor]:
    """Do as `_forward` through the operator, whose arguments are flat."""
    intervals, scores, implementation = others
    given = q, k, v, sinks, key_bias, *intervals, *scores[:2], implementation
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
        scale, softcap, *learned = scores
        given = do, dlse, *saved, *learned, *intervals[:5], scale, softcap, implementation
        found = backward_op(*given)
        has = (None if x is None else d for x, d in zip(learned, found[3:], strict=True))
        return Gradients(*found[:3], *has)
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
