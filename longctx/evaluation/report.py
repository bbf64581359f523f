"""A perplexity as tables for people and as JSON for programs."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from longctx import files
from longctx.evaluation.perplexity import Perplexity, Score

Decode = Callable[[Sequence[int]], str]
GAINS_SHOWN = 5


def tables(result: Perplexity, decode: Decode) -> list[Table]:
    """Documents, loss by position, the curve over contexts, the tokens that gain most; those that
    have rows.
    """
    found = [table(result), by_position(result), by_context(result), gains(result, decode)]
    return [view for view in found if view.row_count]


def table(result: Perplexity, most: int = 3) -> Table:
    """The longest, best and worst `most` documents and the sums over all; every document where
    there are few.
    """
    scored = [score for score in result.documents if score.tokens]
    view = Table(
        title=f"context {result.context:,}, stride {result.stride:,}", title_justify="left"
    )
    view.add_column("document", overflow="fold")
    for heading in ("tokens", "bytes", "perplexity", "word perplexity", "bits per byte"):
        view.add_column(heading, justify="right")
    by_perplexity = sorted(scored, key=lambda score: score.perplexity)
    if len(scored) <= 3 * most:
        groups = {"": by_perplexity}
    else:
        longest = sorted(scored, key=lambda score: -score.tokens)
        groups = {
            "longest": longest[:most],
            "best": by_perplexity[:most],
            "worst": by_perplexity[-most:],
        }
    for heading, scores in groups.items():
        if heading:
            view.add_row(f"[dim]{heading}[/dim]")
        for score in scores:
            view.add_row(*_cells(score))
        view.add_section()
    view.add_row(*_cells(result.total), style="bold")
    return view


def by_position(result: Perplexity) -> Table:
    """Loss over the number of tokens before, of the documents that reach the longest bucket."""
    rows = result.positions.buckets()
    documents = rows[0]["tokens"] if rows else 0
    view = _plain_table(
        f"loss by position, {documents:,} documents", "tokens before", "tokens", "loss"
    )
    for row in rows:
        view.add_row(
            f"{row['first']:,} – {row['last']:,}", f"{row['tokens']:,}", f"{row['loss']:.4f}"
        )
    return view


def by_context(result: Perplexity) -> Table:
    """What the same tokens cost at each context."""
    view = _plain_table(
        f"the same {result.contexts.tokens:,} tokens of {result.contexts.documents:,} documents",
        *("context", "loss", "perplexity", "gain (nats)"),
    )
    for row in result.contexts.rows():
        numbers = f"{row['loss']:.4f}", f"{row['perplexity']:,.3f}", f"{row['gain']:.4f}"
        view.add_row(f"{row['context']:,}", *numbers)
    return view


def gains(result: Perplexity, decode: Decode) -> Table:
    """The tokens that gain most from the long context, in their text."""
    lengths = result.contexts.contexts
    title = f"gain most from {lengths[0]:,} → {lengths[-1]:,} tokens of context" if lengths else ""
    view = _plain_table(title, "loss", "", "in its text", "document")
    for row in gain_rows(result, decode)[:GAINS_SHOWN]:
        before, token, after = (row[key].replace("\n", "⏎") for key in ("before", "token", "after"))
        shown = Text.assemble(before[-50:], (f"⟦{token}⟧", "bold"), after[:20])
        view.add_row(f"{row['short']:.2f}", f"→ {row['long']:.2f}", shown, Text(row["document"]))
    return view


def gain_rows(result: Perplexity, decode: Decode) -> list[dict[str, Any]]:
    """The tokens that gain most, with the text before and after them."""
    return [
        {
            "document": result.documents[gain.owner].name,
            "position": gain.position,
            "short": gain.short,
            "long": gain.long,
            "gain": gain.nats,
            "before": decode(gain.ids[: gain.at]),
            "token": decode(gain.ids[gain.at : gain.at + 1]),
            "after": decode(gain.ids[gain.at + 1 :]),
        }
        for gain in result.contexts.gains
    ]


def show(result: Perplexity, decode: Decode) -> None:
    """Print the tables."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 160
    for view in tables(result, decode):
        console.print(view)
    if result.contexts.contexts and not result.contexts.tokens:
        limit = result.contexts.contexts[-1]
        console.print(
            f"no document has more than {limit:,} tokens, so no tokens to compare contexts on; try a smaller seq_len="
        )


