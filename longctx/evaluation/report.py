"""A perplexity as a table for people and as JSON for programs."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from longctx.evaluation.perplexity import Perplexity, Score


def table(result: Perplexity, most: int = 3) -> Table:
    """The longest, best and worst `most` documents and the sums over all; every document where there are few."""
    scored = [score for score in result.documents if score.tokens]
    view = Table(title=f"context {result.context:,}, stride {result.stride:,}", title_justify="left")
    view.add_column("document", overflow="fold")
    for heading in ("tokens", "bytes", "perplexity", "bits per byte"):
        view.add_column(heading, justify="right")
    by_perplexity = sorted(scored, key=lambda score: score.perplexity)
    if len(scored) <= 3 * most:
        groups = {"": by_perplexity}
    else:
        longest = sorted(scored, key=lambda score: -score.tokens)
        groups = {"longest": longest[:most], "best": by_perplexity[:most], "worst": by_perplexity[-most:]}
    for heading, scores in groups.items():
        if heading:
            view.add_row(f"[dim]{heading}[/dim]")
        for score in scores:
            view.add_row(*_cells(score))
        view.add_section()
    view.add_row(*_cells(result.total), style="bold")
    return view


def show(result: Perplexity) -> None:
    """Print the table."""
    Console().print(table(result))


def write(result: Perplexity, about: dict[str, Any], path: Path) -> None:
    """Write `about`, the totals and every document to `path`, whole or not at all; what is no number becomes null."""
    content = {
        **about,
        "context": result.context,
        "stride": result.stride,
        "windows": result.windows,
        "total": _plain(result.total),
        "documents": [_plain(score) for score in result.documents],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n", encoding="utf-8")
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _cells(score: Score) -> tuple[str, ...]:
    bits = "" if math.isnan(score.bits_per_byte) else f"{score.bits_per_byte:.4f}"
    name = score.name.replace("[", r"\[")
    return name, f"{score.tokens:,}", f"{score.n_bytes:,}", f"{score.perplexity:,.3f}", bits


def _plain(score: Score) -> dict[str, Any]:
    numbers = {"nats": score.nats, "perplexity": score.perplexity, "bits_per_byte": score.bits_per_byte}
    finite = {name: x if math.isfinite(x) else None for name, x in numbers.items()}
    return {"name": score.name, "tokens": score.tokens, "bytes": score.n_bytes, **finite}
