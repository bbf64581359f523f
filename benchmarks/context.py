"""The longest context that each backend trains at on this GPU, and memory and speed at every length
up to it.

For each backend the longest rows are found as `seq_len=max` finds them. Then whole steps are timed
at every length, each in a child process, so that running out of memory is a point of the plot and
nothing more. Rows are one document each. The memory policy is the one that a run would choose,
unless `memory=` is given.
"""

from __future__ import annotations

import itertools
import json
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.report import machine, save_figure, short, write_json
from benchmarks.words import check_unused, decided, training_run
from longctx.attention.description import DESCRIPTIONS
from longctx.config.fields import key
from longctx.planner import fitting, step_time
from longctx.planner.overview import longest_step
from longctx.planner.peak_memory import predict
from longctx.spec.hardware import GIB, Chip
from longctx.spec.step import Workload
from longctx.tables import grid

if TYPE_CHECKING:
    from longctx.training.dry_run import DryRun
    from longctx.training.run import Run

TAKES_TRAINING_KEYS = True
FREE = ("runs", "memory", "wandb.mode", "wandb.project")  # points with others stand in one file
TAKEN = {"seq_len": "use shortest= and longest=", "attention": "use backends="} | dict.fromkeys(
    ("batch_size", "accumulate"), "it is one row"
)
START = 45.0  # seconds that a child takes before its first step: libraries, compilation
CAPTURED_STEPS = 6  # the second one captures CUDA graphs, where a step runs as such
SHOWN = (
    "backend",
    "tokens",
    "memory",
    "memory_peak_gib",
    "predicted_gib",
    "tokens_per_second",
    "mfu",
    "seconds",
    "note",
)


@dataclass(frozen=True)
class Options:
    """What to measure; keys of train.py may follow, such as model=1b."""

    backends: tuple[str, ...] = key(
        ("naive", "sdpa", "flash"), "attention backends", choices=DESCRIPTIONS
    )
    shortest: int = key(4096, "tokens; lengths double from there to the longest")
    longest: str = key(
        "auto",
        "tokens of the longest rows; auto: what fits, by probes; plan: what is predicted to fit",
    )
    steps: int = key(2, "of a point, more where fewer do not show its memory; the last counts")
    minutes: float = key(60.0, "points that would end after that are left out")
    out: str = key("results/context", "writes .json and .png; points that it has already stay")


def run(options: Options, command: str, overrides: list[str]) -> None:
    """Find, measure, print, write `out`.json and `out`.png; log each point as a run of wandb."""
    import torch

    check_unused(overrides, TAKEN)
    if not torch.cuda.is_available():
        raise ValueError("context: measures what fits a GPU, and there is no CUDA GPU here")
    from longctx.parallel.devices import check_attention

    end = time.monotonic() + 60 * options.minutes
    one_row = ["batch_size=1", "accumulate=1"]
    runs = {
        backend: training_run([*overrides, f"attention={backend}", *one_row], "cuda")
        for backend in options.backends
    }
    for one in runs.values():
        check_attention(one.config, one.workload.model, "cuda")
    about = machine() | {
        "overrides": [one for one in overrides if one.partition("=")[0] not in FREE],
        "parameters": next(iter(runs.values())).workload.model.parameters(),
        "gpu_memory_gib": gpu().memory / GIB,
    }
    earlier = earlier_points(Path(f"{options.out}.json"), about)
    longest = {backend: find_longest(one, options, end) for backend, one in runs.items()}
    rows: list[dict[str, Any]] = earlier["rows"]
    result = {
        "commands": [*earlier["commands"], command],
        **about,
        "options": asdict(options),
        "longest": merged(earlier["longest"], longest),
        "rows": rows,
    }
    write_json(Path(f"{options.out}.json"), result)  # an interruption loses no point
    points = [(n, b) for b in runs for n in ladder(options.shortest, longest[b]["tokens"])]
    for tokens, backend in sorted(points):  # the short ones first: they are cheap
        print(f"{backend} {tokens:,} tokens:", end=" ", flush=True)
        row = measure(with_length(runs[backend], tokens), options.steps, end)
        add(rows, row)
        print(outcome(row), flush=True)
        write_json(Path(f"{options.out}.json"), result)
        report(row, runs[backend])
    grid(
        "Memory and speed over length",
        SHOWN,
        [row | {"mfu": percent(row.get("mfu"))} for row in rows],
    )
    for backend, best in result["longest"].items():
        print(f"{backend}: {best['tokens']:,} tokens, {best['how']}")
    plot(result, Path(f"{options.out}.png"))
    print(f"wrote {options.out}.json and {options.out}.png")


