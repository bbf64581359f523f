"""The tables of `longctx data`: the size of a data set, the lengths of its
documents, the share of each sequence that they fill, and a conversation with its targets.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import groupby, islice
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from longctx import hub_snapshot
from longctx.config.data_config import SOURCES, DataConfig
from longctx.config.doors import OBJECTIVES
from longctx.tables import console, show, text_table

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

    from longctx.data.dataset import Data

_RUNS, _BEGIN, _END = 12, 240, 80  # runs of an example, characters of each


def describe(
    seq_len: int, plugins: list[str] | None, objective: str, init: str | None, data: DataConfig
) -> int:
    """Print the counts of a data set, its document lengths, and a conversation."""
    from longctx.data.dataset import load  # pyarrow and tokenizers, which --help does not need

    preferences = OBJECTIVES[objective].data or data.preferences
    tokenizer = data.tokenizer
    if init is not None and tokenizer is None:
        tokenizer = str(hub_snapshot.folder(hub_snapshot.pinned(init, "init"), "init"))
    own = replace(data, preferences=preferences, tokenizer=tokenizer)
    loaded = load(own, seq_len)
    for table in tables(loaded):
        show(table)
    for text in conversations(loaded):
        console().print(text)
    return 0


def tables(data: Data) -> list[Table]:
    """Return the tables of a data set: an overview, its splits, its sources, document lengths."""
    counts = data.summary()
    result = [_overview(data, counts)]
    splits = []
    for split in ("train", "val"):
        numbers = [counts[f"{split}_{name}"] for name in ("documents", "tokens", "sequences")]
        filled = f"{counts[f'{split}_efficiency']:.2%}" if counts[f"{split}_sequences"] else "-"
        splits.append([split, *map("{:,}".format, numbers), filled])
    title = f"Sequences of {counts['seq_len']:,} tokens"
    result.append(
        text_table(title, ["split", "documents", "tokens", "sequences", "filled"], splits)
    )
    if "mix" in counts:
        names = ["name", "weight", "documents", "tokens", "sequences to train on"]
        sources = []
        for name, part in counts["mix"].items():
            numbers = [part[key] for key in ("documents", "tokens", "train_sequences")]
            sources.append([name, f"{part['weight']:g}", *map("{:,}".format, numbers)])
        result.append(text_table("Sources", names, sources))
    bins = histogram(data)
    limit = max(tokens for *_, tokens in bins)
    lengths = []
    for low, documents, tokens in bins:
        span = f"{low:,} – {2 * low - 1:,}" if low > 1 else "1"
        bar = "█" * round(32 * tokens / limit)
        lengths.append([span, f"{documents:,}", f"{tokens / counts['tokens']:6.1%} {bar}"])
    table = text_table("Document lengths", ["tokens", "documents", "share of all tokens"], lengths)
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
    about = f" ({empty:,} {data.config.why_left_out} left out)" if empty else ""
    rows = [["documents", f"{counts['documents']:,}{about}"]]
    if others := SOURCES[data.config.source].left_out(data.config):
        rows.append(["files not read", others])
    if counts["conversations_shortened"]:
        rows.append(["learned in the last turn only", f"{counts['conversations_shortened']:,}"])
    if counts["sources_without_end"]:
        rows.append(["end of answers", "no target is a token at which generation stops"])
    rows += [
        ["bytes", f"{counts['bytes']:,}"],
        ["tokens", f"{total:,}"],
        ["vocabulary", f"{counts['vocab_size']:,} tokens"],
        ["bytes per token", f"{counts['bytes'] / total:.2f}"],
        ["longest document", f"{int(lengths.max()):,} tokens"],
    ]
    table = text_table(f"data={counts['source']}", ["", ""], rows)
    table.show_header = False
    table.columns[0].style = "dim"
    return table


def histogram(data: Data) -> list[tuple[int, int, int]]:
    """Count documents and tokens in bins of length, without gaps: (shortest length, documents,
    tokens), from one power of two to the next.
    """
    import numpy as np

    lengths = data.lengths
    power = np.frexp(lengths.astype(np.float64))[1] - 1  # floor(log2(length)), exact
    first, count = int(power.min()), int(power.max() - power.min()) + 1
    documents = np.bincount(power - first, minlength=count)
    tokens = np.bincount(power - first, weights=lengths, minlength=count)
    return [(2 ** (first + i), int(documents[i]), int(tokens[i])) for i in range(count)]
