"""The keys of a data set: its documents, their tokens, and the share that validates.

No import of torch, datasets or tokenizers: the command line reads this file for every command.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from longctx.config.doors import Door
from longctx.config.fields import Group, key, positive

SOURCES: Door[Any] = Door("data", "longctx.data.sources")


@dataclass
class DataConfig(Group):
    """Documents and tokens of every source, each of which uses some of the keys.

    chat: rows are conversations (`messages`, ShareGPT, Alpaca, completions), put into the
        tokenizer's chat template; targets are the assistant's
    preferences: rows are answers to prompts: pairs: `chosen` and `rejected` | labels: `completion`
        and `label`; set by objective=
    turns: conversations: the answers that are learned; all, those of the last turn, or (auto) all
        unless the template rewrites earlier turns, as Qwen3's does
    filter: gzip leaves out documents that compress least or most; the FILE.jsonl of longctx score
        those that gain least from a long context. data.keep is the share that stays
    lengths: weights by the tokens of a document, such as {8k-32k: 2, 32k-: 5}; others: 1
    packing: several documents in a sequence; false: one in each, for a model whose layers mix them
    replace_tokenizer: with init=: the tokenizer may give other texts to ids that the weights know
    val_fraction: share of the text that validates: whole documents by their hash, else the end of
        the longest; null: 0.02, or up to 0.1 of a small corpus; 0: none
    cache: folder of what is built once; null: $LONGCTX_CACHE, else ~/.cache/longctx
    """

    prefix = "data."
    source: str = key("embedded", "of the documents; set by data=NAME", choices=SOURCES, short=True)
    path: Any = key(None, "file, folder, glob, list [a,b]; repository: clones; hub: OWNER/NAME")
    text_column: str = key("text", "field of .jsonl, .csv, .tsv, .parquet files and hub data sets")
    chat: bool = key(False)
    preferences: str | None = key(None, choices=("pairs", "labels"))
    turns: str = key("auto", choices=("auto", "all", "last"), needs="chat")
    errors: str = key("strict", "if not UTF-8: stop, or replace", choices=("strict", "replace"))
    name: str | None = key(None, "hub: configuration of a data set that has several")
    split: str = key("train", "hub: split to read; documents that validate are taken out of it")
    files: Any = key(None, "hub: the files of the data set to read; null: those of its split")
    revision: str | None = key(None, "hub: tag, branch, commit (a run keeps that); null: newest")
    documents: int | None = positive(None, "documents to read at most; null: all", limit=10**12)
    min_tokens: int | None = positive(None, "documents with fewer are left out: 8k", unit=1024)
    max_tokens: int | None = positive(None, "documents with more are left out: 128k", unit=1024)
    filter: str | None = key(None)
    keep: float | None = key(None, "null: gzip 0.6, else 0.5", between=(0.01, 1), needs="filter")
    lengths: dict[str, Any] = key({})
    order: str = key("path", "repository: order of its files", choices=("path", "imports"))
    length: int = key(8192, "characters of each document (own sources)", between=(256, 2**30))
    mix: dict[str, Any] = key({}, "mix: data.mix.NAME.KEY=..., any key of data, and weight")
    packing: bool = key(True)
    tokenizer: str | None = key(None, "tokenizer.json or HF folder; null: a new BPE of these")
    replace_tokenizer: bool = key(False, needs="tokenizer")
    vocab_size: int = key(16384, "of the tokenizer trained here", between=(257, 2**20))
    val_fraction: float | None = key(None, between=(0, 0.99))
    cache: str | None = key(None, compared=False)

    def paths(self) -> list[str]:
        """Return `path` as a list of strings, ./~x absolute: pathlib takes it for a home."""
        return _strings("data.path", self.path)

    def data_files(self) -> list[str]:
        """Return `files` as a list of strings."""
        return _strings("data.files", self.files)


def _strings(name: str, value: Any) -> list[str]:
    values = value if isinstance(value, list | tuple) else [] if value in (None, "") else [value]
    if not all(isinstance(item, str | os.PathLike) for item in values):
        raise ValueError(f"{name}={value}: not a path; give a path or a list of paths")
    return [os.path.abspath(x) if str(x).startswith("./~") else os.fspath(x) for x in values]
