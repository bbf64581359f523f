"""Forward and backward of every attention backend, side by side: TFLOP/s, ratios, and shares of the
chip's own matmul rate.

FLOPs are those of the visible pairs, 4·pairs·H·D forward and 2.5 times that backward, whatever a
kernel recomputes. All backends get the same random inputs and are timed in turn, round by round, so
that all see the same clocks; figures are medians of the device's own time. The matmul rate is that
of a large bf16 product in the same process. The whole takes about `seconds`: when they run short
there are fewer rounds, then fewer cases.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

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
    "flash-portable": ("flash", {"kernel": "portable"}),
    "flash-ampere": ("flash", {"kernel": "ampere"}),
    "flash-hopper": ("flash", {"kernel": "hopper"}),
    "sdpa-flash": ("sdpa", {"kernel": "flash"}),
    "sdpa-cudnn": ("sdpa", {"kernel": "cudnn"}),
    "flex": ("flex", {}),
    **{f"flash-attention-{version}": ("flash_attn", {"version": version}) for version in (4, 3, 2)},
}
COLUMNS = ["backend", *(f"{p} {of}" for p in PARTS for of in ("ms", "TFLOP/s", "×")), "skipped"]
BYTES_PER_TOKEN = 4  # of the embedded corpus, about


@dataclass(frozen=True)
class Options(Group):
    """What to measure; `row_tokens` is batch × length up to that length, one row above it."""

    lengths: tuple[int, ...] = key((1024, 4096, 16384, 65536), "tokens in a row")
    head_sizes: tuple[int, ...] = key((64, 128), "head sizes")
    masks: tuple[str, ...] = key(MASKS, "documents: packed as data=embedded is", choices=MASKS)
    backends: tuple[str, ...] = key(tuple(PEERS), "those that can run here", choices=PEERS)
    reference: str = key("sdpa-flash", "ratios are to its times", choices=PEERS)
    channels: int = key(2048, "query heads × head size")
    row_tokens: int = key(16384, "batch × length, up to that length")
    window: int = key(1024, "keys of masks=window")
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
    result = {"command": command, **machine(), "matmul_tflops": ceiling}
    result |= {"reference": options.reference, "rows": []}
    for row in rows_of(options, ceiling):
        result["rows"].append(row)
        write_json(Path(f"{options.out}.json"), result)  # an interruption loses no row
    print(f"wrote {options.out}.json")


def rows_of(options: Options, ceiling: float, device: str = "cuda") -> Iterator[Row]:
    """Yield the rows of all cases, and print those of each."""
    import torch._functorch.config as functorch_config

    end = time.perf_counter() + options.seconds
    cases = list(itertools.product(options.masks, options.head_sizes, options.lengths))
    for number, (mask, head_dim, length) in enumerate(cases):
        seconds = (end - time.perf_counter()) / (len(cases) - number)
        # Lets a compiled backward be timed again and again
        with functorch_config.patch(donated_buffer=False):
            rows = measure(options, mask, head_dim, length, seconds, device, ceiling)
        lines = [readable(row) for row in rows]
        grid(f"{mask}, head size {head_dim}, {length:,} tokens", COLUMNS, lines)
        yield from rows


def measure(
    options: Options,
    mask_name: str,
    head_dim: int,
    length: int,
    seconds: float,
    device: str,
    ceiling: float,
) -> list[Row]:
    """Return a row per backend: milliseconds, TFLOP/s, share of the `ceiling`, ratio to the
    reference; or why it was `skipped`.

    Takes about `seconds`, as long as that is enough for three rounds.
    """
    import torch

    B, H = max(1, options.row_tokens // length), options.channels // head_dim
    case = {"mask": mask_name, "head_size": head_dim, "tokens": length, "batch": B, "heads": H}
    rows: dict[str, Row] = {name: case | {"backend": name} for name in options.backends}
    if seconds < 0:
        over = f"{options.seconds} s were over; give more seconds="
        return [row | {"skipped": over} for row in rows.values()]
    mask = build_mask(options, mask_name, B, length)
    flops = 4 * mask.pairs(B, length, length) * H * head_dim
    bound = mask.bind(B, length, length, device)
    generator = torch.Generator(device).manual_seed(length)
    shape, kind = (B, length, H, head_dim), {"device": device, "dtype": torch.bfloat16}
    q, k, v, do = (torch.randn(shape, generator=generator, **kind) for _ in range(4))
    for x in (q, k, v):
        x.requires_grad_()
    calls: dict[tuple[str, str], Callable[[], Any]] = {}
    started, ran = time.perf_counter(), ""
    for name, row in rows.items():
        try:
            row["kernel"], forward, backward = prepared(name, q, k, v, do, bound)
        except Exception as error:  # whatever a peer may raise for what it cannot do
            row["skipped"] = f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]
            continue
        if name != "flash" and PEERS[name][0] == "flash" and row["kernel"] == ran:
            row["skipped"] = "what flash runs anyway"
            continue
        ran = row["kernel"] if name == "flash" else ran
        calls[name, "forward"], calls[name, "backward"] = forward, backward
    times: dict[Any, list[float]] = {}
    if calls:
        times = samples(calls, options.repeats, seconds - (time.perf_counter() - started))
    middle = {call: median(of_call) for call, of_call in times.items()}
    for name in dict.fromkeys(name for name, _ in calls):
        fill(rows[name], middle, options.reference, flops, ceiling)
        for part in ("forward", "backward"):
            rows[name][f"{part}_spread"] = round(spread(times[name, part]), 3)
    return list(rows.values())


def prepared(
    name: str, q: Any, k: Any, v: Any, do: Any, mask: Any
) -> tuple[str, Callable[[], Any], Callable[[], Any]]:
    """The kernel that a backend runs, its forward and its backward, both run once."""
    import torch

    from longctx.attention import attention, kernels_run

    backend, extra = PEERS[name]
    forward = partial(attention, q, k, v, mask=mask, backend=backend, **extra)
    strict = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(strict or name == "flash-deterministic", warn_only=True)
    try:
        out = forward()  # which decides what backward will run
        ran = kernels_run()[backend]
    finally:
        torch.use_deterministic_algorithms(strict)
    backward = partial(torch.autograd.grad, out, (q, k, v), do, retain_graph=True)
    backward()
    if q.is_cuda:
        torch.cuda.synchronize()
    return ran, forward, backward


def fill(row: Row, times: dict[Any, float], reference: str, flops: float, ceiling: float) -> None:
    """The figures of one backend, from the milliseconds of all."""

    def ms(name: str, part: str) -> float:
        return sum(times[name, p] for p in (("forward", "backward") if part == "both" else (part,)))

    for part, work in PARTS.items():
        own = ms(row["backend"], part)
        rate = work * flops / own / 1e9
        row |= {
            f"{part}_ms": round(own, 4),
            f"{part}_tflops": round(rate, 1),
            f"{part}_share": round(rate / ceiling, 3),
        }
        if (reference, "forward") in times:
            row[f"{part}_ratio"] = round(ms(reference, part) / own, 3)


def readable(row: Row) -> Row:
    """Return a row for the terminal."""
    line = {"backend": row["backend"], "skipped": row.get("skipped", "")}
    if "skipped" in row:
        return line
    for part in PARTS:
        line[f"{part} ms"] = f"{row[f'{part}_ms']:.3f}"
        line[f"{part} TFLOP/s"] = f"{row[f'{part}_tflops']:.0f} ({row[f'{part}_share']:.0%})"
        line[f"{part} ×"] = f"{row[f'{part}_ratio']:.2f}" if f"{part}_ratio" in row else ""
    return line


def build_mask(options: Options, name: str, B: int, length: int) -> Any:
    """The mask of a benchmark for B rows of `length` tokens."""
    import torch

    from longctx.attention import Mask

    if name == "documents":
        return Mask.documents(torch.from_numpy(packed_rows(B, length)))
    return {"causal": Mask.causal(), "full": Mask.full(), "window": Mask.causal(options.window)}[
        name
    ]


def packed_rows(B: int, length: int) -> np.ndarray:
    """Document ids (B, length) of rows packed as training packs them, with documents as long as the
    embedded corpus has them.

    Tokens are bytes / 4, which spares the tokenizer. Of all rows those are taken that stand for the
    rest: ordered by visible pairs, the middle of each of B equal parts.
    """
    from longctx.config.data_config import DataConfig
    from longctx.data import read_documents
    from longctx.data.packing import pack

    sizes = [len(document.text.encode()) for document in read_documents(DataConfig())]
    packing = pack(np.maximum(np.array(sizes) // BYTES_PER_TOKEN, 1), length)
    pieces = np.split(packing.length, packing.bounds[1:-1])
    pieces.sort(key=lambda row: int((row * (row + 1)).sum()))
    chosen = [pieces[int((i + 0.5) * len(pieces) / B)] for i in range(B)]
    # What is left is padding
    rows = [np.repeat(np.arange(len(row) + 1), [*row, length - row.sum()]) for row in chosen]
    return np.stack(rows)


def matmul_tflops(device: str = "cuda", n: int = 8192) -> float:
    """This GPU's rate for a bf16 matrix product of random data, in TFLOP/s."""
    import torch

    a, b = (torch.randn(n, n, device=device, dtype=torch.bfloat16) for _ in range(2))
    return 2 * n**3 / medians({"matmul": lambda: a @ b}, 40)["matmul"] / 1e9
