"""Forward and backward of every attention backend, side by side: TFLOP/s, ratios, and shares of the
chip's own matmul rate. models=all measures the layers of models, with their windows and sinks.

FLOPs are those of the visible pairs, 4·pairs·H·D forward and 2.5 times that backward, whatever a
kernel recomputes. All backends get the same random inputs and are timed in turn, round by round, so
that all see the same clocks; figures are medians of the device's own time. The matmul rate is that
of a large bf16 product in the same process. The whole takes about `seconds`: when they run short
there are fewer rounds, then fewer cases.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib.metadata import distributions
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import yaml

from benchmarks import report
from benchmarks.report import machine, write_json
from benchmarks.timing import medians, samples, spread
from longctx.config.fields import Group, key
from longctx.tables import grid

Row = dict[str, Any]
MASKS = ("causal", "full", "documents", "window")
# → matrix products, in units of the forward's
PARTS = {"forward": 1.0, "backward": 2.5, "both": 3.5}
PEERS: dict[str, tuple[str, dict[str, Any]]] = {
    "flash": ("flash", {}),
    "flash-deterministic": ("flash", {}),
    "flash-pruned": ("flash", {"prune": True}),
    "flash-portable": ("flash", {"kernel": "portable"}),
    "flash-ampere": ("flash", {"kernel": "ampere"}),
    "flash-hopper": ("flash", {"kernel": "hopper"}),
    "sdpa-flash": ("sdpa", {"kernel": "flash"}),
    "sdpa-cudnn": ("sdpa", {"kernel": "cudnn"}),
    "flex": ("flex", {}),
    "flash-attention-4": ("flash_attention_4", {}),
    "cudnn-flex": ("cudnn_flex", {}),
    **{f"flash-attention-{version}": ("flash_attn", {"version": version}) for version in (3, 2)},
}
PACKAGES = ("flash-attn-4", "nvidia-cudnn-frontend", "nvidia-cutlass-dsl", "flash-attn")
FAR_OFF = 0.2  # relative differences to the first backend's results, summed; rounding makes 0.05
FIGURES = ("ms", "tflops", "share", "ratio")
COLUMNS = ["backend", *(f"{part}_{of}" for part in PARTS for of in FIGURES), "skipped"]
DOCUMENT = 3000  # tokens, if a case has no other ones


class Case(NamedTuple):
    """Heads and tokens, and which keys a query sees: the last `window` of its `document`."""

    mask: str
    head_size: int
    tokens: int
    batch: int
    heads: int
    kv_heads: int
    window: int | None = None
    document: int | None = None  # tokens in each; None: DOCUMENT
    sinks: bool = False
    softcap: float | None = None
    half_lives: tuple[float, float] | None = None  # of a forgetting head, shortest and longest


def layer(heads: int, kv_heads: int, head_size: int, tokens: int = 0, **more: Any) -> Case:
    """Return the case of a model's layer, in one sequence if `more` has no `batch`."""
    mask = "documents" if "document" in more else "window" if "window" in more else "causal"
    tokens = tokens or (16384 if mask == "causal" else 65536)
    return Case(mask, head_size, tokens, more.pop("batch", 1), heads, kv_heads, **more)


LAYERS = yaml.safe_load(Path(__file__).with_name("layers.yaml").read_text())
MODELS = {name: layer(**keys) for name, keys in LAYERS.items()}


@dataclass(frozen=True)
class Options(Group):
    """What to measure; `row_tokens` is batch × length up to that length, one row above it."""

    lengths: tuple[int, ...] = key((1024, 4096, 16384, 65536), "tokens in a row")
    head_sizes: tuple[int, ...] = key((64, 128), "head sizes")
    masks: tuple[str, ...] = key(MASKS, "documents: packed, of 3,000 tokens", choices=MASKS)
    backends: tuple[str, ...] = key(tuple(PEERS), "those that can run here", choices=PEERS)
    reference: str = key("sdpa-flash", "ratios are to its times", choices=PEERS)
    channels: int = key(2048, "query heads × head size")
    row_tokens: int = key(16384, "batch × length, up to that length")
    window: int = key(1024, "keys of masks=window")
    models: tuple[str, ...] = key((), "layers of models instead; all", choices=("all", *MODELS))
    repeats: int = key(30, "rounds at most; at least 3")
    seconds: int = key(170, "for everything, about")
    out: str = key("results/attention", "writes .json")


