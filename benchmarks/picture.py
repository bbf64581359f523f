"""The README's picture, drawn from results/: whole training steps beside their baselines."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from benchmarks.process_group import ROOT
from benchmarks.report import save_figure, short
from longctx.config.fields import key

RESULTS = ROOT / "results"
PANELS = {
    "1b": ("peers-1b.json", "transformers-liger", "transformers + Liger"),
    "124m": ("peers-124m.json", "nanogpt", "nanoGPT"),
}


@dataclass(frozen=True)
class Options:
    """Where to draw."""

    out: str = key("results/steps.png", "the picture")


def run(options: Options, command: str) -> None:
    """Draw tokens per second over the length of a row, ours beside the baseline's."""
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
        axis.set_ylim(0, 1.18 * max(ours))
        axis.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
        axis.set_title(f"{model}: tokens/s of whole training steps on one H200", fontsize=11)
        axis.set_xlabel("tokens in a row")
        axis.grid(alpha=0.3)
        axis.legend()
    figure.tight_layout()
    save_figure(figure, Path(options.out))
    print(f"wrote {options.out}")


def speeds(file: str, baseline: str) -> dict[int, tuple[float, float]]:
    """Length of a row → tokens/s of longctx and of `baseline`, of the first run that has both."""
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
