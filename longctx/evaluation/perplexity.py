"""Perplexity by sliding window: every token is scored once, with as much context as the window allows.

Window k of a document shows the model the tokens k·stride .. k·stride + context - 1 and scores the next-token
predictions that no window before it has scored, so that a token has context - stride + 1 tokens before it, or all that
there are. Sums of nats are added up, never means of windows. Windows shorter than the context share a row, kept apart
by the attention mask.

With nats = Σ -ln p(token | context) over the scored tokens, which are all but the first of each document: perplexity =
exp(nats / scored tokens);  bits per byte = nats / ln 2 / bytes, the UTF-8 bytes of the text after the first token. A
token that ends the text has no bytes and is scored like any other.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from torch import nn

from longctx.attention import Mask


class Document(NamedTuple):
    """A document to score: token ids (tokens,), and the UTF-8 bytes of the text that ids[1:] stand for."""

    name: str
    ids: np.ndarray
    n_bytes: int


@dataclass
class Score:
    """Sums over scored tokens: nats = Σ -ln p."""

    name: str
    tokens: int = 0
    n_bytes: int = 0
    nats: float = 0.0

    @property
    def perplexity(self) -> float:
        """exp of the mean nats per token; nan where nothing was scored, inf beyond what a float holds."""
        mean = self.nats / self.tokens if self.tokens else math.nan
        return math.exp(mean) if not mean > 700 else math.inf

    @property
    def bits_per_byte(self) -> float:
        """nan where there are no bytes."""
        return self.nats / math.log(2) / self.n_bytes if self.n_bytes and self.tokens else math.nan


@dataclass
class Perplexity:
    """One score per document, in their order; documents of one token are there with nothing scored."""

    context: int
    stride: int
    documents: list[Score] = field(default_factory=list)
    windows: int = 0

    @property
    def total(self) -> Score:
        """The sums over all documents."""
        return Score(
            f"all {len(self.documents):,}",
            sum(score.tokens for score in self.documents),
            sum(score.n_bytes for score in self.documents if score.tokens),
            math.fsum(score.nats for score in self.documents),
        )


def perplexity(
    model: nn.Module,
    documents: Iterable[Document],
    context: int,
    stride: int | None = None,
    batch_size: int = 1,
    dtype: torch.dtype | None = None,
    progress: bool = False,
) -> Perplexity:
    """Score `documents` with `model` (a GPT) in windows of `context` tokens that advance by `stride`, half of it by
    default.

    `batch_size` rows of `context` tokens go through the model at a time; `dtype` is autocast's. Losses are added in
    fp64. Raises ValueError for a stride that would leave tokens out, and if no document has a second token.
    """
    stride = max(1, context // 2) if stride is None else stride
    if not 1 <= stride <= context:
        raise ValueError(
            f"stride={stride}: from 1 to seq_len={context}, or tokens between two windows are never scored"
        )
    result = Perplexity(context, stride)
    training = model.training
    model.eval()
    try:
        with torch.inference_mode(), _Bar(progress) as bar:
            for batch in _batches(_rows(_windows(documents, result), context), batch_size):
                _score(model, batch, result, dtype)
                bar.show(result)
    finally:
        model.train(training)
    if not result.total.tokens:
        raise ValueError(f"nothing to score: none of the {len(result.documents)} documents has 2 tokens or more")
    return result


class _Window(NamedTuple):
    owner: int  # index of its document in the result
    ids: np.ndarray  # (length + 1,): the last one is only predicted
    seen: int  # predictions at its beginning that an earlier window scored


def spans(tokens: int, context: int, stride: int) -> Iterator[tuple[int, int, int]]:
    """(begin, end, first): the window shows tokens begin .. end - 1 and scores the tokens first .. end."""
    begin, first = 0, 1
    while first < tokens:
        end = min(begin + context, tokens - 1)
        yield begin, end, first
        begin, first = begin + stride, end + 1


def _windows(documents: Iterable[Document], result: Perplexity) -> Iterator[_Window]:
    for owner, (name, ids, n_bytes) in enumerate(documents):
        result.documents.append(Score(name, max(0, len(ids) - 1), n_bytes))
        for begin, end, first in spans(len(ids), result.context, result.stride):
            result.windows += 1
            yield _Window(owner, ids[begin : end + 1], first - begin - 1)


def _rows(windows: Iterable[_Window], context: int) -> Iterator[list[_Window]]:
    """Windows side by side, in their order, as long as they fit into `context` tokens."""
    row: list[_Window] = []
    used = 0
    for window in windows:
        length = len(window.ids) - 1
        if row and used + length > context:
            yield row
            row, used = [], 0
        row.append(window)
        used += length
    if row:
        yield row


def _batches(rows: Iterable[list[_Window]], size: int) -> Iterator[list[list[_Window]]]:
    batch: list[list[_Window]] = []
    for row in rows:
        batch.append(row)
        if len(batch) == size:
            yield batch
            batch = []
    if batch:
        yield batch


def _score(model: nn.Module, batch: list[list[_Window]], result: Perplexity, dtype: torch.dtype | None) -> None:
    B, T = len(batch), max(sum(len(window.ids) - 1 for window in row) for row in batch)
    tokens, targets = np.zeros((B, T), dtype=np.int64), np.full((B, T), -100, dtype=np.int64)
    doc_ids, owners = np.zeros((B, T), dtype=np.int64), np.zeros((B, T), dtype=np.int64)
    for b, row in enumerate(batch):
        at = 0
        for n, window in enumerate(row):
            end = at + len(window.ids) - 1
            tokens[b, at:end] = window.ids[:-1]
            targets[b, at + window.seen : end] = window.ids[1 + window.seen :]
            doc_ids[b, at:end], owners[b, at:end] = n, window.owner
            at = end
        doc_ids[b, at:] = len(row)
    # A row with one window needs no document mask: what follows the window is padding, which nothing before it sees.
    alone = all(len(row) == 1 for row in batch)
    mask = Mask.causal() if alone else Mask.documents(torch.from_numpy(doc_ids))
    device = next(model.parameters()).device
    x, y = torch.from_numpy(tokens).to(device), torch.from_numpy(targets).to(device)
    with torch.autocast(device.type, dtype) if dtype is not None else nullcontext():
        losses = model(x, y, mask, reduction="none")
    scored = targets != -100
    which, place = np.unique(owners[scored], return_inverse=True)
    nats = np.bincount(place, weights=losses.cpu().double().numpy()[scored])
    for owner, sum_of_nats in zip(which.tolist(), nats.tolist(), strict=True):
        result.documents[owner].nats += sum_of_nats


class _Bar:
    """A line on the terminal with what is scored so far; nothing where stderr is no terminal."""

    def __init__(self, visible: bool) -> None:
        columns = SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
        hidden = not (visible and sys.stderr.isatty())
        self.bar = Progress(*columns, console=Console(stderr=True), transient=True, disable=hidden)
        self.task = self.bar.add_task("scoring")

    def show(self, result: Perplexity) -> None:
        if not self.bar.disable:
            self.bar.update(
                self.task, description=f"scoring document {len(result.documents):,}, window {result.windows:,}"
            )

    def __enter__(self) -> _Bar:
        self.bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.bar.stop()
