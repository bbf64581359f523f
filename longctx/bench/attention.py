"""Forward and backward of every attention backend, side by side: TFLOP/s, and ratios to FlashAttention-2.

FLOPs are those of the visible pairs, 4·pairs·H·D forward and 2.5 times that backward, whatever a kernel recomputes. Peers are
timed in turn, repeat by repeat, on random data, so that all see the same clocks; figures are medians. The chip's own rate for a
large matrix product is taken in the same process and drawn in as the ceiling.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

MASKS = ("causal", "full", "window", "documents")
PEERS: dict[str, tuple[str, dict[str, Any]]] = {
    "flash": ("flash", {}),
    "sdpa-flash": ("sdpa", {"kernel": "flash"}),
    "sdpa-cudnn": ("sdpa", {"kernel": "cudnn"}),
    "flex": ("flex", {}),
    "flash_attn": ("flash_attn", {}),
}
REFERENCE = "sdpa-flash"


@dataclass(frozen=True)
class Options:
    """What to measure; `row_tokens` is batch × length up to that length, one row above it."""

    lengths: tuple[int, ...] = field(default=(1024, 2048, 4096, 8192, 16384), metadata={"help": "tokens in a row"})
    head_sizes: tuple[int, ...] = field(default=(64, 128), metadata={"help": "head sizes"})
    masks: tuple[str, ...] = field(default=("causal",), metadata={"help": " | ".join(MASKS)})
    backends: tuple[str, ...] = field(default=tuple(PEERS), metadata={"help": "those that can run here"})
    channels: int = field(default=2048, metadata={"help": "query heads × head size"})
    group: int = field(default=1, metadata={"help": "query heads per key-value head"})
    row_tokens: int = field(default=16384, metadata={"help": "batch × length, up to that length"})
    window: int = field(default=1024, metadata={"help": "keys of masks=window"})
    repeats: int = field(default=30, metadata={"help": "timed runs of each"})
    out: str = field(default="results/attention", metadata={"help": "writes .json and .png"})


def run(options: Options, command: str) -> None:
    """Measure, print a table, write `out`.json and `out`.png; ValueError where there is no GPU or a name is unknown."""
    import torch
    import torch._functorch.config as functorch_config

    for name, given, known in (("masks", options.masks, MASKS), ("backends", options.backends, PEERS)):
        if unknown := [x for x in given if x not in known]:
            raise ValueError(f"{name}={unknown[0]}: choose from {', '.join(known)}")
    if not torch.cuda.is_available():
        raise ValueError("bench attention measures GPU kernels and there is no CUDA GPU here")
    from longctx.bench.report import machine, table, write_json

    functorch_config.donated_buffer = False  # lets a compiled backward be timed again and again
    ceiling = matmul_tflops()
    rows = []
    for mask in options.masks:
        for head_dim in options.head_sizes:
            for length in options.lengths:
                rows += measure(options, mask, head_dim, length)
                table(rows[-len(options.backends) :], f"{mask}, head size {head_dim}, {length:,} tokens")
    found = {"command": command, **machine(), "matmul_tflops": ceiling, "rows": rows}
    print(f"this chip's bf16 matrix product: {ceiling:.0f} TFLOP/s")
    write_json(Path(f"{options.out}.json"), found)
    plot(found, Path(f"{options.out}.png"))
    print(f"wrote {options.out}.json and {options.out}.png")


def measure(options: Options, mask_name: str, head_dim: int, length: int) -> list[dict[str, Any]]:
    """One row per backend: milliseconds, TFLOP/s, and the ratio to torch's FlashAttention-2 in the same run."""
    import torch

    from longctx.attention import attention, kernels_run

    B, H = max(1, options.row_tokens // length), options.channels // head_dim
    mask = build_mask(options, mask_name, B, length)
    flops = 4 * mask.pairs(B, length, length) * H * head_dim
    bound = mask.bind(B, length, length, "cuda")
    shapes = [(B, length, h, head_dim) for h in (H, H // options.group, H // options.group)]
    q, k, v = (torch.randn(s, device="cuda", dtype=torch.bfloat16, requires_grad=True) for s in shapes)
    do = torch.randn(shapes[0], device="cuda", dtype=torch.bfloat16)
    calls: dict[Any, Callable[[], Any]] = {}
    skipped: dict[str, str] = {}
    kernels: dict[str, str] = {}
    for name in options.backends:
        backend, extra = PEERS[name]

        forward = partial(attention, q, k, v, mask=bound, backend=backend, **extra)
        try:
            out = forward()
        except ValueError as error:
            skipped[name] = str(error)
            continue
        kernels[name] = kernels_run()[backend]
        calls[name, "forward"] = forward
        calls[name, "backward"] = partial(torch.autograd.grad, out, (q, k, v), do, retain_graph=True)
    times = medians(calls, options.repeats)
    rows = []
    for name in options.backends:
        row: dict[str, Any] = {
            "mask": mask_name,
            "head_size": head_dim,
            "tokens": length,
            "batch": B,
            "heads": H,
            "backend": name,
        }
        if name in skipped:
            rows.append(row | {"skipped": skipped[name]})
            continue
        row["kernel"] = kernels[name]
        forward_ms, backward_ms = times[name, "forward"], times[name, "backward"]
        for part, ms, work in (
            ("forward", forward_ms, 1),
            ("backward", backward_ms, 2.5),
            ("both", forward_ms + backward_ms, 3.5),
        ):
            row[f"{part}_ms"], row[f"{part}_tflops"] = round(ms, 4), round(work * flops / ms / 1e9, 1)
            if (REFERENCE, "forward") in times:
                peer = sum(times[REFERENCE, p] for p in (("forward", "backward") if part == "both" else (part,)))
                row[f"{part}_ratio"] = round(peer / ms, 3)
        rows.append(row)
    return rows


def build_mask(options: Options, name: str, B: int, length: int) -> Any:
    """The mask of a benchmark; "documents" are rows of the embedded corpus, packed as training packs them."""
    import torch

    from longctx.attention import Mask

    if name == "documents":
        from longctx.data import load
        from longctx.data.config import DataConfig

        rows = load(DataConfig(), length).train
        return Mask.documents(torch.stack([rows[i]["doc_ids"] for i in range(B)]))
    return {"causal": Mask.causal(), "full": Mask.full(), "window": Mask.causal(options.window)}[name]


def medians(calls: dict[Any, Any], repeats: int) -> dict[Any, float]:
    """Median milliseconds of each call by CUDA events, all calls in turn in every repeat, after warming up each."""
    import torch

    for call in calls.values():
        for _ in range(3):
            call()
    marks: dict[Any, list[Any]] = {key: [] for key in calls}
    for _ in range(repeats):
        for key, call in calls.items():
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            call()
            end.record()
            marks[key].append((start, end))
    torch.cuda.synchronize()
    return {key: sorted(s.elapsed_time(e) for s, e in pairs)[len(pairs) // 2] for key, pairs in marks.items()}


def matmul_tflops(n: int = 8192) -> float:
    """This GPU's rate for an (n, n) bf16 matrix product of random data, in TFLOP/s."""
    import torch

    a, b = (torch.randn(n, n, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return 2 * n**3 / medians({"matmul": lambda: a @ b}, 20)["matmul"] / 1e9


def plot(found: dict[str, Any], path: Path) -> None:
    """TFLOP/s over length: a panel per mask, head size and direction, a line per backend, the matmul rate drawn in."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    from longctx.bench.report import save_figure

    rows = [row for row in found["rows"] if "skipped" not in row]
    panels = sorted({(row["mask"], row["head_size"]) for row in rows})
    figure, axes = plt.subplots(
        2, len(panels), figsize=(4.6 * len(panels), 7), sharex="col", sharey=True, squeeze=False
    )
    for column, (mask, head_size) in enumerate(panels):
        for line, part in enumerate(("forward", "backward")):
            axis = axes[line][column]
            for backend in dict.fromkeys(row["backend"] for row in rows):
                points = [r for r in rows if (r["mask"], r["head_size"], r["backend"]) == (mask, head_size, backend)]
                if not points:
                    continue
                kernel = points[0].get("kernel", "")
                label = backend if backend == "flash" or not kernel else f"{backend}: {kernel}"
                style = {"linewidth": 2.6, "zorder": 3} if backend == "flash" else {"linewidth": 1.4}
                axis.plot(
                    [r["tokens"] for r in points],
                    [r[f"{part}_tflops"] for r in points],
                    marker="o",
                    label=label,
                    **style,
                )
            axis.axhline(found["matmul_tflops"], color="0.4", linestyle="--", linewidth=1, label="matrix product")
            axis.set_title(f"{part}, {mask}, head size {head_size}", fontsize=10)
            axis.set_xscale("log", base=2)
            ticks = sorted({r["tokens"] for r in rows})
            axis.set_xticks(ticks, [f"{n // 1024}K" if n >= 1024 else str(n) for n in ticks])
            axis.set_ylim(bottom=0)
            axis.grid(alpha=0.3)
        axes[1][column].set_xlabel("tokens in a row")
    for row_axes in axes:
        row_axes[0].set_ylabel("TFLOP/s of visible pairs")
    axes[0][0].legend(fontsize=8)
    figure.suptitle(
        f"Attention on one {found['gpu']}, bf16, torch {found['torch']}, triton {found['triton']}", fontsize=11
    )
    figure.tight_layout()
    save_figure(figure, path)
