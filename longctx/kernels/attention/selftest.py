"""Check that a Triton kernel is right on this GPU, once per process, before it is trusted.

A compiler may break a correct kernel: ptxas 12.8 can overwrite operands of products that are still
running (triton#9433). So kernels run on inputs whose exact answer is known.

With scale = ln 2 and integers in q and k every p is a power of two, so p, ds and all their sums
with the integers in v, do and out are exact in any order and in every type. A kernel's results may
differ from the exact values by the last rounding alone. Rows are long enough for several tiles,
masked ones and the steady loop, in one interval mask with queries that see nothing. The backward is
a function of lse and out as well: both are chosen here, lse an integer power of two, and need no
forward.
"""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from longctx.kernels.attention import IMPLEMENTATIONS, Intervals, Saved, Scores, launch
from longctx.kernels.attention.fingerprint import compilers, gpu_name, integers

SCALE = math.log(2)  # exp(SCALE · s) = 2^s
SOFTCAP = 2.0**20  # so large that it changes no score in fp32
LSE2 = 2.0  # of the backward, in base 2
QUERIES = 799
AHEAD = 58  # more keys than queries
CHANGE = 400  # from this query on, the first 130 keys are out of sight
BLIND = 3  # queries that see nothing
DOCUMENT = 300  # queries: some tiles of packed rows end in the middle
# Copies of the problem in one call: more tiles than any GPU has multiprocessors, so that programs
# take several.
COPIES = 48


class SelfTestFailed(ValueError):
    """A kernel gives wrong results on this GPU."""


class Problem(NamedTuple):
    """Integer inputs and the exact results, fp32.

    q, do, out, dq are (1, Tq, G, D); k, v, dk, dv (1, Tk, 1, D); sinks, dsinks (G,); key_bias,
    dkey_bias (1, G, Tk).
    """

    q: Tensor
    k: Tensor
    v: Tensor
    do: Tensor
    first: Tensor
    last: Tensor
    given_out: Tensor
    given_lse: Tensor
    out: Tensor
    lse: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor
    sinks: Tensor | None
    dsinks: Tensor
    key_bias: Tensor | None
    dkey_bias: Tensor


class Variant(NamedTuple):
    """What chooses a compiled kernel besides shapes and types."""

    has_sinks: bool = False
    span: str = "long"
    has_bias: bool = False
    has_softcap: bool = False


_trusted: set[tuple[Any, ...]] = set()
_testing = {"forward": threading.Lock(), "backward": threading.Lock()}
_making = threading.Lock()  # of a problem, for which the number of threads changes


