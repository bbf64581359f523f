"""The registry of attention backends, and the two ways to call one.

A backend is a file of this package, or any module outside it, that registers a `Backend`. Nothing
falls back: the requested backend runs, or a ValueError names another one.

`attention()` checks shapes and types on every call. `Attention` is for a layer that calls the same
backend in every step: it looks up the backend and its options once.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
import sys
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from copy import copy
from dataclasses import replace
from pathlib import Path
from traceback import extract_tb
from typing import Any, NamedTuple

import torch
from torch import Tensor

from longctx.attention.description import AUTO, DESCRIPTIONS, SCORES, AttentionConfig, Description
from longctx.attention.exchange import WHOLE_ROWS, Exchange
from longctx.attention.mask import Mask, document_starts
from longctx.config.fields import refuse, refuse_first
from longctx.kernels import warn_of_triton
from longctx.kernels.attention import Gradients, Saved, Scores
from longctx.kernels.attention.flash_op import unobserved
from longctx.kernels.attention.key_bias import reference, relative_sinks
from longctx.kernels.attention.relaunch import stream_of
from longctx.kernels.attention.sinks import with_sinks

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
PLAIN = Scores()
Output = tuple[Tensor, Tensor, str]  # of `Backend.run`
Mod = Callable[..., Tensor]  # FlexAttention's score_mod or mask_mod
# What a plugin should know if it fails
GIVEN = "it gets tensors: write torch.where for if, and &, | and ~ for and, or and not"
RETURNS = "run returns out (B, Tq, Hq, D), lse (B, Hq, Tq) and the name of the kernel"


class AttentionRequest(NamedTuple):
    """The properties of a call, known before any tensor exists. `mask` None: any mask."""

    device: torch.device
    dtype: torch.dtype
    head_dim: int
    mask: Mask | None = None
    options: Mapping[str, Any] = {}
    deterministic: bool = False
    scores: frozenset[str] = frozenset()  # names of the parts of `Scores`


class Backend(ABC):
    """One way to compute attention; `refusal` and `run` are all that a backend needs.

    `description` answers planner, checks and kernel lock; the default predicts the costs of a fused
    kernel. `exact` says that `run` is softmax attention of the keys that the mask shows. Generation
    may then use the formula, and a run checks a plugin against it before step 1.
    """

    description = Description()
    exact = True

    @abstractmethod
    def refusal(self, request: AttentionRequest) -> str | None:
        """Return why this backend cannot serve the request and what to use instead, or None.

        The answer may depend on the mask's kind and window alone: `Attention` remembers it.
        """

    @abstractmethod
    def run(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, scores: Scores, *_: Any, **options: Any
    ) -> Output:
        """Return out (B, Tq, Hq, D), lse (B, Hq, Tq) float32, and the name of the kernel that ran.

        `mask` is bound, q, k, v are contiguous in their last dimension, and `scores` has its scale,
        and sinks only if the description says `fuses_sinks`. With a key bias lse is relative to the
        `reference` of each query.
        """

    def backward(
        self, do: Tensor, saved: Saved, mask: Mask, scores: Scores, *_: Any, **options: Any
    ) -> Gradients:
        """Return dq, dk, dv from a forward's out and lse, dsinks if it fuses sinks, and dkey_bias;
        without it recomputation runs `run`.
        """
        raise NotImplementedError(f"{type(self).__name__} has no backward of its own")

    def decode(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, scores: Scores, *_: Any, **options: Any
    ) -> Output:
        """Do as `run` for the newest token of each text, q (B, 1, Hq, D), over the keys and values
        of all its tokens: `first` and `last` of `mask`, (B, 1), are the first that it sees and
        itself.

        Without it a backend that is not exact computes the whole text again for each token.
        """
        raise NotImplementedError(f"{type(self).__name__} has no decoding of its own")

    def versions(self) -> dict[str, str]:
        """Return the versions of the packages that its kernels come from, for the kernel lock."""
        return {}

    def source(self) -> Path | None:
        """Return the file that the class is in; None for those of this package, and in a notebook.

        Its hash identifies kernels of a plugin in the kernel lock.
        """
        module = sys.modules[type(self).__module__]
        file = getattr(module, "__file__", None)
        return None if file is None or module.__name__.startswith("longctx.") else Path(file)

    def kernels_change_at(self, q: Tensor, length: int) -> int:
        """Return the shortest length with the kernels of `length` keys, for tensors like q."""
        return 0


_backends: dict[str, Backend] = {}
_ran: dict[str, str] = {}


def register(name: str, backend: Backend) -> None:
    """Make `backend` available as `attention(..., backend=name)`.

    Raises ValueError if the name is taken, TypeError unless `backend` is a `Backend`.
    """
    # a class instead of an object is the usual mistake
    if not isinstance(backend, Backend):
        raise TypeError(f"attention backend {name!r} must derive from longctx.attention.Backend")
    if name in _backends and type(_backends[name]) is not type(backend):
        raise ValueError(f"attention={name} is already registered; choose another name")
    _backends[name] = backend
    has_backward = type(backend).backward is not Backend.backward
    traits: dict[str, Any] = {"has_backward": has_backward, "exact": backend.exact}
    DESCRIPTIONS[name] = replace(backend.description, **traits)


def register_score(name: str, score_mod: Mod | None = None, mask_mod: Mod | None = None) -> None:
    """Make functions with FlexAttention's signatures available as attention.options.score=name.

    `score_mod(score, b, h, q_idx, kv_idx)` changes a score after scale and softcap;
    `mask_mod(b, h, q_idx, kv_idx)` is False for keys to hide. Positions count from the beginning of
    the document. Raises ValueError if the name is taken.
    """
    file = sys._getframe(1).f_globals.get("__file__")  # None in a notebook
    if SCORES.get(name, [file])[-1] != file:
        raise ValueError(f"attention.options.score={name} is already registered; choose another")
    SCORES[name] = score_mod, mask_mod, file


def mods(score: Any, mask: Mask, rows: int) -> tuple[Mod | None, Mod | None]:
    """Return the score_mod and mask_mod of `score`, a name or both, for `rows` sequences."""
    score_mod, mask_mod = SCORES[score][:2] if isinstance(score, str) else score
    if score == "none":
        return None, None
    if mask.kind == "full":
        raise ValueError(f"attention.options.score={score}: needs a causal mask, for positions")
    # A query's position is that of its last key: its own, if the mask is causal; in decoding too
    assert mask.last is not None
    starts = torch.zeros_like(mask.last) if mask.doc_ids is None else document_starts(mask.doc_ids)
    starts, positions = (x.expand(rows, -1) for x in (starts, mask.last - starts))

    def changed(s: Tensor, row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return score_mod(s, row, head, positions[row, query], key - starts[row, query])

    def sees(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return mask_mod(row, head, positions[row, query], key - starts[row, query])

    return changed if score_mod else None, sees if mask_mod else None


@functools.cache
def load_backends() -> None:
    """Import every file of this package, so that each backend registers itself."""
    package = importlib.import_module("longctx.attention")
    for module in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"longctx.attention.{module.name}")


def registered() -> dict[str, Backend]:
    """Return name → backend, whether it runs here or not."""
    load_backends()
    return dict(_backends)


def backends() -> dict[str, str | None]:
    """Return name → None for each backend that runs on this machine, else the reason why not."""
    load_backends()
    # the usual dtype of this machine
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    request = AttentionRequest(device, dtype, 64)
    return {name: backend.refusal(request) for name, backend in sorted(_backends.items())}


def check(
    backend: str,
    *,
    device: torch.device | str,
    dtype: torch.dtype,
    head_dim: int,
    mask: Mask | None = None,
    options: Mapping[str, Any] | None = None,
    deterministic: bool = False,
    scores: frozenset[str] = frozenset(),
    group: int = 1,
) -> None:
    """Raise ValueError, saying what to use instead, if `backend` cannot serve such tensors here, or
    says that it is exact and is not.

    `scores` names the parts of `Scores`, sinks if they are trained. `group` query heads share a
    key-value head.
    """
    of_tensors = torch.device(device), dtype, head_dim
    request = AttentionRequest(*of_tensors, mask, options or {}, deterministic, scores)
    chosen = _lookup(backend, request.options)
    _refuse(backend, scores, request)
    if request.device.type == "cuda":
        warn_of_triton()
    if chosen.exact and (chosen.source() or "score" in request.options):
        _check_formula(backend, chosen, request, group)


def _check_formula(name: str, backend: Backend, request: AttentionRequest, group: int) -> None:
    """Raise ValueError if a backend from elsewhere differs from naive on small packed documents."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, 37, heads, request.head_dim) for heads in (2 * group, 2, 2)]
    qkv: Any = [torch.randn(x, generator=generator).to(*request[:2]) for x in shapes]
    numbers = [[0] * 17 + [1] * 5 + [2] * 15, [0] * 9 + [1] * 28]
    scores = Scores(softcap=2.0 if "softcap" in request.scores else None)
    attend: Any = Attention(name, request.options)
    score = request.options.get("score", "none")
    for window in (None, 7):
        mask = Mask.documents(torch.tensor(numbers), window)
        if window is not None and backend.refusal(request._replace(mask=mask)):
            continue
        _refuse(name, request.scores, request._replace(mask=mask))
        # First, since a compiled backend hides the line of a mistake
        exact = _by_formula(score, *(x.float() for x in qkv), mask, scores)
        file = backend.source()
        with _named(f"attention={name}", file or SCORES[score][-1], RETURNS if file else GIVEN):
            error = float((attend(*qkv, mask, scores).float() - exact).norm() / exact.norm())
        differs = not error <= max(1e-4, 4 * torch.finfo(request.dtype).eps)
        claim = f"attention={name} says that it is exact, and is {error:.1%} off attention=naive"
        refuse((differs, f"{claim}; mend it, or write exact = False in its class"))


