"""The tables and the picture of `longctx data`: the size of a data set, the lengths of its
documents, and how well they fill rows.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from longctx import files
from longctx.config.command_config import DescribeConfig

if TYPE_CHECKING:
    from rich.table import Table

    from longctx.data.dataset import Data
    from longctx.data.mixture import Mixture

_LONG = (4096, 16384, 65536)  # tokens; documents above these are what a long context is for


def describe(config: DescribeConfig) -> int:
    """Print the counts of a data set, and draw its document lengths if `out` is given."""
    from longctx.data.mixture import load  # pyarrow and tokenizers, which --help does not need
    from longctx.tables import show

    data = load(config.data, config.seq_len)
    counts = data.summary()
    show(_overview(data, counts))
    show(_rows(counts))
    if "mix" in counts:
        show(_members(counts["mix"]))
    show(_lengths(histogram(data), counts["tokens"]))
    if config.out is not None:
        draw(data, Path(config.out))
        print(f"\nHistogram of document lengths: {config.out}")
    return 0


class Bin(NamedTuple):
    """Documents of `low` to below `2 * low` tokens."""

    low: int
    documents: int
    tokens: int


def histogram(data: Data | Mixture) -> list[Bin]:
    """Count document lengths in bins from one power of two to the next, without gaps."""
    import numpy as np

    lengths = data.lengths
    power = np.frexp(lengths.astype(np.float64))[1] - 1  # floor(log2(length)), exact
    first, count = int(power.min()), int(power.max() - power.min()) + 1
    documents = np.bincount(power - first, minlength=count)
    tokens = np.bincount(power - first, weights=lengths, minlength=count)
    return [Bin(2 ** (first + i), int(documents[i]), int(tokens[i])) for i in range(count)]


def share_in_longer(data: Data | Mixture, length: int) -> float:
    """Return the share of all tokens in documents of more than `length` tokens."""
    lengths = data.lengths
    return float(lengths[lengths > length].sum() / lengths.sum())


def _overview(data: Data | Mixture, counts: dict[str, Any]) -> Table:
    from rich.table import Table

    table = Table(
        title=f"data={counts['source']}",
        title_justify="left",
        show_header=False,
        box=None,
        pad_edge=False,
    )
    table.add_column(style="dim")
    table.add_column(justify="right")
    empty = counts["documents_dropped"]
    about = f"{counts['near_duplicates']:,} near-duplicates of others"
    about += f", {empty:,} without text left out" if empty else ""
    table.add_row("documents", f"{counts['documents']:,} ({about})")
    if counts["conversations_shortened"]:
        table.add_row("learned in the last turn only", f"{counts['conversations_shortened']:,}")
    table.add_row("bytes", f"{counts['bytes']:,}")
    table.add_row("tokens", f"{counts['tokens']:,}")
    table.add_row("vocabulary", f"{counts['vocab_size']:,} tokens")
    table.add_row("bytes per token", f"{counts['bytes'] / counts['tokens']:.2f}")
    table.add_row("longest document", f"{int(data.lengths.max()):,} tokens")
    for length in _LONG:
        share = share_in_longer(data, length)
        table.add_row(f"tokens in documents > {length // 1024}K", f"{share:.1%}")
    return table


def _rows(counts: dict[str, Any]) -> Table:
    table = _columns(
        f"Rows of {counts['seq_len']:,} tokens", "split", "documents", "tokens", "rows", "filled"
    )
    for split in ("train", "val"):
        numbers = [f"{counts[f'{split}_{name}']:,}" for name in ("documents", "tokens", "rows")]
        filled = f"{counts[f'{split}_efficiency']:.2%}" if counts[f"{split}_rows"] else "-"
        table.add_row(split, *numbers, filled)
    return table


def _members(mix: dict[str, dict[str, Any]]) -> Table:
    table = _columns("Sources", "name", "weight", "documents", "tokens", "rows to train on")
    for name, counts in mix.items():
        numbers = [f"{counts[key]:,}" for key in ("documents", "tokens", "train_rows")]
        table.add_row(name, f"{counts['weight']:g}", *numbers)
    return table


def _lengths(bins: list[Bin], tokens: int) -> Table:
    table = _columns("Document lengths", "tokens", "documents")
    table.add_column("share of all tokens", header_style="dim")
    table.columns[0].justify = "right"
    limit = max(part.tokens for part in bins)
    for part in bins:
        bar = "█" * round(32 * part.tokens / limit)
        span = f"{part.low:,} – {2 * part.low - 1:,}" if part.low > 1 else "1"
        table.add_row(span, f"{part.documents:,}", f"{part.tokens / tokens:6.1%} {bar}")
    return table


def _columns(title: str, name: str, *numbers: str) -> Table:
    """Return a table of a name and, aligned to the right, of `numbers`."""
    from rich.table import Table

    table = Table(title=f"\n{title}", title_justify="left", box=None, pad_edge=False)
    table.add_column(name, header_style="dim")
    for number in numbers:
        table.add_column(number, justify="right", header_style="dim")
    return table


def draw(data: Data | Mixture, path: Path) -> None:
    """Write a picture of the document lengths: the number of documents, and their tokens."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import PercentFormatter, StrMethodFormatter

    bins = histogram(data)
    total = int(data.lengths.sum())
    figure, (above, below) = pyplot.subplots(
        2, 1, figsize=(8, 5.6), sharex=True, layout="constrained"
    )
    lows = [part.low for part in bins]
    style: dict[str, Any] = {"width": [0.94 * low for low in lows], "align": "edge"}
    above.bar(lows, [part.documents for part in bins], color="#4c78a8", **style)
    below.bar(lows, [part.tokens / total for part in bins], color="#f58518", **style)
    above.set_ylabel("documents")
    above.yaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    below.set_ylabel("share of all tokens")
    below.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    below.set_xlabel(f"document length (tokens); dashed: seq_len {data.seq_len:,}")
    below.set_xscale("log", base=2)
    edges = [*lows, 2 * lows[-1]]
    below.set_xticks(edges, [_short(edge) for edge in edges])
    below.minorticks_off()
    for axes in (above, below):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", alpha=0.3)
        axes.set_axisbelow(True)
        # Far from the documents, the line would squeeze them into a corner.
        if edges[0] <= data.seq_len <= edges[-1]:
            axes.axvline(data.seq_len, color="#333333", linestyle="--", linewidth=1)
    above.set_title(f"{data.config.source} · {len(data.lengths):,} documents, {total:,} tokens")
    try:
        with files.atomic(path) as partial:
            figure.savefig(partial, dpi=150, format=path.suffix.lstrip(".") or "png")
    except (OSError, ValueError) as error:  # ValueError: an ending that matplotlib cannot write
        raise ValueError(f"out={path}: cannot be written ({error}); give another file") from error
    finally:
        pyplot.close(figure)


def _short(tokens: int) -> str:
    if tokens >= 2**20:
        return f"{tokens // 2**20}M"
    return f"{tokens // 2**10}K" if tokens >= 2**10 else str(tokens)
