"""What `longctx data` prints and draws: how large a data set is, how long its documents are, and
how well they fill rows.
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
    """Print and draw; ValueError or OSError, one line, for what cannot be described."""
    from longctx.data.mixture import load  # pyarrow and tokenizers, which --help does not need

    data = load(config.data, config.seq_len)
    _print(data)
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
    """Document lengths in bins from one power of two to the next, without gaps."""
    import numpy as np

    lengths = data.lengths
    power = np.frexp(lengths.astype(np.float64))[1] - 1  # floor(log2(length)), exact
    first, count = int(power.min()), int(power.max() - power.min()) + 1
    documents = np.bincount(power - first, minlength=count)
    tokens = np.bincount(power - first, weights=lengths, minlength=count)
    return [Bin(2 ** (first + i), int(documents[i]), int(tokens[i])) for i in range(count)]


def share_in_longer(data: Data | Mixture, length: int) -> float:
    """Share of all tokens that lie in documents of more than `length` tokens."""
    lengths = data.lengths
    return float(lengths[lengths > length].sum() / lengths.sum())


def _print(data: Data | Mixture) -> None:
    from longctx.tables import show

    counts = data.summary()
    show(_facts(data, counts))
    show(_rows(counts))
    if "mix" in counts:
        show(_members(counts["mix"]))
    show(_lengths(histogram(data), counts["tokens"]))


def _facts(data: Data | Mixture, counts: dict[str, Any]) -> Table:
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
    most = max(one.tokens for one in bins)
    for one in bins:
        bar = "█" * round(32 * one.tokens / most)
        span = f"{one.low:,} – {2 * one.low - 1:,}" if one.low > 1 else "1"
        table.add_row(span, f"{one.documents:,}", f"{one.tokens / tokens:6.1%} {bar}")
    return table


def _columns(title: str, name: str, *numbers: str) -> Table:
    """A table of a name and, aligned to the right, of `numbers`."""
    from rich.table import Table

    table = Table(title=f"\n{title}", title_justify="left", box=None, pad_edge=False)
    table.add_column(name, header_style="dim")
    for number in numbers:
        table.add_column(number, justify="right", header_style="dim")
    return table


def draw(data: Data | Mixture, path: Path) -> None:
    """Write a picture of the document lengths: how many documents there are, and where the tokens
    are.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import PercentFormatter, StrMethodFormatter

    bins = histogram(data)
    total = int(data.lengths.sum())
    figure, (above, below) = pyplot.subplots(
        2, 1, figsize=(8, 5.6), sharex=True, layout="constrained"
    )
    # Two bar charts over the same lengths.
    lows = [one.low for one in bins]
    style = {"width": [0.94 * low for low in lows], "align": "edge"}
    above.bar(lows, [one.documents for one in bins], color="#4c78a8", **style)
    below.bar(lows, [one.tokens / total for one in bins], color="#f58518", **style)
    above.set_ylabel("documents")
    above.yaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    below.set_ylabel("share of all tokens")
    below.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    below.set_xlabel("document length (tokens)")
    below.set_xscale("log", base=2)
    edges = [*lows, 2 * lows[-1]]
    below.set_xticks(edges, [_short(edge) for edge in edges])
    below.minorticks_off()
    for axes in (above, below):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", alpha=0.3)
        axes.set_axisbelow(True)
    # The row length, where it lies within them.
    if edges[0] <= data.seq_len <= edges[-1]:
        for axes in (above, below):
            axes.axvline(data.seq_len, color="#333333", linestyle="--", linewidth=1)
        above.annotate(
            f" seq_len {data.seq_len:,} ",
            xy=(data.seq_len, 0.97),
            xycoords=("data", "axes fraction"),
            va="top",
            ha="left" if 4 * data.seq_len <= edges[-1] else "right",
        )
    source = data.config.source
    if data.config.path is not None:
        source += f": {', '.join(data.config.paths())}"
    above.set_title(f"{source} · {len(data.lengths):,} documents, {total:,} tokens", loc="left")
    try:
        with files.atomic(path) as partial:
            figure.savefig(partial, dpi=150, format=path.suffix.lstrip(".") or "png")
    except OSError as error:
        raise OSError(
            f"out={path}: cannot write there ({error.strerror or error}); give another file"
        ) from error
    except ValueError as error:
        raise ValueError(f"out={path}: {error}") from error
    finally:
        pyplot.close(figure)


def _short(tokens: int) -> str:
    for size, unit in ((2**20, "M"), (2**10, "K")):
        if tokens >= size:
            return f"{tokens // size}{unit}"
    return str(tokens)