def _by_formula(score: str, *inputs: Any) -> Tensor:
    """Return what naive computes with the functions of `score`; ValueError names a mistake."""
    file, name = SCORES[score][-1], f"attention.options.score={score}"
    with _named(name, file, GIVEN):
        exact, again = (Attention("naive", {"score": score})(*inputs) for _ in range(2))
    wrong = {
        "the optimizer has no numbers of it; a mixer may have such weights": exact.requires_grad,
        f"{file}: outputs are NaN; let it be finite for all positions": not exact.isfinite().all(),
        f"{file}: it hides every key from every query": not exact.any(),
        f"{file}: two calls differ; compute it from its arguments alone": not exact.allclose(again),
    }
    refuse(*((found, f"{name}: {problem}") for problem, found in wrong.items()))
    return exact


@contextmanager
def _named(setting: str, file: Path | str | None, remedy: str) -> Iterator[None]:
    """Raise an error of a plugin's `file` as ValueError, one line with its place."""
    try:
        yield
    except Exception as error:
        frames = [x for x in extract_tb(error.__traceback__) if x.filename == str(file)]
        lines = [f", line {x.lineno}, in {x.name}" for x in frames]
        problem = f"{setting}: {file}{''.join(lines[-1:])}: {type(error).__name__}: {error}"
        raise ValueError(f"{problem}; {remedy}") from error


