"""Which documents are scored: whole ones, of the run's own data or of any other, in the run's
tokens.

A `Share` says which of them: at most so many, and of those every n-th for one of n processes. Bytes
and words are counted in the text after the first token, which is not scored.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np

from longctx.data import DataConfig, Tokenizer, load, read_documents
from longctx.evaluation.windows import Document

T = TypeVar("T")
TOGETHER = 32  # texts that are tokenized at a time, on all cores


class Share(NamedTuple):
    """Documents number, number + of, number + 2·of, … of the first `most` (None: of all)."""

    number: int = 0
    of: int = 1
    most: int | None = None

    def take(self, everything: Iterable[T]) -> Iterator[T]:
        """This share of `everything`."""
        return islice(everything, self.number, self.most, self.of)


ALL = Share()


def of_run(
    folder: Path, run: dict[str, Any], split: str, fingerprint: str, share: Share = ALL
) -> Iterator[Document]:
    """Documents of `split` of the data that the run in `folder` trained on; ValueError if there are
    none.

    Where they are no longer those of `fingerprint`, which the run began with, a line on stderr says
    so.
    """
    config = replace(DataConfig(**run["data"]), tokenizer=str(folder))
    data = load(config, run["seq_len"])
    if not len(data.split[split]):
        raise ValueError(
            f"split={split}: the run has no such documents; use the other split or data=text data.path=..."
        )
    if data.fingerprint != fingerprint and share.number == 0:
        print(
            f"data: the documents are not those that {folder} began with; it may have seen some of them",
            file=sys.stderr,
        )
    tokenizer = data.tokenizer
    for name, ids, n_bytes in share.take(data.documents(split)):
        after = ids[1:-1] if ids[-1] == tokenizer.eos_id else ids[1:]
        yield Document(
            name,
            ids,
            n_bytes - _text_bytes(tokenizer, int(ids[0])),
            len(tokenizer.decode(after).split()),
        )


def of_source(config: DataConfig, tokenizer: Tokenizer, share: Share = ALL) -> Iterator[Document]:
    """Documents of `config`, which names files or a data set; nothing is cached."""
    if config.source == "mix":
        raise ValueError(
            "data=mix: an evaluation scores one source; name one, such as data=text data.path=..."
        )
    if config.chat:
        raise ValueError("data.chat=true: an evaluation scores plain text; leave data.chat out")
    texts = share.take(read_documents(config))
    while group := list(islice(texts, TOGETHER)):
        for (name, text), ids in zip(
            group, tokenizer.encode_documents([text for _, text in group]), strict=True
        ):
            raw, first = text.encode(), _text_bytes(tokenizer, int(ids[0]))
            words = len(raw[first:].decode(errors="replace").split())
            yield Document(name, ids.astype(np.int64), len(raw) - first, words)


def _text_bytes(tokenizer: Tokenizer, token: int) -> int:
    """UTF-8 bytes of a token's text; 0 for begin- and end-of-text, 1 for a part of a character."""
    if token in (tokenizer.bos_id, tokenizer.eos_id):
        return 0
    return len(tokenizer.decode([token]).replace("\ufffd", "?").encode())
