"""The tables and the picture of `longctx data`: the size of a data set, the lengths of its
documents, the share of each sequence that they fill, and a conversation with its targets.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import groupby, islice
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from longctx import files, hub_snapshot, untrusted
from longctx.config.command_config import DescribeConfig
from longctx.config.data_config import SOURCES
from longctx.config.doors import OBJECTIVES

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

    from longctx.data.dataset import Data

_RUNS, _BEGIN, _END = 12, 240, 80  # runs of an example, characters of each
_LONG = (4096, 16384, 65536)  # tokens; a long context is for documents above these


def describe(config: DescribeConfig) -> int:
    """Print the counts of a data set, and draw its document lengths if `out` is given."""
    from longctx.data.dataset import load  # pyarrow and tokenizers, which --help does not need
    from longctx.tables import console, show

    preferences = OBJECTIVES[config.objective].data or config.data.preferences
    tokenizer = config.data.tokenizer
    if config.init is not None and tokenizer is None:
        tokenizer = str(hub_snapshot.folder(hub_snapshot.pinned(config.init, "init"), "init"))
    own = replace(config.data, preferences=preferences, tokenizer=tokenizer)
    data = load(own, config.seq_len)
    for table in tables(data):
        show(table)
    for text in conversations(data):
        console().print(text)
    if config.out is not None:
        draw(data, Path(config.out))
        print(f"\nHistogram of document lengths: {config.out}")
    return 0


def tables(data: Data) -> list[Table]:
    """Return the tables of a data set: an overview, its splits, its sources, document lengths."""
    counts = data.summary()
    result = [_overview(data, counts)]
    splits = []
    for split in ("train", "val"):
        numbers = [counts[f"{split}_{name}"] for name in ("documents", "tokens", "rows")]
        filled = f"{counts[f'{split}_efficiency']:.2%}" if counts[f"{split}_rows"] else "-"
        splits.append([split, *map("{:,}".format, numbers), filled])
    title = f"Sequences of {counts['seq_len']:,} tokens"
    result.append(_table(title, ["split", "documents", "tokens", "sequences", "filled"], splits))
    if "mix" in counts:
        names = ["name", "weight", "documents", "tokens", "sequences to train on"]
        sources = []
        for name, part in counts["mix"].items():
            numbers = [part[key] for key in ("documents", "tokens", "train_rows")]
            sources.append([name, f"{part['weight']:g}", *map("{:,}".format, numbers)])
        result.append(_table("Sources", names, sources))
    bins = histogram(data)
    limit = max(part.tokens for part in bins)
    lengths = []
    for part in bins:
        span = f"{part.low:,} – {2 * part.low - 1:,}" if part.low > 1 else "1"
        bar = "█" * round(32 * part.tokens / limit)
        share = f"{part.tokens / counts['tokens']:6.1%} {bar}"
        lengths.append([span, f"{part.documents:,}", share])
    table = _table("Document lengths", ["tokens", "documents", "share of all tokens"], lengths)
    table.columns[0].justify = "right"
    table.columns[2].justify = "left"
    return [*result, table]


def conversations(data: Data) -> list[Text]:
    """Return the beginning of a conversation of each source, its targets between ⟦ and ⟧."""
    from rich.text import Text

    texts = []
    for name, part in data.parts.items():
        document = next(part.documents("train"))
        if document.scored is None:
            continue
        title = f"{name}/{document.name}" if name else document.name
        text = Text(f"\n{title}: targets are between ⟦ and ⟧\n\n")
        tokens = zip(document.ids.tolist(), document.scored.tolist(), strict=True)
        for is_target, run in islice(groupby(tokens, key=itemgetter(1)), _RUNS):
            written = data.tokenizer.decode(token for token, _ in run)
            if len(written) > _BEGIN + _END:
                written = f"{written[:_BEGIN]} … {written[-_END:]}"
            text.append(f"⟦{written}⟧" if is_target else written, "bold green" if is_target else "")
        texts.append(text)
    return texts


def _overview(data: Data, counts: dict[str, Any]) -> Table:
    lengths = data.lengths
    empty, total = counts["documents_dropped"], counts["tokens"]
    about = f"{counts['near_duplicates']:,} near-duplicates of others"
    about += f", {empty:,} without text left out" if empty else ""
    rows = [["documents", f"{counts['documents']:,} ({about})"]]
    if others := SOURCES[data.config.source].left_out(data.config):
        rows.append(["files not read", others])
    if counts["conversations_shortened"]:
        rows.append(["learned in the last turn only", f"{counts['conversations_shortened']:,}"])
    rows += [
        ["bytes", f"{counts['bytes']:,}"],
        ["tokens", f"{total:,}"],
        ["vocabulary", f"{counts['vocab_size']:,} tokens"],
        ["bytes per token", f"{counts['bytes'] / total:.2f}"],
        ["longest document", f"{int(lengths.max()):,} tokens"],
    ]
    for length in _LONG:
        share = lengths[lengths > length].sum() / lengths.sum()
        rows.append([f"tokens in documents > {length // 1024}K", f"{share:.1%}"])
    table = _table(f"data={counts['source']}", ["", ""], rows)
    table.show_header = False
    table.columns[0].style = "dim"
    return table


def _table(title: str, names: list[str], rows: Iterable[list[str]]) -> Table:
    """Return a table whose columns but the first are aligned to the right."""
    from rich.table import Table

    table = Table(title=f"\n{title}", title_justify="left", box=None, pad_edge=False)
    for number, name in enumerate(names):
        table.add_column(name, justify="right" if number else "left", header_style="dim")
    for row in rows:
        table.add_row(*row)
    return table


class Bin(NamedTuple):
    """Documents of `low` to below `2 * low` tokens."""

    low: int
    documents: int
    tokens: int


def histogram(data: Data) -> list[Bin]:
    """Count document lengths in bins from one power of two to the next, without gaps."""
    import numpy as np

    lengths = data.lengths
    power = np.frexp(lengths.astype(np.float64))[1] - 1  # floor(log2(length)), exact
    first, count = int(power.min()), int(power.max() - power.min()) + 1
    documents = np.bincount(power - first, minlength=count)
    tokens = np.bincount(power - first, weights=lengths, minlength=count)
    return [Bin(2 ** (first + i), int(documents[i]), int(tokens[i])) for i in range(count)]


def draw(data: Data, path: Path) -> None:
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
    # ValueError: an ending that matplotlib cannot write
    problem = "cannot be written ({}); give another file"
    with untrusted.named(f"out={path}", problem, (OSError, ValueError)), files.atomic(path) as file:
        figure.savefig(file, dpi=150, format=path.suffix.lstrip(".") or "png")
    pyplot.close(figure)


def _short(tokens: int) -> str:
    if tokens >= 2**20:
        return f"{tokens // 2**20}M"
    return f"{tokens // 2**10}K" if tokens >= 2**10 else str(tokens)