def kernels_run() -> dict[str, str]:
    """Return backend → the kernel that it last ran with in this process."""
    return dict(_ran)


class Attention:
    """A backend with its options, looked up once and called by a layer in every step.

    Raises ValueError for an unknown backend or option, and at the first call with another device,
    dtype, head size or kind of mask if the backend cannot serve it. Shapes are not checked: see
    `attention()`.
    """

    def __init__(self, backend: str, options: Mapping[str, Any] | None = None) -> None:
        self.name = backend
        self.options = dict(options or {})
        self.backend = _lookup(backend, self.options)
        self.description = DESCRIPTIONS[backend]
        # True if `decode` computes new tokens without those before them
        self.decodes = type(self.backend).decode is not Backend.decode
        self._served: set[tuple[Any, ...]] = set()

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, scores: Scores = PLAIN
    ) -> Tensor:
        """Return out (B, Tq, Hq, D); see `with_lse`."""
        return self.with_lse(q, k, v, mask, scores)[0]

    def with_lse(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Mask,
        scores: Scores = PLAIN,
        absolute: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """Return out (B, Tq, Hq, D) and lse (B, Hq, Tq) float32; see `attention`.

        If ranks share sequences, q, k, v, key bias and out have this rank's tokens; mask and lse
        belong to attention after the exchange. With a key bias the lse is that of the kernels,
        relative to the `reference` of a query, unless it is to be `absolute`.
        """
        sinks, fuses = scores.sinks, self.description.fuses_sinks
        # sinks scale out by a function of the lse: training needs its gradient
        trains = sinks is not None and not fuses and torch.is_grad_enabled()
        if trains and any(x is not None and x.requires_grad for x in (q, k, v, sinks)):
            _refuse(self.name, frozenset({"sinks"}))
        # a custom operator is not cast by autocast itself
        autocast = torch.is_autocast_enabled(q.device.type)
        if autocast:
            dtype = torch.get_autocast_dtype(q.device.type)
            q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
        exchange = mask.exchange or WHOLE_ROWS
        outs: list[Tensor] = []
        lses: list[Tensor] = []
        own, heads = exchanged(scaled(scores, q), exchange), 0
        for part in exchange.parts(q, k, v):
            qs, ks, vs = [x if x.stride(3) == 1 else x.contiguous() for x in part]
            whole = own.of_heads(heads, qs.shape[2])
            heads += qs.shape[2]
            given = whole if fuses else whole._replace(sinks=None)
            self._check_served(qs, mask, given)
            bound = _bound(mask, qs, ks.shape[1], self.description.reuses_masks)
            with torch.autocast(q.device.type, enabled=False) if autocast else nullcontext():
                out, lse, kernel = self.backend.run(qs, ks, vs, bound, given, **self.options)
            _record(self.name, kernel)
            if sinks is not None and not fuses:
                out, lse = with_sinks(out, lse, relative_sinks(whole, bound.last))
            if absolute and given.key_bias is not None:
                lse = lse + reference(given.key_bias, bound.last)
            outs.append(exchange.output(out))
            lses.append(lse)
            # free before the next part is exchanged
            del part, qs, ks, vs, out, lse
        return exchange.joined(outs), lses[0] if len(lses) == 1 else torch.cat(lses, dim=1)

    def scored(self, score_mod: Mod | None = None, mask_mod: Mod | None = None) -> Attention:
        """Return one with these functions, as of `register_score`; they may use tensors that train.

        Raises ValueError if the backend takes none, or has others already.
        """
        _refuse(self.name, frozenset({"score"}))
        other = f"attention.options.score={self.options.get('score', 'none')}"
        refuse((not other.endswith("=none"), f"{other}: a mixer has its own; leave it out"))
        scored = copy(self)
        scored.options = self.options | {"score": (score_mod, mask_mod)}
        return scored

    def decode(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, scores: Scores) -> Tensor:
        """Return out (B, 1, Hq, D) of new tokens, see `Backend.decode`."""
        with torch.autocast(q.device.type, enabled=False):
            given = scaled(scores, q)._replace(sinks=None)
            out, lse, _ = self.backend.decode(q, k, v, mask, given, **self.options)
        if scores.sinks is not None:
            out, _ = with_sinks(out, lse, relative_sinks(scores, mask.last))
        return out

    def backward(
        self, do: Tensor, saved: tuple[Any, ...], mask: Mask, scores: Scores = PLAIN
    ) -> Gradients:
        """Return the gradients for `do`, that of the `out` of an earlier call, from its `Saved`."""
        # Without lse, or a backward of its own, a backend runs forward again
        q, k, v, out, lse = saved
        traits = self.description
        has_backward = traits.has_backward and (scores.sinks is None or traits.fuses_sinks)
        inputs = q, k, v, scores.sinks, scores.key_bias
        leaves: list[Any] = [x if x is None else x.detach().requires_grad_() for x in inputs]
        given = scaled(Scores(*scores[:2], *leaves[3:]), q)
        if lse is None or not has_backward:
            # the forward again, with a graph of its own
            with torch.enable_grad():
                again = self(leaves[0], leaves[1], leaves[2], mask, given)
            found = iter(torch.autograd.grad(again, [x for x in leaves if x is not None], do))
            total: list[Any] = [x if x is None else next(found) for x in leaves]
            return Gradients(*total)
        # autocast: saved tensors may be wider than the kernel's inputs
        q16, k16, v16 = (x.to(out.dtype) for x in (q, k, v))
        exchange, heads = mask.exchange or WHOLE_ROWS, 0
        parts: list[Gradients] = []
        with torch.enable_grad():  # of the exchange alone
            own = exchanged(given, exchange)
        for qs, ks, vs, dos, outs in exchange.parts(q16, k16, v16, do, out):
            bound = mask.bind(qs.shape[0], qs.shape[1], ks.shape[1], qs.device)
            lses = lse[:, heads : heads + qs.shape[2]].contiguous()
            given = own.of_heads(heads, qs.shape[2])
            heads += qs.shape[2]
            with torch.autocast(q.device.type, enabled=False):
                part = Saved(qs, ks, vs, outs, lses)
                gradients = self.backend.backward(dos, part, bound, given, **self.options)
            dqkv = exchange.gradients(*gradients[:3], k.shape[2])
            parts.append(Gradients(*dqkv, *gradients[3:]))
            # free before the next part is exchanged
            del qs, ks, vs, dos, outs, part, gradients, dqkv
        *of_qkv, dsinks, dbias = zip(*parts, strict=True)
        total = [exchange.joined(d).to(x.dtype) for d, x in zip(of_qkv, leaves, strict=False)]
        # the exchange in reverse: other ranks have the gradients of other heads
        mine: tuple[Any, ...] = own[2:]
        for x, y, d, dim in zip(leaves[3:], mine, (dsinks, dbias), (0, 1), strict=True):
            total.append(x if x is None else torch.autograd.grad(y, x, torch.cat(d, dim))[0])
        return Gradients(*total)

    def _check_served(self, q: Tensor, mask: Mask, scores: Scores) -> None:
        """Raise ValueError if the backend cannot serve such a call; its answers are remembered."""
        # read at each call: a program may change it
        deterministic = torch.are_deterministic_algorithms_enabled()
        of_tensors = q.device, q.dtype, q.shape[3]
        parts = [x is None for x in scores[1:]]
        properties = (*of_tensors, mask.kind, mask.window, deterministic, *parts)
        is_compiling = torch.compiler.is_compiling()  # compiled code asks again at each trace
        if is_compiling or properties not in self._served:
            request = AttentionRequest(*of_tensors, mask, self.options, deterministic, scores.parts)
            _refuse(self.name, scores.parts, request)
            if not is_compiling:
                self._served.add(properties)


def scaled(scores: Scores, q: Tensor) -> Scores:
    """Return `scores` as a backend gets them: with the scale of q (B, T, H, D)."""
    return scores if scores.scale is not None else Scores(q.shape[3] ** -0.5, *scores[1:])


def exchanged(scores: Scores, exchange: Exchange) -> Scores:
    """Return `scores` with the sinks and the bias of this rank's heads, and of the keys it sees."""
    scale, softcap, sinks, bias = scores
    if sinks is not None:
        sinks = exchange.own_heads(sinks.float()).contiguous()
    if bias is not None:
        if exchange is not WHOLE_ROWS:
            # as keys of one channel; the exchange wants queries and values, too
            keys = bias.transpose(1, 2)[..., None]
            parts = [part[1] for part in exchange.parts(keys, keys, keys)]
            bias = torch.cat(parts, dim=2)[..., 0].transpose(1, 2)
        # kernels take any stride of the batch, such as 0, and a row's keys one after the other
        bias = bias if bias[0].is_contiguous() else bias.contiguous()
    return Scores(scale, softcap, sinks, bias)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask | None = None,
    backend: str = "flash",
    scale: float | None = None,
    return_lse: bool = False,
    sinks: Tensor | None = None,
    softcap: float | None = None,
    key_bias: Tensor | None = None,
    **options: Any,
) -> Any:
    """Compute exact softmax attention: q (B, Tq, Hq, D), k and v (B, Tk, Hkv, D) → out like q.

    Hq is a multiple of Hkv (grouped-query). fp32, bf16, fp16; any strides; any length from 1 up.
    `mask` defaults to `Mask.causal()`, `scale` to D**-0.5. Autocast casts the inputs first.

    With `return_lse` also the log-sum-exp of each query's scores, (B, Hq, Tq) float32, natural log.
    Its gradient flows in naive, flash and flex, not in sdpa and flash_attn. A query that sees
    nothing gets output 0, lse -inf and zero gradients.

    `sinks` (Hq,): a logit for each query head that joins its softmax and has no value, as in
    gpt-oss; the lse then includes it. Its gradient takes flash, or a backend whose lse has one.
    `softcap` c: scores become c · tanh(score / c) before the mask, as in Gemma 2.

    `key_bias` (B or 1, Hq, Tk) float32, finite: added to the scores of each key, after scale and
    softcap. ALiBi is slope · position, the forgetting transformer minus the cumulative log of its
    gates. Kernels compute with differences to a row's last key, so large biases lose no digits.

    Raises ValueError for wrong shapes and for requests that the backend cannot serve.
    """
    # layers, which know their shapes, call `Attention` without this check
    _check_inputs(q, k, v, scale=scale, softcap=softcap)
    mask = Mask.of(mask)
    # calls without options share an Attention and its answers
    if options or torch.compiler.is_compiling() or backend not in _backends:
        caller = Attention(backend, options)
    else:
        caller = _caller(_backends[backend], backend)
    if sinks is not None and tuple(sinks.shape) != (q.shape[2],):
        raise ValueError(f"sinks of shape {tuple(sinks.shape)}: one for each of {q.shape[2]} heads")
    if key_bias is not None:
        sizes = q.shape[0], q.shape[2], k.shape[1]
        if key_bias.dtype != torch.float32 or key_bias.shape not in (sizes, (1, *sizes[1:])):
            given = f"{tuple(key_bias.shape)} {key_bias.dtype}"
            raise ValueError(f"key_bias must be {sizes} or of one batch, float32, got {given}")
        key_bias = key_bias.expand(sizes)
    # this is all: at most five calls to the launch
    scores = Scores(scale, softcap, sinks, key_bias)
    out, lse = caller.with_lse(q, k, v, mask, scores, absolute=return_lse)
    return (out, lse) if return_lse else out


