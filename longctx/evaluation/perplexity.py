"""Perplexity by sliding window: every token is scored once, with as much context as the window
allows (see `windows`).

Sums of nats are added up, never means of windows. Targets are all tokens of a document but the
first; of a conversation, the tokens that the run learns. With nats = Σ -ln p(token | context):

    perplexity     exp(nats / target tokens)
    bits per byte  nats / ln 2 / bytes

Bytes are those of the target tokens' text in UTF-8. A token that ends the text has no bytes and is
scored like any other.

The value of a longer context (`Contexts`): the same tokens scored with 1,024, 2,048, … tokens
before them. Documents longer than the longest context are cut into stretches of that many tokens.
The last tokens of each, half of the shortest context, are scored in one window for each context.

Loss by position: see longctx.training.positions.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from longctx.config.fields import refuse
from longctx.data.dataset import EncodedDocument
from longctx.evaluation.score import OnBatch, Scorer
from longctx.evaluation.windows import Window, losses, sliding, stride_of, window_of
from longctx.training.positions import BUCKETS, LossByPosition, error_of_ratio


@dataclass
class Score:
    """Sums over target tokens: nats = Σ -ln p."""

    name: str
    tokens: int = 0
    n_bytes: int = 0
    nats: float = 0.0
    key: bytes = b""  # of the document's text

    def row(self) -> dict[str, Any]:
        """Return the score as it is in the JSON: nan if nothing was scored, inf if no float holds
        the perplexity.
        """
        mean = self.nats / self.tokens if self.tokens else math.nan
        has_bytes = self.n_bytes and self.tokens
        return {
            "name": self.name,
            "tokens": self.tokens,
            "bytes": self.n_bytes,
            "nats": self.nats,
            "perplexity": math.inf if mean > 700 else math.exp(mean),
            "bits_per_byte": self.nats / math.log(2) / self.n_bytes if has_bytes else math.nan,
        }


@dataclass
class Contexts:
    """Nats of the same target tokens at each context length of `lengths`, in rising order."""

    lengths: list[int]
    tokens: int = 0  # targets at each length
    documents: int = 0  # longer than the longest
    nats: dict[int, float] = field(default_factory=lambda: defaultdict(float))

    def windows(self, owner: int, document: EncodedDocument) -> Iterator[Window]:
        """Yield every stretch of a document at every length."""
        limit, tokens = self.lengths[-1], len(document.ids)
        # So a target has at least half of the shortest context before it
        targets = max(1, self.lengths[0] // 2)
        self.documents += tokens > limit
        for end in range(limit, tokens, limit):
            for length in self.lengths:
                window = window_of(owner, document, end - length, end, length - targets, length)
                if window.is_target.any():
                    yield window

    def add(self, window: Window, nats: np.ndarray) -> None:
        """Take in the losses of one of `windows`."""
        self.nats[window.context] += math.fsum(nats)
        if window.context == self.lengths[0]:
            self.tokens += int(window.is_target.sum())

    def rows(self) -> list[dict[str, Any]]:
        """Return one row per length; none if no document is longer than the longest."""
        return [
            {
                "context": length,
                "documents": self.documents,
                "tokens": self.tokens,
                "nats": self.nats[length],
                "loss": self.nats[length] / self.tokens,
                "perplexity": math.exp(min(self.nats[length] / self.tokens, 700.0)),
                "gain": (self.nats[self.lengths[0]] - self.nats[length]) / self.tokens,
            }
            for length in (self.lengths if self.tokens else ())
        ]


@dataclass
class Perplexity:
    """One score per document, in their order; 0 tokens for a document without targets."""

    context: int
    stride: int
    documents: list[Score] = field(default_factory=list)
    windows: list[tuple[float, int]] = field(default_factory=list)  # nats and tokens of each
    positions: LossByPosition = field(default_factory=LossByPosition)
    contexts: Contexts = field(default_factory=lambda: Contexts([]))
    # (2, BUCKETS) targets and their nats, by the power of two of the tokens before them
    sums: np.ndarray = field(default_factory=lambda: np.zeros((2, BUCKETS)))

    def add_positions(self, window: Window, nats: np.ndarray) -> None:
        """Add the losses of a window to the sums by position, of whole documents."""
        before = window.begin + 1 + np.arange(window.seen, window.length)
        bucket = np.log2(before).astype(np.int64)
        for row, values in enumerate((window.is_target[window.seen :], nats)):
            self.sums[row] += np.bincount(bucket, values, BUCKETS)

    @property
    def total(self) -> Score:
        """Return the sums over all documents."""
        scored = [score for score in self.documents if score.tokens]
        return Score(
            f"all {len(self.documents):,}",
            sum(score.tokens for score in scored),
            sum(score.n_bytes for score in scored),
            math.fsum(score.nats for score in scored),
        )

    @property
    def standard_error(self) -> float:
        """Return the error of the mean nats per token, over such documents; nan for one window."""
        # For a single document it is over other windows of it
        scored = [(score.nats, score.tokens) for score in self.documents if score.tokens]
        return error_of_ratio(scored if len(scored) > 1 else self.windows)

    def content(self) -> dict[str, Any]:
        """Return the JSON: totals, every document, position and context."""
        return {
            "context": self.context,
            "stride": self.stride,
            "windows": len(self.windows),
            "total": self.total.row() | {"standard_error": self.standard_error},
            "by_position": self.positions.rows(),
            "by_context": self.contexts.rows(),
            "documents": [score.row() for score in self.documents],
        }


def perplexity(
    scorer: Scorer,
    documents: Iterable[EncodedDocument],
    context: int,
    stride: int | None = None,
    batch_size: int = 1,
    contexts: Sequence[int] = (),
    on_batch: OnBatch = lambda tokens: None,
) -> Perplexity:
    """Score `documents` in windows of `context` tokens that advance by `stride`, half by default.

    The last tokens of long documents are scored at each length of `contexts`, too. `batch_size`
    sequences of `context` tokens go through the model at a time, on each data rank. Losses are
    added in fp64. Raises ValueError for a stride that leaves tokens out, and if no document has a
    target token.
    """
    stride = stride_of(stride, context)
    problem = f"contexts={list(contexts)}: a length does not fit; give 1 to seq_len={context}"
    refuse((any(not 1 <= length <= context for length in contexts), problem))
    result = Perplexity(context, stride, contexts=Contexts(sorted(set(contexts))))
    # A generator: texts larger than the memory are read a few batches ahead.
    windows = _windows(documents, result)
    for window, nats in losses(scorer, windows, context, batch_size, on_batch):
        # Windows of `contexts` score tokens a second time, which must not count in the sums.
        if window.context:
            result.contexts.add(window, nats)
            continue
        result.windows.append((math.fsum(nats), int(window.is_target.sum())))
        result.documents[window.owner].nats += result.windows[-1][0]
        result.add_positions(window, nats)
        # Loss by position needs every token before a token: the first window alone has them
        if window.begin == 0:
            result.positions.add(nats, window.is_target)
    problem = "documents: none has 2 tokens or more, so there is nothing to score; give others"
    refuse((not result.total.tokens, problem))
    return result


def _windows(documents: Iterable[EncodedDocument], result: Perplexity) -> Iterator[Window]:
    """Yield the windows of all documents, and enter those in `result` as they are read."""
    for owner, document in enumerate(documents):
        counts = document.targets, document.n_bytes
        result.documents.append(Score(document.name, *counts, key=document.key))
        yield from sliding(owner, document, result.context, result.stride)
        if result.contexts.lengths:
            yield from result.contexts.windows(owner, document)