def earlier_points(path: Path, about: dict[str, Any]) -> dict[str, Any]:
    """What `path` has, where that is of the model and machine that are `about`; else a line says
    that the file begins anew.
    """
    if path.exists():
        found: dict[str, Any] = json.loads(path.read_text())
        differs = [name for name, here in about.items() if found.get(name) != here]
        if not differs:
            return found
        print(f"{path} begins anew: its points are of another {', '.join(differs)}")
    return {"commands": [], "longest": {}, "rows": []}


def merged(earlier: dict[str, Any], now: dict[str, Any]) -> dict[str, Any]:
    """The longest rows of each backend. A length that is given says nothing about what fits, so it
    replaces no other.
    """
    given = {name for name, one in now.items() if one["how"] == "given"}
    kept = {name for name, one in earlier.items() if one["how"] != "given"}
    return earlier | {name: one for name, one in now.items() if name not in given & kept}


def add(rows: list[dict[str, Any]], row: dict[str, Any]) -> None:
    """Put `row` in the place of the one of its backend and length, unless that one alone has a
    speed.
    """
    same = [
        one for one in rows if (one["backend"], one["tokens"]) == (row["backend"], row["tokens"])
    ]
    if "tokens_per_second" in row or not any("tokens_per_second" in one for one in same):
        rows[:] = [*(one for one in rows if one not in same), row]


def find_longest(run: Run, options: Options, end: float) -> dict[str, Any]:
    """Tokens of the longest rows of `run`, and how that is known: probed, predicted, or given."""
    from longctx.parallel.devices import this_machine
    from longctx.training.dry_run import dry_run_in_child, longest_probed

    at, host = fitting.one_row(run.workload), this_machine().host_memory

    def predicted() -> int:
        longest = longest_step([run.workload], gpu(), host)
        return longest.seq_len if longest else 0

    def probe(work: Workload) -> DryRun:
        left = max(1.0, end - time.monotonic())
        tried = replace(run, workload=work)
        return dry_run_in_child(tried, options.steps, options.shortest, False, left)

    if options.longest == "plan":
        return {"tokens": predicted(), "how": "predicted"}
    if options.longest != "auto":
        if not options.longest.isdigit() or int(options.longest) < 2:
            raise ValueError(f"longest={options.longest}: a number of tokens, auto or plan")
        return {"tokens": int(options.longest), "how": "given"}
    probes: list[str] = []
    try:
        tokens = longest_probed(at, probe, gpu(), host, probes.append)
    except ValueError as error:
        return {"tokens": predicted(), "how": f"predicted; {error}", "probes": probes}
    how = f"confirmed by {len(probes)} probe{'s' if len(probes) > 1 else ''}"
    return {"tokens": tokens, "how": how, "probes": probes}


def with_length(run: Run, tokens: int) -> Run:
    """`run` with rows of `tokens` tokens."""
    return replace(run, workload=replace(run.workload, seq_len=tokens))


def ladder(shortest: int, longest: int) -> list[int]:
    """Lengths that double from `shortest`, and the longest itself."""
    lengths = []
    while shortest < longest:
        lengths.append(shortest)
        shortest *= 2
    return [*lengths, longest] if longest else lengths


def measure(run: Run, steps: int, end: float) -> dict[str, Any]:
    """Measure one point: whole steps of `run` in a child process.

    Where there is no speed, `note` says why.
    """
    from longctx.training.dry_run import dry_run_in_child

    run = decided(run)
    work = run.workload
    steps = max(steps, least_steps(work))
    expected = step_time.seconds(work, gpu())
    row: dict[str, Any] = {
        "backend": work.attention.backend,
        "tokens": work.seq_len,
        "memory": work.memory.policy,
        "predicted_gib": predict(work).peak / GIB,
        "predicted_seconds": expected.total if expected else None,
    }
    left = end - time.monotonic()
    if expected is not None and START + steps * expected.total > left:
        steps_of = f"steps={steps} of about {expected.total:,.0f} s"
        return row | {"note": f"left out: {steps_of} are more than the minutes left"}
    measured = dry_run_in_child(run, steps, None, False, max(1.0, left))
    if measured.failed is not None:
        return row | {"note": measured.failed} | {k: v for k, v in measured.memory.items() if v}
    seconds = measured.ms[-1] / 1000
    row |= measured.memory | {"seconds": seconds, "tokens_per_second": measured.tokens / seconds}
    row["kernel"] = measured.kernels[work.attention.backend]
    peak = gpu().flops
    if peak is not None:
        pairs, added = measured.pairs / measured.tokens, work.lora.parameters(work.model)
        flops = measured.tokens * work.model.flops_per_token(pairs, added)
        row["mfu"] = flops / seconds / peak
    return row


def least_steps(work: Workload) -> int:
    """Steps that show speed and memory: a graph is captured in the second one, and what the
    optimizer keeps on the GPU is there from the second one on.
    """
    if work.captured:
        return CAPTURED_STEPS
    return 1 if work.memory.optimizer_state == "host" else 2


