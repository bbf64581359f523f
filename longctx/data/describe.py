"""The tables of `longctx data`: the size of a data set, the lengths of its
documents, the share of each sequence that they fill, and a conversation with its targets.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import groupby, islice
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from longctx import hub_snapshot
from longctx.config.data_config import SOURCES, DataConfig
from longctx.data import far_back
from longctx.tables import console, count_of, grid

if TYPE_CHECKING:
    from rich.text import Text

    from longctx.data.dataset import Data

_RUNS, _BEGIN, _END = 12, 240, 80  # runs of an example, characters of each


def describe(seq_len: int, init: str | None, data: DataConfig) -> int:
    """Print the counts of a data set, its document lengths, and a conversation. `init` has its
    tokenizer, unless `data` names one.
    """
    from longctx.data.dataset import load  # pyarrow and tokenizers, which --help does not need

    if init is not None and data.tokenizer is None:
        folder = hub_snapshot.folder(hub_snapshot.pinned(init, "init"), "init")
        data = replace(data, tokenizer=str(folder))
    loaded = load(data, seq_len)
    print_tables(loaded)
    for text in conversations(loaded):
        console().print(text)
    return 0


def print_tables(data: Data) -> None:
    """Print an overview of a data set, its splits, its sources and its document lengths."""
    counts = data.summary()
    console().print("\n".join([f"data={counts['source']}", *overview(data, counts), ""]))
    names = ["documents", "tokens", "sequences", "efficiency"]
    splits = [
        {"split": split} | {name: counts[f"{split}_{name}"] for name in names}
        for split in ("train", "val")
    ]
    grid(f"Sequences of {counts['seq_len']:,} tokens", list(splits[0]), splits)
    rows = far_back.table({name: part.store.lengths for name, part in data.parts.items()})
    grid("Share of tokens with more than N tokens of their document before them", [*rows[0]], rows)
    console().print(f"{counts['far_back']}\n")
    for name, part in data.parts.items():
        if part.config.lengths:
            rows = part.by_length()
            grid(f"{name} training documents by data.lengths".strip(), [*rows[0]], rows)
    if "mix" in counts:
        columns = ["name", "weight", "documents", "tokens", "train_sequences"]
        grid("Sources", columns, [{"name": name} | part for name, part in counts["mix"].items()])


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


def overview(data: Data, counts: dict[str, Any]) -> Iterator[str]:
    """Yield a line for each count of the whole data set."""
    import numpy as np

    total = counts["tokens"]
    about = f" ({counts['left_out']} left out)" if counts["left_out"] else ""
    documents = count_of(counts["documents"], "document")
    yield f"{documents}{about}, {counts['bytes']:,} bytes"
    if others := SOURCES[data.config.source].left_out(data.config):
        yield f"files not read: {others}"
    if counts["conversations_shortened"]:
        yield f"learned in the last turn only: {counts['conversations_shortened']:,}"
    if counts["sources_without_end"]:
        yield "end of answers: no target is a token at which generation stops"
    yield from filter(None, [counts["without_target"]])
    yield f"{total:,} tokens of {counts['vocab_size']:,}, {counts['bytes'] / total:.2f} bytes each"
    half, nine_tenths, longest = np.quantile(data.lengths, (0.5, 0.9, 1)).astype(int).tolist()
    yield f"documents of {half:,} tokens (median), {nine_tenths:,} (90%), {longest:,} (longest)"
