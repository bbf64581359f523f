"""Where a training step's time goes, part by part, and what a fused attention kernel can gain at
each length.

Steps of the configuration run as `python train.py` runs them, on random tokens, each row one
document. Some are timed without the profiler; the next are profiled, which gives the parts. On a
GPU a part's share is its kernels' time over the time of an unprofiled step; idle is the time of
which neither kernels nor waiting for data account. A model turns from FFN-bound to attention-bound
at the length at which attention takes as long as projections and MLP.
"""

from __future__ import annotations

import itertools
import json
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from benchmarks.report import machine, save_figure, short, write_json
from benchmarks.trace import ATTENTION, IDLE, MATRICES, PARTS, marked, time_by_part
from benchmarks.words import decided, training_run
from longctx.attention.description import DESCRIPTIONS
from longctx.cli import check_unused
from longctx.config.fields import key
from longctx.tables import grid

if TYPE_CHECKING:
    from longctx.training.run import Run

TAKES_TRAINING_KEYS = True
WARM, TIMED = 2, 4  # steps without the profiler: not counted, counted


@dataclass(frozen=True)
class Options:
    """What to profile; every key of train.py may follow, such as model=124m."""

    lengths: tuple[int, ...] = key((512, 1024, 2048, 4096, 8192, 16384), "tokens in a row")
    backends: tuple[str, ...] = key(
        ("naive", "sdpa", "flash"), "attention backends", choices=DESCRIPTIONS
    )
    steps: int = key(2, "profiled steps")
    minutes: float = key(60.0, "points not begun by then are left out")
    out: str = key("results/step", "writes .json and .png")


def run(options: Options, command: str, overrides: list[str]) -> None:
    """Measure every length with every backend, print tables, write `out`.json and `out`.png."""
    import torch

    check_unused(overrides, {"seq_len": "use lengths=", "attention": "use backends="})
    device = "cuda" if torch.cuda.is_available() else "cpu"
    runs = {
        (n, name): training_run([*overrides, f"seq_len={n}", f"attention={name}"], device)
        for n in options.lengths
        for name in options.backends
    }
    rows: list[dict[str, Any]] = []
    end = time.monotonic() + 60 * options.minutes
    for (length, backend), run_at_length in runs.items():
        if time.monotonic() > end:
            break
        print(f"{len(rows) + 1}/{len(runs)}  {length:,} tokens, {backend}:", end=" ", flush=True)
        measured = profiled(decided(run_at_length), options.steps)
        rows.append({"tokens": length, "backend": backend} | measured)
        print_row(rows[-1])
    model = next(iter(runs.values())).workload.model
    result = {
        "command": command,
        **machine(),
        "options": asdict(options),
        "parameters": model.parameters(),
        "turns": {backend: turning_length(of(rows, backend)) for backend in options.backends},
        "turns_by_flops": model.matmul_parameters()
        / (model.heads * model.head_size * model.layers),
        "gains": gains(rows),
        "rows": rows,
    }
    show(result)
    write_json(Path(f"{options.out}.json"), result)
    plot(result, Path(f"{options.out}.png"))
    print(f"wrote {options.out}.json and {options.out}.png")