def report(row: dict[str, Any], run: Run) -> None:
    """Log one point as a run of wandb, in runs/context-BACKEND-TOKENS, or the next free name."""
    from longctx.runs import run_folder
    from longctx.runs.tracking import Tracker

    if "tokens_per_second" not in row:
        return
    folder = run_folder.create(
        Path(run.config.runs), None, f"context-{row['backend']}-{row['tokens']}"
    )
    wandb = run.config.wandb
    tracker = Tracker(folder, replace(wandb, group=wandb.group or "context"))
    tracker.log(
        {"step": 1, "tokens_seen": row["tokens"]}
        | {k: v for k, v in row.items() if isinstance(v, int | float)}
    )
    facts = run.settings() | {key: row[key] for key in ("backend", "tokens", "kernel", "memory")}
    tracker.start_copies(facts | {"memory_policy": row["memory"]})
    tracker.finish(0)
    if problem := tracker.problem():
        print(problem)


def gpu() -> Chip:
    """This machine's GPU, which `run` has checked to be there."""
    from longctx.parallel.devices import this_machine

    chip = this_machine().gpu
    assert chip is not None
    return chip


def outcome(row: dict[str, Any]) -> str:
    """Policy, speed and memory of a point, or why there is none."""
    text = row.get("note")
    if "tokens_per_second" in row:
        speed = f"{row['tokens_per_second']:,.0f} tokens/s, MFU {percent(row.get('mfu'))}"
        text = f"{speed}, {row['memory_peak_gib']:.1f} GiB"
    return f"memory={row['memory']}, {text}"


def percent(share: float | None) -> str:
    """0.412 → 41.2%."""
    return "" if share is None else f"{share:.1%}"


def plot(result: dict[str, Any], path: Path) -> None:
    """Memory and tokens/s over length, a line per backend, the card's limit drawn in; hollow and
    dashed where predicted.

    Under the line of flash stands the memory policy, where it begins.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 4.6))
    memory, speed = figure.subplots(1, 2)
    for number, (backend, best) in enumerate(result["longest"].items()):
        color = f"C{number}"
        rows = sorted(
            (row for row in result["rows"] if row["backend"] == backend),
            key=lambda row: int(row["tokens"]),
        )
        width = 2.4 if backend == "flash" else 1.5
        label = (
            f"{backend}: {best['tokens']:,} tokens, {best['how'].split(';')[0]}"
            if best["tokens"]
            else backend
        )
        memory.plot([], [], color=color, linewidth=width, marker="o", label=label)
        points = [(*point, row["memory"]) for row in rows if (point := drawn(row))]
        for axis, column in ((memory, 1), (speed, 2)):
            for p, after in itertools.pairwise(points):
                xy = (p[0], after[0]), (p[column], after[column])
                style, thick = ("-", width) if p[3] and after[3] else ("--", 1)
                axis.plot(*xy, style, color=color, linewidth=thick)
            for p in points:
                fill = "full" if p[3] else "none"
                axis.plot(p[0], p[column], "o", color=color, fillstyle=fill)
        if backend == "flash":
            for policy, of_it in itertools.groupby(points, lambda p: p[4]):
                at = next(of_it)[:2]
                memory.annotate(
                    policy, at, (0, -13), textcoords="offset points", fontsize=8, ha="center"
                )
    memory.axhline(
        result["gpu_memory_gib"],
        color="0.3",
        linestyle="--",
        linewidth=1,
        label="the card's memory",
    )
    memory.set_ylabel("peak GiB")
    speed.set_ylabel("tokens/s")
    speed.set_yscale("log")
    ticks = sorted(
        {row["tokens"] for row in result["rows"] if row["tokens"] & (row["tokens"] - 1) == 0}
    )
    for axis in (memory, speed):
        axis.set_xscale("log", base=2)
        axis.set_xticks(ticks, [short(n) for n in ticks])
        axis.set_xlabel("tokens in a row")
        axis.grid(alpha=0.3)
    speed.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    speed.yaxis.set_minor_formatter(lambda value, _: "")
    memory.set_ylim(0, 1.42 * result["gpu_memory_gib"])
    memory.legend(fontsize=8, loc="upper left")
    figure.suptitle(
        f"Training {result['parameters'] / 1e6:,.0f} million parameters on one {result['gpu']}: "
        "exact causal attention, one document a row; hollow: predicted",
        fontsize=11,
    )
    figure.tight_layout()
    save_figure(figure, path)


def drawn(row: dict[str, Any]) -> tuple[int, float, float, bool] | None:
    """Tokens, GiB, tokens/s of a point and whether they were measured; None where it failed or
    nothing is known.
    """
    if "tokens_per_second" in row:
        return row["tokens"], row["memory_peak_gib"], row["tokens_per_second"], True
    if row.get("predicted_seconds") and row.get("note", "").startswith("left out"):
        return row["tokens"], row["predicted_gib"], row["tokens"] / row["predicted_seconds"], False
    return None