def speed(found: dict[str, Any]) -> str:
    """How fast it went and what it took, in one line, from the content of the JSON."""
    said = f"{found['seconds']:,.1f} s"
    if found["tokens_per_second"]:
        said += (
            f", {found['tokens_per_second']:,.0f} tokens/s through the model after the first batch"
        )
    if found["memory_peak_gib"]:
        said += f", {found['memory_peak_gib']:.1f} GiB"
    return said


def show_tasks(scores: Sequence[tuple[str, str, float, float | None]]) -> None:
    """Print (task, metric, value, standard error or None) as a table."""
    view = Table(title="lm-evaluation-harness", title_justify="left")
    for heading in ("task", "metric", "value", "± standard error"):
        view.add_column(
            heading, justify="left" if heading in ("task", "metric") else "right", overflow="fold"
        )
    for task, metric, value, error in scores:
        view.add_row(
            Text(task), Text(metric), f"{value:,.4f}", "" if error is None else f"{error:,.4f}"
        )
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 160
    console.print(view)


def content(result: Perplexity, about: dict[str, Any], decode: Decode) -> dict[str, Any]:
    """What goes into the JSON: `about`, the totals, every document, position, context and gain."""
    return {
        **about,
        "context": result.context,
        "stride": result.stride,
        "windows": result.windows,
        "total": _plain(result.total),
        "by_position": result.positions.buckets(),
        "by_context": result.contexts.rows(),
        "gains": gain_rows(result, decode),
        "documents": [_plain(score) for score in result.documents],
    }


def place(path: Path, asked: dict[str, Any]) -> Path:
    """Where the answer to `asked` goes: `path`, or numbered beside it where the file there answers
    something else.
    """
    asked, number, place = json.loads(json.dumps(asked)), 1, path
    while place.exists() and _asked(place) != asked:
        number += 1
        place = path.with_name(f"{path.stem}-{number}.json")
    return place


def _asked(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8")).get("asked")
    except (OSError, ValueError, AttributeError):
        return None  # not ours, and kept


def write(found: dict[str, Any], path: Path) -> None:
    """Write `found` to `path`, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    files.write_text(path, json.dumps(found, indent=1, allow_nan=False) + "\n")


def _plain_table(title: str, *headings: str) -> Table:
    view = Table(title=title, title_justify="left")
    for heading in headings:
        text = heading in ("in its text", "document")
        view.add_column(heading, justify="left" if text else "right", overflow="fold")
    return view


def _cells(score: Score) -> tuple[str, ...]:
    bits = "" if math.isnan(score.bits_per_byte) else f"{score.bits_per_byte:.4f}"
    words = "" if math.isnan(score.word_perplexity) else f"{score.word_perplexity:,.4g}"
    name = score.name.replace("[", r"\[")
    return name, f"{score.tokens:,}", f"{score.n_bytes:,}", f"{score.perplexity:,.3f}", words, bits


def _plain(score: Score) -> dict[str, Any]:
    """A score in JSON; what is no number becomes null."""
    numbers = {
        "nats": score.nats,
        "perplexity": score.perplexity,
        "word_perplexity": score.word_perplexity,
        "bits_per_byte": score.bits_per_byte,
    }
    finite = {name: x if math.isfinite(x) else None for name, x in numbers.items()}
    return {
        "name": score.name,
        "tokens": score.tokens,
        "bytes": score.n_bytes,
        "words": score.n_words,
        **finite,
    }
