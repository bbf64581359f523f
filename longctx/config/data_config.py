"""What a data set is made of: where its documents come from, how they become tokens, which of them validate.

No import of torch, datasets or tokenizers here: the command line reads this file before it knows whether it will train.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args, get_type_hints

from longctx.config.fields import check, key

SOURCES = ("embedded", "text", "hub", "needles", "mix")
FOR = {  # keys that not every source has a use for → what they are for
    "errors": "for text files",
    "text_column": "for rows with a field of text",
    "name": "for data sets of the Hugging Face Hub",
    "split": "for data sets of the Hugging Face Hub",
    "files": "for data sets of the Hugging Face Hub",
    "revision": "for data sets of the Hugging Face Hub",
    "length": "for generated documents",
}
OF_ALL = (
    "mix",
    "tokenizer",
    "vocab_size",
    "cache",
)  # keys that a mix has once, not for each source


@dataclass
class DataConfig:
    """Everything that decides the documents and their tokens; the row length is given to `load`."""

    source: str = key("embedded", "embedded | text | hub | needles | mix")
    path: Any = key(
        None,
        "text, and what needles lie in: file, folder, glob, list [a,b]; hub: OWNER/NAME, or a "
        "builder",
    )
    text_column: str = key("text", "field of .jsonl and .parquet files and of hub data sets")
    chat: bool = key(
        False,
        "rows are `messages`, written by the tokenizer's chat template; the assistant's are scored",
    )
    errors: str = key(
        "strict",
        "text: bytes that are not UTF-8 stop it (strict) or are replaced (replace)",
        choices=("strict", "replace"),
    )
    name: str | None = key(None, "hub: configuration of a data set that has several")
    split: str = key(
        "train",
        "hub: split of the data set to read; validation documents are taken out of it",
    )
    files: Any = key(
        None,
        "hub: the files to read, with a builder: data.path=json data.files=a.jsonl",
    )
    revision: str | None = key(None, "hub: commit, tag or branch; null: the newest")
    documents: int | None = key(
        None, "read the first so many documents; null: all", between=(1, 10**12)
    )
    length: int = key(8192, "needles: characters of a document", between=(256, 2**30))
    mix: dict[str, Any] = key({}, "mix: data.mix.NAME.KEY=..., any key of data, and weight")
    tokenizer: str | None = key(
        None,
        "tokenizer.json or Hugging Face folder; null: a BPE trained on the documents",
    )
    vocab_size: int = key(16384, "of the tokenizer trained here")
    val_fraction: float = key(
        0.02,
        "share of documents that validate, chosen by their hash; 0: none",
    )
    cache: str | None = key(
        None,
        "folder of what is built once; null: $LONGCTX_CACHE, else ~/.cache/longctx",
    )

    def validate(self) -> None:
        """Raise ValueError naming the first key that cannot be right, before anything is read."""
        if self.source not in SOURCES:
            raise ValueError(
                f"data.source={self.source}: not a source; use one of {', '.join(SOURCES)}"
            )
        if self.source in ("text", "hub") and not self.paths():
            what = "a file, folder or glob" if self.source == "text" else "a data set's name"
            raise ValueError(
                f"data.path is not set: data={self.source} needs {what}, data.path=..."
            )
        if self.source in ("embedded", "mix") and self.paths():
            raise ValueError(
                f"data.path={self.path}: data={self.source} has no path; add data=text to read your own documents"
            )
        if self.mix or self.source == "mix":
            self.sources()
        if self.chat and self.source not in ("text", "hub", "mix"):
            raise ValueError(
                f"data.chat=true: data={self.source} has no conversations; use data=text or data=hub"
            )
        if self.source != "hub" and self.data_files():
            raise ValueError(
                f"data.files={self.files}: only data=hub has files; data={self.source} reads data.path"
            )
        if self.source == "hub" and len(self.paths()) != 1:
            raise ValueError(f"data.path={self.path}: data=hub takes one data set's name")
        check(self, "data.")
        if not 0 <= self.val_fraction < 1:
            raise ValueError(
                f"data.val_fraction={self.val_fraction}: use a share from 0 (no validation) to below 1"
            )
        if self.tokenizer is None and not 257 <= self.vocab_size <= 2**20:
            raise ValueError(
                f"data.vocab_size={self.vocab_size}: from 257 tokens, all bytes and an end, to 1,048,576"
            )

    def validate_words(self) -> None:
        """`validate`, and a ValueError for a key that somebody gave and this source has no use for."""
        self.validate()
        for name, source in (
            ("name", "hub"),
            ("split", "hub"),
            ("revision", "hub"),
            ("length", "needles"),
        ):
            if self.source not in (source, "mix") and getattr(self, name) != getattr(
                DataConfig, name
            ):
                raise ValueError(
                    f"data.{name}={getattr(self, name)}: only data={source} has it; leave it out with data={self.source}"
                )

    def check_words(self, words: Mapping[str, str]) -> None:
        """ValueError for one of the `words` (data.KEY → value) that somebody gave and nothing comes of.

        A saved configuration says every key, so this cannot be asked of its values.
        """
        if self.tokenizer is not None and "data.vocab_size" in words:
            raise ValueError(
                f"data.vocab_size={words['data.vocab_size']}: data.tokenizer={self.tokenizer} has its own; leave one out"
            )
        parts: dict[str, tuple[DataConfig, Mapping[str, Any]]] = {
            "data": (
                self,
                {name[5:]: value for name, value in words.items() if name.startswith("data.")},
            )
        }
        if self.source == "mix":
            parts |= {
                f"data.mix.{name}": (one, self.mix[name])
                for name, (_, one) in self.sources().items()
            }
        for place, (one, said) in parts.items():
            for name in said:
                if not one.uses(name):
                    raise ValueError(
                        f"{place}.{name}={said[name]}: {FOR[name]}, and {one.source} reads none; leave it out"
                    )

    def uses(self, name: str) -> bool:
        """Whether something comes of `name` with this source, or with one of those of a mix."""
        if self.source == "mix":
            return any(one.uses(name) for _, one in self.sources().values())
        if name == "errors":
            return self.source == "text" or (self.source == "needles" and bool(self.paths()))
        if name == "text_column":
            return not self.chat and (
                self.source == "hub" or (self.uses("errors") and self._has_rows())
            )
        return name not in FOR or self.source == ("needles" if name == "length" else "hub")

    def _has_rows(self) -> bool:
        """Whether a file of `path` holds rows; yes where none is found, which is for those to say who read them."""
        from longctx.data.sources.text import holds_rows

        try:
            return any(holds_rows(path) for path in self.paths())
        except OSError:
            return True

    def sources(self) -> dict[str, tuple[float, DataConfig]]:
        """Name → weight and configuration of each source of a mix, checked; what a source does not say, the mix says."""
        if self.source != "mix":
            raise ValueError(f"data.mix={self.mix}: data={self.source} is one source; say data=mix")
        if not self.mix:
            raise ValueError(
                "data.mix is not set: give sources, such as data.mix.long.source=text data.mix.long.path=docs/"
            )
        kinds = get_type_hints(DataConfig)
        allowed = kinds.keys() - set(OF_ALL)
        found = {}
        for name, keys in self.mix.items():
            place = f"data.mix.{name}"
            if not isinstance(keys, Mapping):
                raise ValueError(f"{place}={keys}: give its keys, such as {place}.path=docs/")
            for own in keys:
                if own not in allowed and own != "weight":
                    raise ValueError(
                        f"{place}.{own}: not a key of a source; there are weight, "
                        f"{', '.join(sorted(allowed))}"
                    )
            weight = keys.get("weight", 1.0)
            if (
                not isinstance(weight, int | float)
                or isinstance(weight, bool)
                or not 0 < weight < float("inf")
            ):
                raise ValueError(f"{place}.weight={weight}: a number above 0")
            given = {own: value for own, value in keys.items() if own != "weight"}
            given = {own: _typed(f"{place}.{own}", x, kinds[own]) for own, x in given.items()}
            given = {"source": "text" if keys.get("path") else "embedded"} | given
            one = replace(self, mix={}, **given)
            try:
                if one.source == "mix":
                    raise ValueError("data.source=mix: a source of a mix is no mix")
                one.validate()
            except ValueError as error:
                raise ValueError(f"{place}: {error}") from error
            found[name] = float(weight), one
        return found

    def absolute(self) -> DataConfig:
        """The same, with paths that hold from every folder."""
        made = replace(self, cache=_absolute(self.cache), tokenizer=_absolute(self.tokenizer))
        if self.source in ("text", "needles") and self.paths():
            made.path = [_absolute(path) for path in self.paths()]
            made.path = made.path[0] if isinstance(self.path, str) else made.path
        for name, (_, one) in (self.sources() if self.source == "mix" else {}).items():
            if self.mix[name].get("path"):
                made.mix = made.mix | {name: dict(self.mix[name]) | {"path": one.absolute().path}}
        return made

    def paths(self) -> list[str]:
        """`path` as a list of strings, whichever way it was written."""
        return _strings(self.path, "data.path")

    def data_files(self) -> list[str]:
        """`files` as a list of strings, whichever way it was written."""
        return _strings(self.files, "data.files")

    def cache_folder(self) -> Path:
        """Where everything built from documents is kept; not created here."""
        if self.cache:
            return Path(self.cache).expanduser()
        if os.environ.get("LONGCTX_CACHE"):
            return Path(os.environ["LONGCTX_CACHE"]).expanduser()
        return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "longctx"


def _strings(value: Any, name: str) -> list[str]:
    if value is None or value == "":
        return []
    if isinstance(value, str | os.PathLike):
        return [os.fspath(value)]
    if isinstance(value, Sequence) and all(isinstance(item, str | os.PathLike) for item in value):
        return [os.fspath(item) for item in value]
    raise ValueError(f"{name}={value}: use a path or a list of paths")


def _absolute(path: str | None) -> str | None:
    return os.path.abspath(os.path.expanduser(path)) if path else path


def _typed(name: str, value: Any, hint: Any) -> Any:
    """`value` as the field of DataConfig with this type hint has it, since a dictionary checks nothing; ValueError names `name`."""
    kinds = get_args(hint) or (hint,)
    if hint is Any or type(value) in kinds:
        return value
    if str in kinds and type(value) in (int, float):  # data.mix.a.name=2024
        return str(value)
    if float in kinds and type(value) is int:
        return float(value)
    words = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}
    raise ValueError(
        f"{name}={value}: must be {next(words[kind] for kind in kinds if kind in words)}"
    )