def run(options: Options, command: str) -> None:
    """Measure, print tables, write `out`.json."""
    import torch

    for size in options.head_sizes:
        if options.channels % size:
            raise ValueError(f"channels={options.channels}: no multiple of head_sizes={size}")
    if not torch.cuda.is_available():
        raise ValueError("attention: measures GPU kernels, and there is no CUDA GPU here")
    ceiling = matmul_tflops()
    print(f"this chip's bf16 matrix product: {ceiling:.0f} TFLOP/s")
    installed = {found.name: found.version for found in distributions() if found.name in PACKAGES}
    result = {"command": command, **machine(), "peers": installed, "matmul_tflops": ceiling}
    result |= {"reference": options.reference, "rows": []}
    for row in rows_of(options, ceiling):
        result["rows"].append(row)
        write_json(Path(f"{options.out}.json"), result)  # an interruption loses no row
    if options.models:
        print(table(result["rows"]))
    print(f"wrote {options.out}.json")


def rows_of(options: Options, ceiling: float, device: str = "cuda") -> Iterator[Row]:
    """Yield the rows of all cases, and print those of each."""
    import torch._functorch.config as functorch_config

    end = time.perf_counter() + options.seconds
    cases = cases_of(options)
    for number, (title, case) in enumerate(cases.items()):
        seconds = (end - time.perf_counter()) / (len(cases) - number)
        # Lets a compiled backward be timed again and again
        with functorch_config.patch(donated_buffer=False):
            rows = measure(options, case, seconds, device, ceiling)
        if options.models:
            rows = [{"model": title} | row for row in rows]
        grid(title, COLUMNS, rows)
        yield from rows


def cases_of(options: Options) -> dict[str, Case]:
    """Return title → case, of models or of masks × head sizes × lengths."""
    if options.models:
        chosen = MODELS if "all" in options.models else options.models
        return {name: MODELS[name] for name in chosen}
    cases = {}
    for mask, size, length in itertools.product(options.masks, options.head_sizes, options.lengths):
        heads, batch = options.channels // size, max(1, options.row_tokens // length)
        window = options.window if mask == "window" else None
        title = f"{mask}, head size {size}, {length:,} tokens"
        cases[title] = Case(mask, size, length, batch, heads, heads, window)
    return cases


