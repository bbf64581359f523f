"""A perplexity as a picture, from the content of its JSON."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from longctx import files


def draw(content: dict[str, Any], path: Path) -> None:
    """Write a PNG of loss by position, loss over context, and documents; without those that have no
    rows.
    """
    panels = [panel for key, panel in PANELS.items() if content[key]]
    figure = Figure(figsize=(5 * len(panels), 4), layout="constrained")
    for number, panel in enumerate(panels, start=1):
        axes = figure.add_subplot(1, len(panels), number)
        panel(axes, content)
        axes.grid(alpha=0.3)
    total = content["total"]["perplexity"]
    figure.suptitle(
        f"perplexity {total:,.3f}" if total is not None else "perplexity beyond what a float holds"
    )
    save(figure, path)


def save(figure: Any, path: Path) -> None:
    """Write a matplotlib figure to `path`, a .png, whole or not at all."""
    with files.atomic(path) as partial:
        figure.savefig(partial, dpi=120)


def heat_map(
    axes: Any, rows: Sequence[Sequence[float]], lengths: Sequence[int], names: Sequence[str]
) -> Any:
    """Draw `rows` of shares, 0 to 1, over `lengths`, each with its percent; return the image."""
    image = axes.imshow(rows, cmap="RdYlGn", vmin=0, vmax=1, aspect="auto")
    for y, row in enumerate(rows):
        for x, share in enumerate(row):
            ink = "black" if 0.2 < share < 0.9 else "white"  # on dark red and dark green
            axes.text(x, y, f"{100 * share:.0f}", ha="center", va="center", fontsize=7, color=ink)
    axes.set_xticks(range(len(lengths)), [f"{length:,}" for length in lengths], rotation=45)
    axes.set_yticks(range(len(names)), names)
    return image


def _positions(axes: Any, content: dict[str, Any]) -> None:
    rows = content["by_position"]
    axes.stairs(
        [row["loss"] for row in rows],
        [row["first"] for row in rows] + [rows[-1]["last"] + 1],
        baseline=None,
    )
    axes.set_xscale("log", base=2)
    axes.set(
        xlabel="tokens before",
        ylabel="loss (nats)",
        title=f"loss by position, {rows[0]['tokens']:,} documents",
    )


def _contexts(axes: Any, content: dict[str, Any]) -> None:
    rows = content["by_context"]
    axes.plot([row["context"] for row in rows], [row["loss"] for row in rows], marker="o")
    axes.set_xscale("log", base=2)
    axes.set(xlabel="context", ylabel="loss (nats)", title=f"the same {rows[0]['tokens']:,} tokens")


def _documents(axes: Any, content: dict[str, Any]) -> None:
    scored = [
        row for row in content["documents"] if row["tokens"] and row["bits_per_byte"] is not None
    ]
    axes.scatter(
        [row["tokens"] for row in scored], [row["bits_per_byte"] for row in scored], s=8, alpha=0.6
    )
    axes.set_xscale("log", base=2)
    axes.set(
        xlabel="tokens of the document", ylabel="bits per byte", title=f"{len(scored):,} documents"
    )


PANELS = {"by_position": _positions, "by_context": _contexts, "documents": _documents}