@functools.lru_cache(maxsize=16)
def _caller(backend: Backend, name: str) -> Attention:
    """Return the Attention without options that `attention()` calls, with its answers."""
    assert _backends[name] is backend
    return Attention(name)


def _bound(mask: Mask, q: Tensor, keys: int, reuses: bool) -> Mask:
    """Return `mask` bound to q (B, Tq, Hq, D) and so many keys."""
    # Binding launches several small kernels, and callers of `attention()` with a causal or full
    # mask would pay for them in every call. Such masks depend on lengths alone, so the last ones
    # are reused, on the same stream: other streams do not wait for those kernels.
    # packed documents change with every batch, and are bound by the caller
    is_plain = mask.qfirst is None and mask.exchange is None and mask.kind in ("causal", "full")
    reuses = reuses and is_plain and unobserved(q)
    # a graph would outlive the cached tensors
    if not reuses or (q.is_cuda and torch.cuda.is_current_stream_capturing()):
        return mask.bind(q.shape[0], q.shape[1], keys, q.device)
    stream = stream_of(q.get_device()) if q.is_cuda else 0
    inference = torch.is_inference_mode_enabled()
    return _plain_mask(mask.kind, mask.window, q.shape[1], keys, q.device, stream, inference)


@functools.lru_cache(maxsize=4)  # 16 bytes a token each
def _plain_mask(
    kind: str, window: int | None, queries: int, keys: int, device: torch.device, *_: Any
) -> Mask:
    return Mask(kind, window).bind(1, queries, keys, device)