def measure(options: Options, case: Case, seconds: float, device: str, ceiling: float) -> list[Row]:
    """Return a row per backend: milliseconds, TFLOP/s, share of the `ceiling`, ratio to the
    reference; or why it was `skipped`.

    Takes about `seconds`, as long as that is enough for three rounds.
    """
    import torch

    B, T, H, D = case.batch, case.tokens, case.heads, case.head_size
    of_case = {name: value for name, value in case._asdict().items() if value}
    rows: dict[str, Row] = {name: of_case | {"backend": name} for name in options.backends}
    if seconds < 0:
        over = f"{options.seconds} s were over; give more seconds="
        return [row | {"skipped": over} for row in rows.values()]
    mask = build_mask(case)
    flops = 4 * mask.pairs(B, T, T) * H * D
    bound = mask.bind(B, T, T, device)
    generator = torch.Generator(device).manual_seed(T)

    def random(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Any:
        return torch.randn(shape, generator=generator, device=device, dtype=dtype)

    q, k, v, do = (random(B, T, heads, D) for heads in (H, *[case.kv_heads] * 2, H))
    scores: dict[str, Any] = {"softcap": case.softcap} if case.softcap else {}
    if case.sinks:
        scores["sinks"] = random(H, dtype=torch.float32)
    if case.half_lives:
        half_lives = torch.logspace(*map(math.log2, case.half_lives), H, 2, device=device)
        forgotten = torch.arange(T, device=device) * (math.log(2) / half_lives[:, None])
        scores["key_bias"] = forgotten.repeat(B, 1, 1)
    inputs = [q, k, v, *(x for x in scores.values() if isinstance(x, torch.Tensor))]
    for x in inputs:
        x.requires_grad_()
    calls: dict[tuple[str, str], Callable[[], Any]] = {}
    end = time.perf_counter() + seconds
    expected: list[Any] = []
    for name, row in rows.items():
        try:
            row["kernel"], forward, backward = prepared(name, inputs, bound, scores, do)
            # A peer that reads its arguments otherwise computes something else
            actual = [x.detach() for x in (forward(), *backward())]
            expected = expected or actual
            pairs = zip(actual, expected, strict=True)
            off = sum(float((x - y).norm() / y.norm()) for x, y in pairs)
            if not off < FAR_OFF:  # NaN too
                raise ValueError(f"results {off:.0%} off those of the first backend")
        except Exception as error:  # whatever a peer may raise for what it cannot do
            row["skipped"] = f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]
            continue
        if name != "flash" and row["kernel"] == rows.get("flash", {}).get("kernel"):
            row["skipped"] = "what flash runs anyway"
            continue
        calls[name, "forward"], calls[name, "backward"] = forward, backward
    times = samples(calls, options.repeats, end - time.perf_counter()) if calls else {}
    ran_here = dict.fromkeys(name for name, _ in calls)
    middle = {call: median(of_call) for call, of_call in times.items()}
    middle |= {(x, "both"): middle[x, "forward"] + middle[x, "backward"] for x in ran_here}
    for name in ran_here:
        fill(rows[name], middle, options.reference, flops, ceiling)
        for part in ("forward", "backward"):
            rows[name][f"{part}_spread"] = round(spread(times[name, part]), 3)
    return list(rows.values())


def prepared(
    name: str, inputs: list[Any], mask: Any, scores: dict[str, Any], do: Any
) -> tuple[str, Callable[[], Any], Callable[[], Any]]:
    """The kernel that a backend runs, its forward and its backward, both run once.

    `inputs` are q, k, v and the tensors of `scores`.
    """
    import torch

    from longctx.attention import attention, kernels_run

    backend, extra = PEERS[name]
    q, k, v, *_ = inputs
    strict = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(strict or name == "flash-deterministic", warn_only=True)
    try:
        if backend in OTHERS:
            forward, ran = OTHERS[backend](q, k, v, mask=mask, **scores), name
            out = forward()
        else:
            forward = partial(attention, q, k, v, mask=mask, backend=backend, **scores, **extra)
            out = forward()  # which decides what backward will run
            ran = kernels_run()[backend]
            if "prune" in extra and "key_bias" in scores:
                ran += f", {kept(q, k, mask, scores['key_bias']):.0%} of pairs"
    finally:
        torch.use_deterministic_algorithms(strict)
    backward = partial(torch.autograd.grad, out, inputs, do, retain_graph=True)
    backward()
    if q.is_cuda:
        torch.cuda.synchronize()
    return ran, forward, backward


def kept(q: Any, k: Any, mask: Any, key_bias: Any) -> float:
    """Return the share of visible pairs that prune=True computes, of heads as many as key heads."""
    from longctx.kernels.attention import Intervals, Scores
    from longctx.kernels.attention.key_bias import first_keys

    ends = Intervals(mask.first, mask.last, mask.qfirst, mask.qlast, "long")
    first = first_keys(q, k, ends, Scores(q.shape[3] ** -0.5, None, None, key_bias))
    pairs = mask.pairs(q.shape[0], q.shape[1], k.shape[1]) * q.shape[2]
    return (mask.last + 1 - first).clamp(min=0).double().sum().item() / pairs


