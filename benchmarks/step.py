"""Where a training step's time goes, part by part, and what a fused attention kernel can gain at
each length.

Steps of the configuration run as `python train.py` runs them, on random tokens, each row one
document. Some are timed without the profiler; the next are profiled, which tells the parts. On a
GPU a part's share is its kernels' time over the time of an unprofiled step, idle what no kernel and
no wait for data fills. A model turns from FFN-bound to attention-bound at the length at which
attention takes as long as projections and MLP.
"""

from __future__ import annotations

import itertools
import json
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.report import grid, machine, save_figure, write_json
from benchmarks.trace import ATTENTION, IDLE, MATRICES, OTHER, PARTS, marked, time_by_part
from benchmarks.words import check_backends, check_unused, request, training_config

TAKES_TRAINING_KEYS = True
WARM, TIMED = 2, 4  # steps without the profiler: not counted, counted


@dataclass(frozen=True)
class Options:
    """What to profile; every key of train.py may follow, such as model=124m."""

    lengths: tuple[int, ...] = field(
        default=(512, 1024, 2048, 4096, 8192, 16384), metadata={"help": "tokens in a row"}
    )
    backends: tuple[str, ...] = field(
        default=("naive", "sdpa", "flash"), metadata={"help": "attention backends"}
    )
    steps: int = field(default=2, metadata={"help": "profiled steps"})
    minutes: float = field(default=60.0, metadata={"help": "points not begun by then are left out"})
    out: str = field(default="results/step", metadata={"help": "writes .json and .png"})


def run(options: Options, command: str, words: list[str]) -> None:
    """Measure every length with every backend, print tables, write `out`.json and `out`.png."""
    import torch
    from longctx.training.fit import decide_memory

    check_backends(options.backends)
    check_unused(words, {"seq_len": "use lengths=", "attention": "use backends="})
    device = "cuda" if torch.cuda.is_available() else "cpu"
    points = {
        (n, backend): [*words, f"seq_len={n}", f"attention={backend}"]
        for n in options.lengths
        for backend in options.backends
    }
    configs = {point: training_config(said, device) for point, said in points.items()}
    rows: list[dict[str, Any]] = []
    end = time.monotonic() + 60 * options.minutes
    for (length, backend), asked in configs.items():
        if time.monotonic() > end:
            break
        print(f"{len(rows) + 1}/{len(configs)}  {length:,} tokens, {backend}:", end=" ", flush=True)
        config = decide_memory(asked, request(points[length, backend], device), device)
        rows.append(
            {"tokens": length, "backend": backend} | profiled(config, device, options.steps)
        )
        print_row(rows[-1])
    config = next(iter(configs.values()))
    found = {
        "command": command,
        **machine(),
        "options": asdict(options),
        "parameters": config.model.parameters(),
        "turns": {backend: turning_length(of(rows, backend)) for backend in options.backends},
        "turns_by_flops": config.model.matmul_parameters()
        / (config.model.heads * config.model.head_size * config.model.layers),
        "gains": gains(rows),
        "rows": rows,
    }
    show(found)
    write_json(Path(f"{options.out}.json"), found)
    plot(found, Path(f"{options.out}.png"))
    print(f"wrote {options.out}.json and {options.out}.png")


def profiled(config: Any, device: str, steps: int) -> dict[str, Any]:
    """Milliseconds of a step, of its parts, and their shares; `failed` where memory ran out."""
    import torch
    from longctx.training.probe import rehearse
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if device == "cuda" else [])
    seen = profile(activities=activities)

    def after(step: int) -> None:
        if step not in (WARM + TIMED, WARM + TIMED + steps):
            return
        if device == "cuda":
            torch.cuda.synchronize()
        (seen.start if step == WARM + TIMED else seen.stop)()

    torch._dynamo.reset()
    with marked(compiled=config.compile == "true"):
        measured = rehearse(config, device, WARM + TIMED + steps, after=after)
    row: dict[str, Any] = {"memory": measured.memory, "failed": measured.failed}
    if measured.failed is not None:
        return row
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch, "trace.json")
        seen.export_chrome_trace(str(path))
        spent = time_by_part(json.loads(path.read_text())["traceEvents"])
    ms = {part: spent.get(part, 0.0) / 1000 / steps for part in PARTS}
    # Profiling slows a CPU's operators as it slows the step, and a GPU's kernels not at all.
    timed = measured.ms[WARM + TIMED :] if device == "cpu" else measured.ms[WARM : WARM + TIMED]
    whole = max(median(timed), sum(ms.values()))
    ms[IDLE] = whole - sum(ms.values())
    return row | {
        "kernel": measured.kernels[config.attention.backend],
        "ms_per_step": whole,
        "tokens_per_step": measured.tokens,
        "tokens_per_second": 1000 * measured.tokens / whole,
        "ms": ms,
        "shares": {part: ms[part] / whole for part in PARTS},
    }


def of(rows: list[dict[str, Any]], backend: str) -> list[dict[str, Any]]:
    """The rows of `backend` that ran, in order of length."""
    return sorted(
        (r for r in rows if r["backend"] == backend and not r["failed"]),
        key=lambda r: int(r["tokens"]),
    )


