"""Which documents are scored: whole ones, of the run's own data or of any other, in the run's tokens."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from longctx.data import DataConfig, Tokenizer, load, read_documents
from longctx.evaluation.perplexity import Document


def of_run(folder: Path, run: dict[str, Any], split: str, fingerprint: str) -> Iterator[Document]:
    """Documents of `split` of the data that the run in `folder` trained on; ValueError if there are none.

    Where they are no longer those of `fingerprint`, which the run began with, a line on stderr says so.
    """
    config = replace(DataConfig(**run["data"]), tokenizer=str(folder))
    data = load(config, run["seq_len"])
    if not len(data.split[split]):
        raise ValueError(
            f"split={split}: the run has no such documents; use the other split or data=text data.path=..."
        )
    if data.fingerprint != fingerprint:
        print(
            f"data: the documents are not those that {folder} began with; it may have seen some of them",
            file=sys.stderr,
        )
    for name, ids, n_bytes in data.documents(split):
        yield Document(name, ids, n_bytes - _text_bytes(data.tokenizer, int(ids[0])))


def of_source(config: DataConfig, tokenizer: Tokenizer) -> Iterator[Document]:
    """All documents of `config`, which names files or a data set; nothing is cached."""
    for name, text in read_documents(config):
        ids = tokenizer.encode_documents([text])[0].astype(np.int64)
        yield Document(name, ids, len(text.encode()) - _text_bytes(tokenizer, int(ids[0])))


def _text_bytes(tokenizer: Tokenizer, token: int) -> int:
    """UTF-8 bytes of a token's text; 0 for begin- and end-of-text, 1 for a part of a character."""
    if token in (tokenizer.bos_id, tokenizer.eos_id):
        return 0
    return len(tokenizer.decode([token]).replace("\ufffd", "?").encode())