def flash_attention_4(
    q: Any, k: Any, v: Any, *, mask: Any, sinks: Any = None, softcap: float = 0.0
) -> Callable[[], Any]:
    """Return FlashAttention-4's own call: attention=flash_attn gives it no sinks and no softcap."""
    from flash_attn.cute import flash_attn_func, flash_attn_varlen_func

    window = (None, None) if mask.window is None else (mask.window - 1, 0)
    options: dict[str, Any] = {"causal": mask.kind != "full", "window_size": window}
    options |= {"learnable_sink": sinks, "softcap": softcap}
    if mask.kind != "documents":
        return lambda: flash_attn_func(q, k, v, **options)[0]
    options |= dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), mask.offsets)
    options |= dict.fromkeys(("max_seqlen_q", "max_seqlen_k"), max(mask.lengths))
    flat = [x.flatten(0, 1) for x in (q, k, v)]
    return lambda: flash_attn_varlen_func(*flat, **options)[0].view_as(q)


def cudnn_flex(q: Any, k: Any, v: Any, *, mask: Any) -> Callable[[], Any]:
    """Return the call of nvidia-cudnn-frontend's flex attention, with a plan made beforehand.

    It has no sinks, softcaps and biases of keys.
    """
    import torch
    from cudnn.flex_attention import create_mask_plan, flex_attn_func

    # The keys that a query sees are [0, 0) and [first, last + 1)
    ends = torch.stack([torch.zeros_like(mask.first), mask.first, mask.last + 1]).int()
    ends = ends.expand(3, *q.shape[:2]).reshape(1, 3, -1).contiguous()
    plan = create_mask_plan(ends, q, k, v)
    return lambda: flex_attn_func(q, k, v, mask_plan=plan)


OTHERS = {call.__name__: call for call in (flash_attention_4, cudnn_flex)}


def fill(row: Row, times: dict[Any, float], reference: str, flops: float, ceiling: float) -> None:
    """The figures of one backend, from the milliseconds of all."""
    for part, work in PARTS.items():
        own = times[row["backend"], part]
        rate = work * flops / own / 1e9
        row |= {
            f"{part}_ms": round(own, 4),
            f"{part}_tflops": round(rate, 1),
            f"{part}_share": round(rate / ceiling, 3),
        }
        if (reference, part) in times:
            row[f"{part}_ratio"] = round(times[reference, part] / own, 3)


def table(rows: list[Row]) -> str:
    """Return rows of models as Markdown: how many times as fast as each peer `flash` is."""
    peers = dict.fromkeys(row["backend"] for row in rows if PEERS[row["backend"]][0] != "flash")
    lines = []
    for model in dict.fromkeys(row["model"] for row in rows):
        of = {row["backend"]: row for row in rows if row["model"] == model}
        case = next(iter(of.values()))
        ran = [row for name, row in of.items() if name not in peers and "both_ms" in row]
        window = f", window {case['window']:,}" if "window" in case else ""
        heads = "{heads}/{kv_heads} of {head_size}".format(**case)
        line = {"layer": model, "heads": heads, "tokens": f"{case['tokens']:,}{window}"}
        line["kernel, ms"] = "; ".join(f"{row['backend']}, {row['both_ms']:.2f}" for row in ran)
        for name in peers:
            # From the times, since a ratio of three digits would be rounded twice
            theirs = of[name] if "both_ms" in of.get(name, {}) else None
            ratios = [theirs[f"{part}_ms"] / ran[0][f"{part}_ms"] for part in PARTS if theirs]
            line[f"× {name}"] = " / ".join(f"{ratio:.2f}" for ratio in ratios)
        lines.append(line)
    return report.table(lines)


def build_mask(case: Case) -> Any:
    """Return the mask of a case."""
    import torch

    from longctx.attention import Mask

    if case.mask == "documents":
        ids = torch.arange(case.tokens).expand(case.batch, -1) // (case.document or DOCUMENT)
        return Mask.documents(ids, case.window)
    return Mask.full() if case.mask == "full" else Mask.causal(case.window)


def matmul_tflops(device: str = "cuda", n: int = 8192) -> float:
    """This GPU's rate for a bf16 matrix product of random data, in TFLOP/s."""
    import torch

    a, b = (torch.randn(n, n, device=device, dtype=torch.bfloat16) for _ in range(2))
    return 2 * n**3 / medians({"matmul": lambda: a @ b}, 40)["matmul"] / 1e9