def trust(
    part: str, implementation: str, q: Tensor, k: Tensor, run: Callable[..., Any], variant: Variant
) -> None:
    """Test `run`, the "forward" or "backward" of `implementation`, for tensors like q and k.

    Once per process, whatever thread asks; inside a CUDA graph capture nothing is tested. Raises
    SelfTestFailed, which names the kernel, the machine and the remedy.
    """
    # a compiled kernel serves one dtype, head size and group
    bucket, group = 0, q.shape[2] // k.shape[2]
    # its configs, and so its compiled kernels, depend on the length
    if IMPLEMENTATIONS[implementation].modules[part == "backward"] == "portable":
        bucket = launch.longest_bucket(
            (name for name, its in launch.PORTABLE.items() if its == part), q, k.shape[1]
        )
    shapes = q.shape[3], group, bucket
    key = (part, implementation, q.device, q.dtype, *shapes, variant)
    if key in _trusted or (q.is_cuda and torch.cuda.is_current_stream_capturing()):
        return
    with _testing[part], torch.no_grad():
        if key in _trusted:  # since another thread's test has ended
            return
        # longer problems in fewer copies: the test takes about the same time
        copies = max(2, max(COPIES // group, 20) * QUERIES // (bucket + QUERIES))
        if error := check(part, run, q.device, q.dtype, *shapes, copies, variant):
            raise SelfTestFailed(_message(part, implementation, q, error))
        _trusted.add(key)


def check(
    part: str,
    run: Callable[..., Any],
    device: torch.device,
    dtype: torch.dtype,
    head_dim: int,
    group: int = 1,
    bucket: int = 0,
    copies: int = 1,
    variant: Variant = Variant(),  # noqa: B008, it does not change
) -> str | None:
    """Return the first mistake of `run`, the `part` of some `Kernels`, or None."""
    has_sinks, span, has_bias, has_softcap = variant
    with _making, torch.device("cpu"), one_thread():  # whatever the default device is
        x = problem(head_dim, group, bucket, has_sinks, has_bias)
    # copies of one problem keep all multiprocessors busy, and must agree
    inputs = (x.q, x.k, x.v, x.do, x.given_out)
    q, k, v, do, out = (t.to(device, dtype).repeat(copies, 1, 1, 1) for t in inputs)
    # intervals do not decrease, so the queries that see a key are found by search
    keys = torch.arange(k.shape[1], dtype=torch.int32, device="cpu")[None]
    qfirst = torch.searchsorted(x.last, keys, out_int32=True)
    qlast = torch.searchsorted(x.first, keys, right=True, out_int32=True) - 1
    first, last, qfirst, qlast = (end.to(device) for end in (x.first, x.last, qfirst, qlast))
    i = torch.arange(QUERIES, dtype=torch.int32, device=device)
    starts = launch.tile_starts((i - i % DOCUMENT).expand_as(first))
    intervals = Intervals(first, last, qfirst, qlast, span, starts)
    sinks = None if x.sinks is None else x.sinks.to(device)
    bias = None if x.key_bias is None else x.key_bias.to(device).expand(copies, -1, -1)
    scores = Scores(SCALE, SOFTCAP if has_softcap else None, sinks, bias)
    if part == "forward":
        output = run(q, k, v, intervals, scores)
        results = zip(("out", "lse"), output, (x.out, x.lse), strict=True)
    else:
        saved = Saved(q, k, v, out, x.given_lse.to(device).repeat(copies, 1, 1))
        dq, dk, dv, dsinks, dkey_bias = run(do, None, saved, intervals, scores)
        names = ("dq", "dk", "dv", "dkey_bias")[: 3 + has_bias]
        found, right = (dq, dk, dv, dkey_bias), (x.dq, x.dk, x.dv, x.dkey_bias)
        results = zip(names, found, right, strict=False)
        exact = x.dsinks * copies  # all add to it
        if has_sinks and (wrong := _difference(dsinks.cpu().double(), exact, dsinks.dtype)):
            return f"dsinks {wrong}"
    for name, actual, exact in results:
        # programs that take a second tile may break it: all copies must have the same bits
        if not torch.equal(actual.nan_to_num(), actual[:1].nan_to_num().expand_as(actual)):
            return f"{name} is not the same for {copies} copies of one problem"
        if wrong := _difference(actual[:1].cpu().double(), exact.double(), actual.dtype):
            return f"{name} {wrong}"
    return None


def _difference(actual: Tensor, exact: Tensor, dtype: torch.dtype) -> str | None:
    """Return how far `actual` is from `exact`, if beyond one rounding to `dtype`, a few of fp32."""
    empty = exact == float("-inf")
    if not torch.equal(actual == float("-inf"), empty):
        return "is -inf in the wrong places"
    actual, exact = actual.masked_fill(empty, 0), exact.masked_fill(empty, 0)
    # half a unit in the last place, and a few of fp32 for logarithms
    allowed = exact.abs() * (torch.finfo(dtype).eps / 2) + exact.abs().max() * 1e-5
    error = (actual - exact).abs()
    wrong = ~(error <= allowed)  # NaN is wrong too
    if not wrong.any():
        return None
    worst = int(torch.where(wrong, error.nan_to_num(nan=math.inf), 0).argmax())
    return (
        f"has {int(wrong.sum()):,} of {wrong.numel():,} values wrong, "
        f"such as {actual.flatten()[worst]:.6g} for {exact.flatten()[worst]:.6g}"
    )


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute on the CPU in one thread."""
    # Small products wait longest for other threads: four heads take 0.2 s in one thread, and up to
    # 1 s in more threads than cores.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@functools.lru_cache(maxsize=1)  # forward and backward have the same
def problem(
    head_dim: int, group: int, bucket: int, has_sinks: bool = False, has_bias: bool = False
) -> Problem:
    """Return inputs and their exact results; no query sees the first `bucket` keys."""
    Tq, Tk = QUERIES, bucket + QUERIES + AHEAD
    q, do = (_sparse(Tq * group, head_dim, seed).view(1, Tq, group, head_dim) for seed in (1, 2))
    k = 2.0 * integers((1, Tk, 1, head_dim), 3, 2) - 1
    v = integers((1, Tk, 1, head_dim), 4, 5) - 2.0
    given_out = integers((1, Tq, group, head_dim), 5, 3) - 1.0
    i = torch.arange(Tq, dtype=torch.int32)
    last = torch.where(i < BLIND, -1, i + Tk - Tq).int()
    first = torch.where(i < BLIND, 0, torch.where(i < CHANGE, bucket, bucket + 130)).int()
    given_lse = torch.where(i < BLIND, -math.inf, LSE2 * SCALE).expand(1, group, Tq).contiguous()

    # the formula, in numbers that fp32 holds exactly
    j = torch.arange(bucket, Tk)
    visible = (j >= first[:, None]) & (j <= last[:, None])
    out, dq = torch.zeros_like(q, dtype=torch.float64), torch.zeros_like(q, dtype=torch.float64)
    dk, dv = torch.zeros_like(k, dtype=torch.float64), torch.zeros_like(v, dtype=torch.float64)
    lse = torch.full((1, group, Tq), -math.inf, dtype=torch.float64)
    kj, vj = k[0, bucket:, 0], v[0, bucket:, 0]
    # a sink, too, is an integer power of two
    sink2 = integers((group,), 6, 5) + 4
    dsinks = torch.zeros(group, dtype=torch.float64)
    # biases that rise by 0 or 1 in base 2, relative to the last key of a query
    bias2 = integers((1, group, Tk), 7, 2) * has_bias
    ref2 = bias2[0, :, last.clamp(min=0)]
    dbias = torch.zeros(1, group, Tk, dtype=torch.float64)
    for h in range(group):
        qi, doi = q[0, :, h], do[0, :, h]
        s2 = qi @ kj.T + bias2[0, h, bucket:] - ref2[h, :, None]
        p = torch.where(visible, torch.ldexp(torch.ones(()), s2), 0.0)
        total = p.sum(1).double() + (2.0 ** (sink2[h] - ref2[h]) if has_sinks else 0.0)
        out[0, :, h] = (p @ vj).double() / total.clamp(min=1e-9)[:, None]
        lse[0, h] = total.log()
        # backward: lse and out are given, whatever forward computed
        p = p * 2.0**-LSE2
        ds = p * (doi @ vj.T - (doi * given_out[0, :, h]).sum(1, keepdim=True))
        dbias[0, h, bucket:] = ds.sum(0).double()
        dv[0, bucket:, 0] += (p.T @ doi).double()
        dk[0, bucket:, 0] += (ds.T @ qi).double() * SCALE
        dq[0, :, h] = (ds @ kj).double() * SCALE
        delta = (doi * given_out[0, :, h]).sum(1)
        dsinks[h] = -(2.0 ** (sink2[h] - ref2[h] - LSE2) * delta)[i >= BLIND].sum()
    given = q, k, v, do, first[None], last[None], given_out, given_lse
    sinks = sink2 * SCALE if has_sinks else None
    key_bias = bias2 * SCALE if has_bias else None
    return Problem(*given, out, lse, dq, dk, dv, sinks, dsinks, key_bias, dbias)


def _sparse(rows: int, columns: int, seed: int) -> Tensor:
    """Return (rows, columns) with up to four ±1 in a row: products with ±1 stay in -4 .. 4."""
    at = integers((rows, 4), seed + 10, columns).long()
    return torch.zeros(rows, columns).scatter_(1, at, 2 * integers((rows, 4), seed + 20, 2) - 1)


def _message(part: str, implementation: str, q: Tensor, error: str) -> str:
    remedies = "attention=sdpa, or TRITON_PTXAS_PATH=FILE with another ptxas"
    if implementation != "triton-portable":
        remedies = f"attention.options.kernel=portable, or {remedies}"
    tools = ", ".join(f"{name} {version}" for name, version in compilers().items())
    return (
        f"the {part} kernel {implementation} fails its self-test on {gpu_name(q.device)} ({tools}) "
        f"for {q.dtype}, head size {q.shape[3]}: {error}. "
        f"It is not used, its results would be wrong; use {remedies}"
    )