def turning_length(rows: list[dict[str, Any]]) -> dict[str, Any] | None:
    """The length at which attention takes as long as projections and MLP, and whether it lies among
    those measured.

    Between two lengths and beyond the last both times per token are straight lines; None where no
    line crosses.
    """
    points = [
        (r["tokens"], (r["ms"][ATTENTION] - r["ms"][MATRICES]) / r["tokens_per_step"]) for r in rows
    ]
    for (n0, d0), (n1, d1) in itertools.pairwise(points):
        if d0 < 0 <= d1:
            return {"tokens": round(n0 + (n1 - n0) * -d0 / (d1 - d0)), "measured": True}
    if points and points[0][1] >= 0:
        return {"tokens": points[0][0], "measured": False}
    if len(points) < 2 or points[-1][1] <= points[-2][1]:
        return None
    (n0, d0), (n1, d1) = points[-2:]
    return {"tokens": round(n1 + (n1 - n0) * -d1 / (d1 - d0)), "measured": False}


def gains(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Per length: how much faster flash's step is than each other backend's, and than itself with
    attention for free.
    """
    found = []
    for row in of(rows, "flash"):
        gain: dict[str, Any] = {"tokens": row["tokens"]}
        for other in rows:
            if other["tokens"] == row["tokens"] and other["backend"] != "flash":
                ratio = (
                    None
                    if other["failed"]
                    else row["tokens_per_second"] / other["tokens_per_second"]
                )
                gain[f"over {other['backend']}"] = (
                    other["failed"] if ratio is None else round(ratio, 3)
                )
        gain["left in attention"] = round(1 / max(1 - row["shares"][ATTENTION], 1e-9), 3)
        found.append(gain)
    return found


def print_row(row: dict[str, Any]) -> None:
    """The rest of its line, as soon as it is known."""
    print(
        row["failed"]
        or f"{row['ms_per_step']:,.1f} ms a step, {row['tokens_per_second']:,.0f} tokens/s",
        flush=True,
    )


def show(found: dict[str, Any]) -> None:
    """Shares, gains and turning lengths."""
    rows = [
        {"tokens": r["tokens"], "backend": r["backend"], "ms/step": r["failed"] or r["ms_per_step"]}
        | {part: f"{share:.1%}" for part, share in r.get("shares", {}).items()}
        for r in found["rows"]
    ]
    grid("Where a step's time goes", ("tokens", "backend", "ms/step", *PARTS), rows)
    if found["gains"]:
        grid(
            "What flash gains in the whole step, and what attention for free would",
            tuple(found["gains"][0]),
            found["gains"],
        )
    for backend, turn in found["turns"].items():
        if turn is None:
            print(f"{backend}: attention does not overtake projections and MLP")
        else:
            how = "" if turn["measured"] else " (extrapolated: not among the lengths measured)"
            print(
                f"{backend}: attention takes longer than projections and MLP from {turn['tokens']:,} tokens on{how}"
            )
    print(f"by FLOPs alone: {found['turns_by_flops']:,.0f} tokens")


def plot(found: dict[str, Any], path: Path) -> None:
    """A panel per backend: the shares of a step, stacked, over length; and one of flash's gain."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    backends = [b for b in found["options"]["backends"] if of(found["rows"], b)]
    figure, axes = plt.subplots(
        1, len(backends) + 1, figsize=(4.2 * (len(backends) + 1), 4.2), squeeze=False
    )
    colors = dict(zip(PARTS, plt.get_cmap("tab10").colors, strict=False))  # type: ignore[attr-defined]
    for axis, backend in zip(axes[0], backends, strict=False):
        rows = of(found["rows"], backend)
        places, bottom = list(range(len(rows))), [0.0] * len(rows)
        for part in PARTS:
            heights = [100 * row["shares"][part] for row in rows]
            axis.bar(places, heights, bottom=bottom, label=part, color=colors[part], width=0.8)
            bottom = [b + h for b, h in zip(bottom, heights, strict=True)]
        axis.set_xticks(places, [short(row["tokens"]) for row in rows])
        turn = found["turns"][backend]
        where = f", attention-bound from {short(turn['tokens'])}" if turn else ""
        axis.set_title(f"{backend}{where}", fontsize=10)
        axis.set_ylim(0, 100)
        axis.set_xlabel("tokens in a row")
    axes[0][0].set_ylabel("% of a step")
    axes[0][0].legend(fontsize=7, loc="lower left")
    axis = axes[0][-1]
    for key in [key for key in (found["gains"][0] if found["gains"] else {}) if key != "tokens"]:
        points = [(g["tokens"], g[key]) for g in found["gains"] if isinstance(g.get(key), float)]
        axis.plot(*zip(*points, strict=True), marker="o", label=key) if points else None
    axis.set_xscale("log", base=2)
    axis.set_title("tokens/s of flash as a multiple", fontsize=10)
    axis.set_xlabel("tokens in a row")
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8)
    where = found["gpu"] if found["gpu"] != "none" else "a CPU"
    figure.suptitle(
        f"A training step of {found['parameters'] / 1e6:,.0f} million parameters on {where}",
        fontsize=11,
    )
    figure.tight_layout()
    save_figure(figure, path)


def short(tokens: int) -> str:
    """4096 → 4K."""
    return f"{tokens // 1024}K" if tokens % 1024 == 0 else str(tokens)


def covered(row: dict[str, Any]) -> float:
    """The share of a step that a named part accounts for."""
    return 1.0 - float(row["shares"][OTHER])
