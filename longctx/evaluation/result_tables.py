"""Results as tables on the terminal."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from longctx.evaluation.perplexity import Perplexity, Score
from longctx.evaluation.results import Decode, gain_rows
from longctx.runs.evaluations import TaskScore
from longctx.tables import show as show_table

GAINS_SHOWN = 5


def tables(result: Perplexity, decode: Decode) -> list[Table]:
    """Documents, loss by position, loss over context, the tokens that gain most; without those that
    have no rows.
    """
    views = [table(result), by_position(result), by_context(result), gains(result, decode)]
    return [view for view in views if view.row_count]


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
            view.add_row(Text(heading, "dim"))
        for score in scores:
            view.add_row(*_cells(score))
        view.add_section()
    name, tokens, n_bytes, mean, *others = _cells(result.total)
    if not math.isnan(result.standard_error):  # of the loss, so times the perplexity
        mean += f" ± {result.total.perplexity * result.standard_error:,.3f}"
    view.add_row(name, tokens, n_bytes, mean, *others, style="bold")
    return view


def by_position(result: Perplexity) -> Table:
    """Loss over the number of tokens before, of the documents that reach the longest bucket."""
    rows = result.positions.buckets()
    documents = rows[0]["tokens"] if rows else 0
    view = _plain_table(
        f"loss by position, {documents:,} documents", "tokens before", "tokens", "loss"
    )
    for row in rows:
        span = f"{row['first']:,} – {row['last']:,}" if row["last"] > 1 else "1"
        view.add_row(span, f"{row['tokens']:,}", f"{row['loss']:.4f}")
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


def show(result: Perplexity, decode: Decode) -> None:
    """Print the tables of a perplexity."""
    for view in tables(result, decode):
        show_table(view)
    if result.contexts.contexts and not result.contexts.tokens:
        limit = result.contexts.contexts[-1]
        print(
            f"no document has more than {limit:,} tokens, so no tokens to compare contexts on; "
            "try a smaller seq_len="
        )


def speed(content: dict[str, Any]) -> str:
    """One line with time, tokens per second and memory, from the content of the JSON."""
    parts = [f"{content['seconds']:,.1f} s"]
    if rate := content["tokens_per_second"]:
        parts.append(f"{rate:,.0f} tokens/s through the model after the first batch")
    if memory := content["memory_peak_gib"]:
        parts.append(f"{memory:.1f} GiB")
    return ", ".join(parts)


def show_tasks(scores: Sequence[TaskScore]) -> None:
    """Print the scores of lm-evaluation-harness."""
    view = Table(title="lm-evaluation-harness", title_justify="left")
    for heading in ("task", "metric", "value", "± standard error"):
        text = heading in ("task", "metric")
        view.add_column(heading, justify="left" if text else "right")
    for task, metric, value, error in scores:
        shown = "" if error is None else f"{error:,.4f}"
        view.add_row(Text(task), Text(metric), f"{value:,.4f}", shown)
    show_table(view, keys=2)


def _plain_table(title: str, *headings: str) -> Table:
    view = Table(title=title, title_justify="left")
    for heading in headings:
        text = heading in ("in its text", "document")
        overflow: Any = "fold" if text else "ellipsis"  # the others are never broken
        view.add_column(heading, justify="left" if text else "right", overflow=overflow)
    return view


def _cells(score: Score) -> tuple[str, ...]:
    bits = "" if math.isnan(score.bits_per_byte) else f"{score.bits_per_byte:.4f}"
    words = "" if math.isnan(score.word_perplexity) else f"{score.word_perplexity:,.4g}"
    counts = f"{score.tokens:,}", f"{score.n_bytes:,}"
    return score.name, *counts, f"{score.perplexity:,.3f}", words, bits
