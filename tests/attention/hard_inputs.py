"""Inputs that are hard for flash, at random sizes: memory of NaN around and between what counts,
addresses that no tensor map takes, lengths and masks of every kind.

Each check returns figures, so that the same one can be repeated a few times or a thousand.
"""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from longctx.attention import Mask, attention, naive
from tests.attention.rule import DEVICE, Case, inputs

NAMES = ("out", "dq", "dk", "dv")
MASKS = ("causal", "full", "window", "documents", "documents-window", "intervals")


@contextmanager
def using(kernel: str) -> Iterator[dict[str, str]]:
    """The options of `attention` that choose `kernel`: portable, hopper, ordered or auto."""
    torch.use_deterministic_algorithms(kernel == "ordered", warn_only=True)
    try:
        if kernel in ("auto", "ordered"):
            yield {}
        else:
            yield {"kernel": kernel}
    finally:
        torch.use_deterministic_algorithms(False)


def random_case(draw: random.Random, longest: int, head_dim: int) -> Case:
    """A case of random lengths, heads and mask; half of the lengths are powers of 2, give or take
    one.
    """
    kind = draw.choice(MASKS)
    Tq, Tk = _length(draw, longest), _length(draw, longest)
    if kind.startswith("documents"):
        Tk = Tq
    group = draw.choice((1, 4))
    window = draw.randint(1, longest) if "window" in kind else None
    mask = {"window": "causal", "documents-window": "documents"}.get(kind, kind)
    rows = 2 if Tq * Tk < 1 << 22 else 1
    return Case(rows, Tq, Tk, 4, 4 // group, head_dim, mask, window)


def _length(draw: random.Random, longest: int) -> int:
    near = 2 ** draw.randint(0, longest.bit_length() - 1) + draw.randint(-1, 1)
    return min(max(draw.choice((near, draw.randint(1, longest))), 1), longest)


def visible(case: Case) -> Tensor:
    """(B or 1, 1, Tq, Tk) bool."""
    return naive.visible(case.build_mask().bind(case.B, case.Tq, case.Tk, DEVICE), case.Tk)


def differentiated(tensors: list[Tensor], attend: Callable[..., Tensor]) -> list[Tensor]:
    """out, dq, dk, dv of `attend` on q, k, v and the gradient do."""
    q, k, v = (x.detach().requires_grad_() for x in tensors[:3])
    out = attend(q, k, v)
    grads = torch.autograd.grad(out, (q, k, v), tensors[3])
    return [x.detach().double() for x in (out, *grads)]


def flash(tensors: list[Tensor], mask: Mask, options: dict[str, str]) -> list[Tensor]:
    """out, dq, dk, dv of flash, or of the backend in `options`."""
    return differentiated(tensors, lambda q, k, v: attention(q, k, v, mask=mask, **options))


def sdpa(tensors: list[Tensor], seen: Tensor) -> list[Tensor]:
    """out, dq, dk, dv of torch's fused kernel, which takes any mask; queries that see nothing,
    which it makes NaN, look at key 0 and count for nothing.
    """
    blind = ~seen.any(-1, keepdim=True)
    seen = seen | (blind & (torch.arange(seen.shape[-1], device=DEVICE) == 0))
    kept = ~blind.transpose(1, 2)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        group = q.shape[2] // k.shape[2]
        heads = [q, k.repeat_interleave(group, 2), v.repeat_interleave(group, 2)]
        heads = [x.transpose(1, 2) for x in heads]
        with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
            out = F.scaled_dot_product_attention(
                *heads, attn_mask=seen.expand(-1, *heads[0].shape[1:2], -1, -1)
            )
        return out.transpose(1, 2) * kept

    return differentiated(tensors, attend)


def error_ratio(case: Case, dtype: torch.dtype, kernel: str = "auto") -> tuple[float, str]:
    """The largest of error / (2 · SDPA's error + a rounding floor) over out, dq, dk and dv, errors
    against naive attention in fp32; and whose it is.
    """
    tensors = inputs(case, dtype)
    exact = differentiated(
        [x.float() for x in tensors],
        lambda q, k, v: attention(q, k, v, mask=case.build_mask(), backend="naive"),
    )
    plain = sdpa(tensors, visible(case))
    with using(kernel) as options:
        actual = flash(tensors, case.build_mask(), options)
    ratios = []
    for name, x, y, z in zip(NAMES, actual, plain, exact, strict=True):
        floor = torch.finfo(dtype).eps * (8 + 2 * z.abs().max())
        ratio = (x - z).abs().max() / (2 * (y - z).abs().max() + floor)
        ratios.append((float(ratio.nan_to_num(float("inf"))), name))
    return max(ratios)


def surrounded(x: Tensor, poison: float = float("nan")) -> Tensor:
    """x as a view into a buffer of `poison`, which lies between its rows and heads and past its
    ends.
    """
    B, T, H, D = x.shape
    buffer = torch.full((B + 1, T + 50, H + 2, D + 8), poison, device=x.device, dtype=x.dtype)
    return buffer[:B, 25 : 25 + T, 1 : 1 + H, :D].copy_(x)


def poisoned(case: Case, dtype: torch.dtype, kernel: str = "auto") -> dict[str, tuple[bool, float]]:
    """What NaN changes in what does not see it: output → whether its bits are the same, and by how
    much it differs.

    NaN stands around the tensors, in the last document, which is padding, and in all keys that no
    query sees. The case's mask is of documents or of intervals.
    """
    tensors = [surrounded(x) for x in inputs(case, dtype)]
    mask, seen = case.build_mask(), visible(case).expand(case.B, -1, -1, -1)
    hidden = ~seen.any(2)[:, 0]
    padding = torch.zeros(case.B, case.Tq, dtype=torch.bool, device=DEVICE)
    if mask.doc_ids is not None:
        padding = (mask.doc_ids == mask.doc_ids[:, -1:]).to(DEVICE)
    with using(kernel) as options:
        clean = flash(
            [x.clone(memory_format=torch.contiguous_format) for x in tensors], mask, options
        )
        q, k, v, do = tensors
        for x in (k, v):
            x[hidden] = float("nan")
        if padding.any():
            for x in tensors:
                x[padding] = float("nan")
        dirty = flash([q, k, v, do], mask, options)
    differences = {}
    for name, x, y in zip(NAMES, clean, dirty, strict=True):
        counts = ~padding if padding.any() else torch.ones(x.shape[:2], dtype=torch.bool)
        x, y = x[counts.to(DEVICE)], y[counts.to(DEVICE)]
        difference = (x - y).abs().nan_to_num(float("inf"))
        differences[name] = torch.equal(x, y), float(difference.max() if len(x) else 0)
    return differences


def addresses(x: Tensor) -> dict[str, Tensor]:
    """Views with the values of x (B, T, H, D) at addresses and strides that tensor maps do not
    take.
    """
    B, T, H, D = x.shape

    def off_by(elements: int) -> Tensor:
        buffer = torch.empty(x.numel() + elements, device=x.device, dtype=x.dtype)
        return buffer[elements:].view(x.shape).copy_(x)

    odd = torch.empty(B, T, H, D + 1, device=x.device, dtype=x.dtype)
    return {
        "base off by 2 bytes": off_by(1),
        "base off by 8 bytes": off_by(4),
        "odd strides": odd[..., :D].copy_(x),
        "heads first": x.transpose(1, 2).contiguous().transpose(1, 2),
        "channels apart": torch.stack([x, x], -1)[..., 0],
        "slice of a projection": torch.cat([x, x, x], 2)[:, :, H : 2 * H],
        "rows before tokens": x.transpose(0, 1).contiguous().transpose(0, 1),
    }


def expansions(x: Tensor) -> dict[str, Tensor]:
    """Views of x with one value, token, head or row in the place of all."""
    return {
        "one row": x[:1].expand_as(x),
        "one token": x[:, :1].expand_as(x),
        "one head": x[:, :, :1].expand_as(x),
        "one number": x[:1, :1, :1, :1].expand_as(x),
    }


def misaddressed(
    case: Case, dtype: torch.dtype, kernel: str = "auto", backend: str = "flash"
) -> dict[str, float]:
    """Address → the largest difference of out, dq, dk, dv from what contiguous copies give; bits
    count where the kernel promises them.
    """
    tensors = inputs(case, dtype)
    views = [addresses(x) | expansions(x) for x in tensors]
    differences = {}
    with using(kernel) as options:
        for how in views[0]:
            given = [x[how] for x in views]
            copies = [x.contiguous().clone() for x in given]
            expected = flash(copies, case.build_mask(), options | {"backend": backend})
            actual = flash(given, case.build_mask(), options | {"backend": backend})
            differences[how] = max(
                float((x - y).abs().max().nan_to_num(float("inf")))
                for x, y in zip(actual, expected, strict=True)
            )
    return differences


def other_bits(case: Case, dtype: torch.dtype, count: int, kernel: str = "auto") -> dict[str, int]:
    """How many of `count` repeats give other bits than the first, by output."""
    tensors, mask = inputs(case, dtype), case.build_mask()
    differing = dict.fromkeys(NAMES, 0)
    with using(kernel) as options:
        expected = flash(tensors, mask, options)
        for _ in range(count):
            for name, x, y in zip(NAMES, flash(tensors, mask, options), expected, strict=True):
                differing[name] += not torch.equal(x, y)
    return differing
