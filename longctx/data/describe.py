"""What `python -m longctx.data` prints and draws: size, tokens, how long the documents are, how well they fill rows.

The key=value words are those of train.py. The presets in configs/data are read as plain YAML: one group needs no
composition, and data/ does not know Hydra.
"""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import re
import sys
import typing
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from longctx import files
from longctx.data.config import DataConfig
from longctx.options import answer

if TYPE_CHECKING:
    from longctx.data.dataset import Data

_PRESETS = Path(__file__).resolve().parents[2] / "configs" / "data"
_LONG = (4096, 16384, 65536)  # tokens; documents above these are what a long context is for


class Options(NamedTuple):
    config: DataConfig
    seq_len: int
    out: str | None


def main(argv: list[str]) -> int:
    """Describe the data set that `argv` names; 0, or 2 after one line on stderr."""
    return answer(argv, help_text, run)


def run(argv: list[str]) -> None:
    """Print and draw; ValueError or OSError, one line, for what cannot be described."""
    options = read_words(argv)
    from longctx.data.dataset import Data

    data = Data(options.config, options.seq_len)
    _print(data)
    if options.out is not None:
        draw(data, Path(options.out))
        print(f"\nHistogram of document lengths: {options.out}")


def help_text() -> str:
    lines = [
        "Describe a data set: documents, tokens, lengths, split, and packing into rows.",
        "",
        "  python -m longctx.data seq_len=16384",
        "  python -m longctx.data data=text data.path=docs/ out=docs.png",
        "",
        "Keys (key=value):",
        f"  {'data=embedded':<34}{' | '.join(_preset_names())}",
        f"  {'seq_len=4096':<34}tokens in a row",
        f"  {'out=lengths.png':<34}picture of the document lengths; null: none",
    ]
    meanings = re.findall(r"^    (\w+): [^#\n]*  # (.*)$", inspect.getsource(DataConfig), re.MULTILINE)
    words = {None: "null", dataclasses.MISSING: "{}", False: "false"}
    defaults = {field.name: words.get(field.default, field.default) for field in dataclasses.fields(DataConfig)}
    lines += [f"  {f'data.{name}={defaults[name]}':<34}{meaning}" for name, meaning in meanings]
    return "\n".join(lines)


def read_words(argv: list[str]) -> Options:
    """key=value words as Options; ValueError with one line for a word, key or value that cannot be."""
    given: dict[str, str] = {}
    for word in argv:
        key, equals, value = word.partition("=")
        if not equals:
            raise ValueError(f"{word}: not of the form key=value, such as seq_len=16384; see --help")
        if key not in _keys():
            close = difflib.get_close_matches(key, _keys(), n=1) or difflib.get_close_matches(
                f"data.{key}", _keys(), n=1
            )
            hint = f"; did you mean {close[0]}?" if close else ""
            raise ValueError(f"{key} is not a key{hint} (keys: {', '.join(_keys())})")
        given[key] = value
    preset = given.get("data", "embedded")
    if preset not in _preset_names():
        raise ValueError(f"data={preset}: not one of {', '.join(_preset_names())}")
    import yaml

    values = yaml.safe_load((_PRESETS / f"{preset}.yaml").read_text()) or {}
    hints = typing.get_type_hints(DataConfig)
    for key, text in given.items():
        if key.startswith("data."):
            name = key.removeprefix("data.")
            values[name] = _value(key, text, hints[name])
    config = DataConfig(**values)
    config.validate_words()
    config.check_words(given)
    out = _value("out", given.get("out", "lengths.png"), str | None)
    if out == "":
        raise ValueError("out= names no picture; give a file such as out=lengths.png, or out=null for none")
    return Options(config, _value("seq_len", given.get("seq_len", "4096"), int), out)


def _keys() -> list[str]:
    return ["data", "seq_len", "out", *(f"data.{field.name}" for field in dataclasses.fields(DataConfig))]


def _preset_names() -> list[str]:
    return sorted(file.stem for file in _PRESETS.glob("*.yaml"))


def _value(key: str, text: str, hint: Any) -> Any:
    kinds = typing.get_args(hint) or (hint,)
    if text == "null" and (type(None) in kinds or hint is Any):
        return None
    if hint is Any and text.startswith("[") and text.endswith("]"):
        return [part.strip().strip("'\"") for part in text[1:-1].split(",") if part.strip()]
    for kind, what in ((int, "a whole number"), (float, "a number")):
        if kind in kinds:
            try:
                return kind(text)
            except ValueError as error:
                raise ValueError(f"{key}={text}: must be {what}") from error
    return text