def profiled(run: Run, steps: int) -> dict[str, Any]:
    """Milliseconds of a step, of its parts, and their shares; `failed` where memory ran out."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    from longctx.training.dry_run import dry_run

    device = run.workload.device
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if device == "cuda" else [])
    profiler = profile(activities=activities)

    def after(step: int) -> None:
        if step not in (WARM + TIMED, WARM + TIMED + steps):
            return
        if device == "cuda":
            torch.cuda.synchronize()
        (profiler.start if step == WARM + TIMED else profiler.stop)()

    torch._dynamo.reset()
    with marked(compiled=run.workload.compile):
        measured = dry_run(run, WARM + TIMED + steps, after=after)
    row: dict[str, Any] = {"memory": measured.memory, "failed": measured.failed}
    if measured.failed is not None:
        return row
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch, "trace.json")
        profiler.export_chrome_trace(str(path))
        microseconds = time_by_part(json.loads(path.read_text())["traceEvents"])
    ms = {part: microseconds.get(part, 0.0) / 1000 / steps for part in PARTS}
    # Profiling slows a CPU's operators as it slows the step, and a GPU's kernels not at all.
    timed = measured.ms[WARM + TIMED :] if device == "cpu" else measured.ms[WARM : WARM + TIMED]
    step_ms = max(median(timed), sum(ms.values()))
    ms[IDLE] = step_ms - sum(ms.values())
    return row | {
        "kernel": measured.kernels[run.workload.attention.backend],
        "ms_per_step": step_ms,
        "tokens_per_step": measured.tokens,
        "tokens_per_second": 1000 * measured.tokens / step_ms,
        "ms": ms,
        "shares": {part: ms[part] / step_ms for part in PARTS},
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
    gains = []
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
        gains.append(gain)
    return gains


def print_row(row: dict[str, Any]) -> None:
    """The rest of its line, as soon as it is known."""
    print(
        row["failed"]
        or f"{row['ms_per_step']:,.1f} ms a step, {row['tokens_per_second']:,.0f} tokens/s",
        flush=True,
    )


def show(result: dict[str, Any]) -> None:
    """Shares, gains and turning lengths."""
    rows = [
        {"tokens": r["tokens"], "backend": r["backend"], "ms/step": r["failed"] or r["ms_per_step"]}
        | {part: f"{share:.1%}" for part, share in r.get("shares", {}).items()}
        for r in result["rows"]
    ]
    grid("Where a step's time goes", ("tokens", "backend", "ms/step", *PARTS), rows)
    if result["gains"]:
        grid(
            "What flash gains in the whole step, and what attention for free would",
            tuple(result["gains"][0]),
            result["gains"],
        )
    for backend, turn in result["turns"].items():
        if turn is None:
            print(f"{backend}: attention does not overtake projections and MLP")
        else:
            how = "" if turn["measured"] else " (extrapolated: not among the lengths measured)"
            print(
                f"{backend}: attention takes longer than projections and MLP "
                f"from {turn['tokens']:,} tokens on{how}"
            )
    print(f"by FLOPs alone: {result['turns_by_flops']:,.0f} tokens")


def plot(result: dict[str, Any], path: Path) -> None:
    """A panel per backend: the shares of a step, stacked, over length; and one of flash's gain."""
    import matplotlib
    from matplotlib.figure import Figure

    backends = [b for b in result["options"]["backends"] if of(result["rows"], b)]
    figure = Figure(figsize=(4.2 * (len(backends) + 1), 4.2))
    axes = figure.subplots(1, len(backends) + 1, squeeze=False)
    colors = dict(zip(PARTS, matplotlib.color_sequences["tab10"], strict=False))
    for axis, backend in zip(axes[0], backends, strict=False):
        rows = of(result["rows"], backend)
        places, bottom = list(range(len(rows))), [0.0] * len(rows)
        for part in PARTS:
            heights = [100 * row["shares"][part] for row in rows]
            axis.bar(places, heights, bottom=bottom, label=part, color=colors[part], width=0.8)
            bottom = [b + h for b, h in zip(bottom, heights, strict=True)]
        axis.set_xticks(places, [short(row["tokens"]) for row in rows])
        turn = result["turns"][backend]
        where = f", attention-bound from {short(turn['tokens'])}" if turn else ""
        axis.set_title(f"{backend}{where}", fontsize=10)
        axis.set_ylim(0, 100)
        axis.set_xlabel("tokens in a row")
    axes[0][0].set_ylabel("% of a step")
    axes[0][0].legend(fontsize=7, loc="lower left")
    axis = axes[0][-1]
    for name in [name for gain in result["gains"][:1] for name in gain if name != "tokens"]:
        points = [(g["tokens"], g[name]) for g in result["gains"] if isinstance(g.get(name), float)]
        axis.plot(*zip(*points, strict=True), marker="o", label=name) if points else None
    axis.set_xscale("log", base=2)
    axis.set_title("tokens/s of flash as a multiple", fontsize=10)
    axis.set_xlabel("tokens in a row")
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8)
    where = result["gpu"] if result["gpu"] != "none" else "a CPU"
    figure.suptitle(
        f"A training step of {result['parameters'] / 1e6:,.0f} million parameters on {where}",
        fontsize=11,
    )
    figure.tight_layout()
    save_figure(figure, path)
