"""What `longctx data` prints and draws: size, tokens, how long the documents are, how well they fill rows."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from longctx import files
from longctx.config.command_config import DescribeConfig

if TYPE_CHECKING:
    from longctx.data.dataset import Data
    from longctx.data.mix import Mixture

_LONG = (4096, 16384, 65536)  # tokens; documents above these are what a long context is for


def describe(asked: DescribeConfig) -> int:
    """Print and draw; ValueError or OSError, one line, for what cannot be described."""
    from longctx.data.dataset import load

    data = load(asked.data, asked.seq_len)
    _print(data)
    if asked.out is not None:
        draw(data, Path(asked.out))
        print(f"\nHistogram of document lengths: {asked.out}")
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
    from rich.console import Console
    from rich.table import Table

    console = Console(width=None if sys.stdout.isatty() else 100)
    about = data.summary()
    facts = Table(
        title=f"data={about['source']}",
        title_justify="left",
        show_header=False,
        box=None,
        pad_edge=False,
    )
    facts.add_column(style="dim")
    facts.add_column(justify="right")
    dropped = (
        f", {about['documents_dropped']:,} empty left out" if about["documents_dropped"] else ""
    )
    facts.add_row(
        "documents",
        f"{about['documents']:,} ({about['near_duplicates']:,} near-duplicates of others{dropped})",
    )
    facts.add_row("bytes", f"{about['bytes']:,}")
    facts.add_row("tokens", f"{about['tokens']:,}")
    facts.add_row("vocabulary", f"{about['vocab_size']:,} tokens")
    facts.add_row("bytes per token", f"{about['bytes'] / about['tokens']:.2f}")
    facts.add_row("longest document", f"{int(data.lengths.max()):,} tokens")
    for length in _LONG:
        facts.add_row(
            f"tokens in documents > {length // 1024}K", f"{share_in_longer(data, length):.1%}"
        )
    console.print(facts)

    rows = Table(
        title=f"\nRows of {data.seq_len:,} tokens", title_justify="left", box=None, pad_edge=False
    )
    for name in ("split", "documents", "tokens", "rows", "filled"):
        rows.add_column(name, justify="left" if name == "split" else "right", header_style="dim")
    for split in ("train", "val"):
        counts = [f"{about[f'{split}_{what}']:,}" for what in ("documents", "tokens", "rows")]
        rows.add_row(
            split, *counts, f"{about[f'{split}_efficiency']:.2%}" if about[f"{split}_rows"] else "-"
        )
    console.print(rows)

    if "mix" in about:
        mix = Table(title="\nSources", title_justify="left", box=None, pad_edge=False)
        for name in ("name", "weight", "documents", "tokens", "rows to train on"):
            mix.add_column(name, justify="left" if name == "name" else "right", header_style="dim")
        for name, part in about["mix"].items():
            counts = [f"{part[key]:,}" for key in ("documents", "tokens", "train_rows")]
            mix.add_row(name, f"{part['weight']:g}", *counts)
        console.print(mix)

    lengths = Table(title="\nDocument lengths", title_justify="left", box=None, pad_edge=False)
    for name in ("tokens", "documents", "share of all tokens"):
        lengths.add_column(
            name, justify="left" if name.startswith("share") else "right", header_style="dim"
        )
    bins = histogram(data)
    widest = max(one.tokens for one in bins)
    for one in bins:
        bar = "█" * round(32 * one.tokens / widest)
        span = f"{one.low:,} – {2 * one.low - 1:,}" if one.low > 1 else "1"
        lengths.add_row(span, f"{one.documents:,}", f"{one.tokens / about['tokens']:6.1%} {bar}")
    console.print(lengths)


def draw(data: Data | Mixture, path: Path) -> None:
    """Write the histogram of document lengths as a picture: how many documents, and where the tokens are."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import PercentFormatter, StrMethodFormatter

    bins = histogram(data)
    total = int(data.lengths.sum())
    lows = [one.low for one in bins]
    figure, (above, below) = pyplot.subplots(
        2, 1, figsize=(8, 5.6), sharex=True, layout="constrained"
    )
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
        if edges[0] <= data.seq_len <= edges[-1]:
            axes.axvline(data.seq_len, color="#333333", linestyle="--", linewidth=1)
    if edges[0] <= data.seq_len <= edges[-1]:
        side = "left" if 4 * data.seq_len <= edges[-1] else "right"
        place = {
            "xy": (data.seq_len, 0.97),
            "xycoords": ("data", "axes fraction"),
            "va": "top",
            "ha": side,
        }
        above.annotate(f" seq_len {data.seq_len:,} ", **place)
    source = (
        data.config.source
        if data.config.path is None
        else f"{data.config.source}: {', '.join(data.config.paths())}"
    )
    above.set_title(f"{source} · {len(data.lengths):,} documents, {total:,} tokens", loc="left")
    try:
        with files.whole(path) as partial:
            figure.savefig(partial, dpi=150, format=path.suffix.lstrip(".") or "png")
    except OSError as error:
        raise OSError(f"out={path}: cannot write there ({error.strerror or error})") from error
    except ValueError as error:
        raise ValueError(f"out={path}: {error}") from error
    finally:
        pyplot.close(figure)


def _short(tokens: int) -> str:
    for size, unit in ((2**20, "M"), (2**10, "K")):
        if tokens >= size:
            return f"{tokens // size}{unit}"
    return str(tokens)
