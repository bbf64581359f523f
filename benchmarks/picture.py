"""The README's pictures, drawn from results/: the context that each attention allows, what fits a
card next to what others publish, and whole training steps next to their baselines.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks import cards
from benchmarks.points import training_run
from benchmarks.processes import ROOT
from benchmarks.report import dress, save_figure, short
from longctx.config.fields import Group, key
from longctx.planner import fitting
from longctx.planner.overview import longest_step
from longctx.spec import hardware

RESULTS = ROOT / "results"
PANELS = {
    "1b": ("peers-1b.json", "transformers-liger", "transformers + Liger"),
    "124m": ("peers-124m.json", "nanogpt", "nanoGPT"),
}
COLORS = {"naive": "tab:red", "sdpa": "tab:orange", "flash": "tab:green"}
HOST = 128  # GiB of host memory


@dataclass(frozen=True)
class Options(Group):
    """Where to draw."""

    reach: str = key("results/reach.png", "the context that each attention allows")
    steps: str = key("results/steps.png", "training steps next to their baselines")


def run(options: Options, command: str) -> None:
    """Draw both pictures."""
    reach = Figure(figsize=(14, 4.8))
    speeds_of, lengths_of = reach.subplots(1, 2, width_ratios=[8, 5])
    draw_attentions(speeds_of)
    draw_cards(lengths_of)
    for figure, out in ((reach, options.reach), (draw_steps(), options.steps)):
        figure.tight_layout()
        save_figure(figure, Path(out))
        print(f"wrote {out}")


def draw_cards(axis: Axes) -> None:
    """Draw the longest sequences of 8B models by card: published by others, predicted, stepped."""
    published = cards.PUBLISHED["8b"]
    usual = {gb: tokens for gb, (_, tokens) in published.items() if tokens is not None}
    found = {gb: cards.longest_of_rank_32("8b", gb, HOST) for gb in published}
    ours = {gb: step.seq_len for gb, step in found.items() if step is not None}
    whole = [x for x in cards.stepped("8b", "LoRA on nf4") if not x["layers"]]
    stepped = {x["cap"]: x["tokens"] for x in sorted(whole, key=lambda x: x["tokens"])}
    hosts = [str(x["host"]) for x in whole if x["tokens"] == stepped[x["cap"]]]
    for tokens, style, label in (
        (ours, "o--", f"longctx, predicted, {HOST} GiB of host memory"),
        (stepped, "X", f"longctx, stepped under caps, {' and '.join(hosts)} GiB"),
        ({gb: tokens for gb, (tokens, _) in published.items()}, "s-", "Unsloth, as published"),
        (usual, "^-", "transformers, FlashAttention-2, as Unsloth publishes"),
    ):
        color = COLORS["flash"] if "longctx" in label else None
        hollow = {"markerfacecolor": "white"} if "predicted" in label else {"markersize": 9}
        axis.plot(list(tokens), list(tokens.values()), style, color=color, label=label, **hollow)
        for gb in (24, 80):
            at = (-22, -16) if "stepped" in label else (6, -11)
            near = {"xytext": at, "textcoords": "offset points", "fontsize": 8.5}
            axis.annotate(f"{tokens[gb]:,}", (gb, tokens[gb]), **near)
    scales: Any = {"yscale": "log", "xlim": (0, 97), "ylim": (600, 3e6)}
    scales |= {"xticks": [8, 16, 24, 40, 48, 80], "ylabel": "tokens per sequence"}
    dress(axis, "8B, LoRA on 4-bit weights: the longest sequence", "GB of the card", **scales)
    axis.legend(fontsize=8.5, loc="lower right")


def draw_attentions(axis: Axes) -> None:
    """Draw tokens per second over tokens per sequence for each attention, up to its limit, and for
    transformers with Liger.
    """
    content: dict[str, Any] = json.loads((RESULTS / "context.json").read_text())
    usual = {tokens: speed for tokens, (_, speed) in speeds(*PANELS["1b"][:2]).items()}
    axis.plot(list(usual), list(usual.values()), "^-", color="tab:blue", label=PANELS["1b"][2])
    axis.legend(loc="lower left")
    for backend, color in COLORS.items():
        rows = [row for row in content["rows"] if row["backend"] == backend]
        measured = [row for row in rows if row.get("tokens_per_second")]
        lengths = [row["tokens"] for row in measured]
        each = [row["tokens_per_second"] for row in measured]
        axis.plot(lengths, each, "o-", color=color, linewidth=2.2)
        place = {"ha": "right", "va": "bottom" if backend == "flash" else "center"}
        beginning = lengths[0] / 1.06, each[0]
        axis.annotate(f" {backend}", beginning, color=color, weight="bold", **place)
        limit, end = content["longest"][backend]["tokens"], each[-1]
        is_measured = limit == lengths[-1]
        # What was not trained is predicted, as longctx plan does: a hollow end
        if not is_measured:
            limit, end = predicted_end([*content["overrides"], f"attention={backend}"], content)
            axis.plot([lengths[-1], limit], [each[-1], end], "--", color=color)
        style = {"markerfacecolor": color if is_measured else "white"}
        axis.plot([limit], [end], "X", color=color, markersize=11, **style)
        what = "out of memory\nbeyond" if is_measured else "predicted to fit\nup to"
        after = {"xytext": (9, 4), "textcoords": "offset points", "fontsize": 8.5}
        axis.annotate(f"{what} {limit:,}", (limit, end), color=color, **after)
    ticks = [4096 * 2**n for n in range(9)]
    axis.set_xscale("log", base=2)
    millions = content["parameters"] / 1e6
    title = f"{millions:,.0f} million parameters on one {content['gpu']}, exact attention"
    scales = {"yscale": "log", "xlim": (1900, 30_000_000)}
    dress(axis, title, "tokens per sequence", ylabel="tokens per second", **scales)
    axis.set_xticks(ticks, [short(n).replace("1024K", "1M") for n in ticks])


def predicted_end(overrides: list[str], content: dict[str, Any]) -> tuple[int, float]:
    """Return the tokens of the longest sequence that is predicted to fit, and its tokens/s."""
    chip = hardware.chip(content["gpu"])
    step = longest_step([training_run(overrides, "cuda").workload], chip, hardware.ASSUMED_HOST)
    assert step is not None
    return step.seq_len, fitting.tokens_per_second(step, chip)


def draw_steps() -> Figure:
    """Draw tokens per second over tokens per sequence, ours next to the baseline's."""
    figure = Figure(figsize=(11, 4))
    axes = figure.subplots(1, len(PANELS))
    for axis, (model, (file, baseline, label)) in zip(axes, PANELS.items(), strict=True):
        measured = speeds(file, baseline)
        lengths = list(measured)
        ours, theirs = zip(*measured.values(), strict=True)
        axis.plot(lengths, ours, "o-", linewidth=2.4, label="longctx")
        axis.plot(lengths, theirs, "s-", linewidth=1.5, label=label)
        for n, (mine, other) in measured.items():
            ratio, above = f"{mine / other:.2f} ×", (0, 9)
            axis.annotate(ratio, (n, mine), xytext=above, textcoords="offset points", ha="center")
        axis.set_xscale("log", base=2)
        axis.margins(x=0.12)
        axis.set_xticks(lengths, [short(n) for n in lengths])
        title = f"{model}: tokens/s of whole training steps on one H200"
        dress(axis, title, "tokens per sequence", ylim=(0, 1.18 * max(ours)))
        axis.legend()
    return figure


def speeds(file: str, baseline: str) -> dict[int, tuple[float, float]]:
    """Return tokens per sequence → tokens/s of longctx and of `baseline`, of the first run that has
    both.
    """
    content: dict[str, Any] = json.loads((RESULTS / file).read_text())
    both: dict[int, tuple[float, float]] = {}
    for measured in content["runs"]:
        speed = {
            (row["peer"], int(row["tokens"])): float(row["tokens_per_second"])
            for row in measured["rows"]
            if row.get("tokens_per_second")
        }
        for peer, length in speed:
            if peer == baseline and ("longctx", length) in speed:
                both.setdefault(length, (speed["longctx", length], speed[baseline, length]))
    return dict(sorted(both.items()))