class Bin(NamedTuple):
    """Documents of `low` to below `2 * low` tokens."""

    low: int
    documents: int
    tokens: int


def histogram(data: Data) -> list[Bin]:
    """Document lengths in bins from one power of two to the next, without gaps."""
    import numpy as np

    lengths = data.store.lengths
    power = np.frexp(lengths.astype(np.float64))[1] - 1  # floor(log2(length)), exact
    first, count = int(power.min()), int(power.max() - power.min()) + 1
    documents = np.bincount(power - first, minlength=count)
    tokens = np.bincount(power - first, weights=lengths, minlength=count)
    return [Bin(2 ** (first + i), int(documents[i]), int(tokens[i])) for i in range(count)]


def share_in_longer(data: Data, length: int) -> float:
    """Share of all tokens that lie in documents of more than `length` tokens."""
    lengths = data.store.lengths
    return float(lengths[lengths > length].sum() / lengths.sum())


def _print(data: Data) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(width=None if sys.stdout.isatty() else 100)
    about = data.summary()
    facts = Table(title=f"data={about['source']}", title_justify="left", show_header=False, box=None, pad_edge=False)
    facts.add_column(style="dim")
    facts.add_column(justify="right")
    dropped = f", {about['documents_dropped']:,} empty left out" if about["documents_dropped"] else ""
    facts.add_row(
        "documents", f"{about['documents']:,} ({about['near_duplicates']:,} near-duplicates of others{dropped})"
    )
    facts.add_row("bytes", f"{about['bytes']:,}")
    facts.add_row("tokens", f"{about['tokens']:,}")
    facts.add_row("vocabulary", f"{about['vocab_size']:,} tokens")
    facts.add_row("bytes per token", f"{about['bytes'] / about['tokens']:.2f}")
    facts.add_row("longest document", f"{int(data.store.lengths.max()):,} tokens")
    for length in _LONG:
        facts.add_row(f"tokens in documents > {length // 1024}K", f"{share_in_longer(data, length):.1%}")
    console.print(facts)

    rows = Table(title=f"\nRows of {data.seq_len:,} tokens", title_justify="left", box=None, pad_edge=False)
    for name in ("split", "documents", "tokens", "rows", "filled"):
        rows.add_column(name, justify="left" if name == "split" else "right", header_style="dim")
    for split in ("train", "val"):
        counts = [f"{about[f'{split}_{what}']:,}" for what in ("documents", "tokens", "rows")]
        rows.add_row(split, *counts, f"{about[f'{split}_efficiency']:.2%}" if about[f"{split}_rows"] else "-")
    console.print(rows)

    lengths = Table(title="\nDocument lengths", title_justify="left", box=None, pad_edge=False)
    for name in ("tokens", "documents", "share of all tokens"):
        lengths.add_column(name, justify="left" if name.startswith("share") else "right", header_style="dim")
    bins = histogram(data)
    widest = max(one.tokens for one in bins)
    for one in bins:
        bar = "█" * round(32 * one.tokens / widest)
        span = f"{one.low:,} – {2 * one.low - 1:,}" if one.low > 1 else "1"
        lengths.add_row(span, f"{one.documents:,}", f"{one.tokens / about['tokens']:6.1%} {bar}")
    console.print(lengths)


def draw(data: Data, path: Path) -> None:
    """Write the histogram of document lengths as a picture: how many documents, and where the tokens are."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import PercentFormatter, StrMethodFormatter

    bins = histogram(data)
    total = int(data.store.lengths.sum())
    lows = [one.low for one in bins]
    figure, (above, below) = pyplot.subplots(2, 1, figsize=(8, 5.6), sharex=True, layout="constrained")
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
        place = {"xy": (data.seq_len, 0.97), "xycoords": ("data", "axes fraction"), "va": "top", "ha": side}
        above.annotate(f" seq_len {data.seq_len:,} ", **place)
    source = (
        data.config.source if data.config.path is None else f"{data.config.source}: {', '.join(data.config.paths())}"
    )
    above.set_title(f"{source} · {len(data.store):,} documents, {total:,} tokens", loc="left")
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