def _lookup(backend: str, options: Mapping[str, Any]) -> Backend:
    """Return the backend of that name; ValueError if it or one of the options does not exist."""
    if backend not in _backends and backend not in registered():
        problem = "is for runs alone" if backend == AUTO else "is not a backend"
        raise ValueError(f"attention={backend} {problem}; use {', '.join(sorted(_backends))}")
    refuse_first(AttentionConfig(backend, dict(options)).problems())
    return _backends[backend]


def _refuse(name: str, parts: frozenset[str], request: AttentionRequest | None = None) -> None:
    reason = DESCRIPTIONS[name].lacks(parts) or (request and _backends[name].refusal(request))
    refuse((reason, f"attention={name} cannot run here: {reason}"))


def _record(backend: str, kernel: str) -> None:
    _ran[backend] = kernel


# As torch.compiler.assume_constant_result does, without importing torch's compiler: that takes as
# long as importing torch.
_record._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _check_inputs(q: Tensor, k: Tensor, v: Tensor, **factors: float | None) -> None:
    qs, ks = q.shape, k.shape
    fit = len(qs) == 4 and len(ks) == 4 and ks == v.shape
    # Libraries below divide by lengths: an empty tensor would end the process
    if not fit or qs[0] != ks[0] or qs[3] != ks[3] or 0 in qs or 0 in ks:
        raise ValueError(
            "attention takes q (B, Tq, Hq, D) and k, v (B, Tk, Hkv, D), each from 1 up, "
            f"got {tuple(qs)}, {tuple(ks)}, {tuple(v.shape)}"
        )
    if qs[2] % ks[2]:
        raise ValueError(f"{qs[2]} query heads are not a multiple of {ks[2]} key-value heads")
    if not q.dtype == k.dtype == v.dtype and not torch.is_autocast_enabled(q.device.type):
        raise ValueError(f"q, k and v must have one dtype, got {q.dtype}, {k.dtype}, {v.dtype}")
    if q.dtype not in DTYPES:
        raise ValueError(f"attention takes fp32, bf16 or fp16, got {q.dtype}")
    # A single query is a step of decoding, and a cache has more keys than queries
    if 1 < qs[1] < qs[2] and ks[1] <= qs[1]:
        _warn_of_layout(tuple(qs))
    for name, factor in factors.items():
        if isinstance(factor, Tensor) or not (factor is None or 0 < factor < float("inf")):
            raise ValueError(f"{name}={factor} must be a number above 0; a tensor gets no gradient")


@functools.cache  # a warning for each shape
def _warn_of_layout(shape: tuple[int, ...]) -> None:
    warnings.warn(
        f"attention: q {shape} is read as {shape[1]} tokens of {shape[2]} heads; transpose torch's "
        "order, (B, H, T, D)",
        stacklevel=4,
    )
