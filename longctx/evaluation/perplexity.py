"""Perplexity by sliding window: every token is scored once, with as much context as the window
allows (see `windows`).

Sums of nats are added up, never means of windows. All tokens of a document but the first are
scored, of a conversation those that are learned, and nats = Σ -ln p(token | context) over them:

    perplexity       exp(nats / scored tokens)
    word perplexity  exp(nats / words), PG-19's convention (arXiv 1911.05507)
    bits per byte    nats / ln 2 / bytes

Words, which white space separates, and UTF-8 bytes are those of the text of the scored tokens. A
token that ends the text has no bytes and is scored like any other.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from longctx.evaluation.contexts import Contexts
from longctx.evaluation.positions import Positions
from longctx.evaluation.progress import Progress
from longctx.evaluation.scorer import Scorer, in_eval_mode
from longctx.evaluation.scoring import Speed, losses
from longctx.evaluation.windows import Document, Window, sliding, stride_of


@dataclass
class Score:
    """Sums over scored tokens: nats = Σ -ln p."""

    name: str
    tokens: int = 0
    n_bytes: int = 0
    nats: float = 0.0
    n_words: int = 0

    @property
    def perplexity(self) -> float:
        """exp of the mean nats per token; nan where nothing was scored, inf beyond what a float
        holds.
        """
        return _exp(self.nats, self.tokens)

    @property
    def word_perplexity(self) -> float:
        """exp of the mean nats per word; nan where there are no words."""
        return _exp(self.nats, self.n_words if self.tokens else 0)

    @property
    def bits_per_byte(self) -> float:
        """nan where there are no bytes."""
        return self.nats / math.log(2) / self.n_bytes if self.n_bytes and self.tokens else math.nan


@dataclass
class Perplexity:
    """One score per document, in their order; 0 tokens for a document with nothing to score."""

    context: int
    stride: int
    documents: list[Score] = field(default_factory=list)
    windows: int = 0
    of_windows: list[tuple[float, int]] = field(default_factory=list)  # nats and tokens of each
    positions: Positions = field(default_factory=Positions)
    contexts: Contexts = field(default_factory=lambda: Contexts([]))
    speed: Speed = field(default_factory=Speed)

    @property
    def total(self) -> Score:
        """The sums over all documents."""
        scored = [score for score in self.documents if score.tokens]
        return Score(
            f"all {len(self.documents):,}",
            sum(score.tokens for score in scored),
            sum(score.n_bytes for score in scored),
            math.fsum(score.nats for score in scored),
            sum(score.n_words for score in scored),
        )

    @property
    def standard_error(self) -> float:
        """Of the mean nats per token, as far as other documents of the kind would give another, or
        other windows of the one document that there is; nan for a single window.
        """
        scored = [(score.nats, score.tokens) for score in self.documents if score.tokens]
        return error_of_ratio(scored if len(scored) > 1 else self.of_windows)

    def require_scores(self) -> None:
        """Raise ValueError if no token was scored."""
        if not self.total.tokens:
            raise ValueError(
                f"documents: none of the {len(self.documents)} has 2 tokens or more, so there is "
                "nothing to score; give others"
            )


def perplexity(
    scorer: Scorer,
    documents: Iterable[Document],
    context: int,
    stride: int | None = None,
    batch_size: int = 1,
    progress: bool = False,
    contexts: Sequence[int] = (),
) -> Perplexity:
    """Score `documents` in windows of `context` tokens that advance by
    `stride`, half of it by default; the last tokens of long documents also at each of `contexts`
    (none over `context`).

    `batch_size` rows of `context` tokens go through the model at a time, on each data rank. Losses
    are added in fp64. Raises ValueError for a stride that would leave tokens out; see also
    `Perplexity.require_scores`.
    """
    stride = stride_of(stride, context)
    if any(not 1 <= c <= context for c in contexts):
        raise ValueError(
            f"contexts={list(contexts)}: a length does not fit; give 1 to seq_len={context}"
        )
    result = Perplexity(context, stride, contexts=Contexts(sorted(set(contexts))))
    line = Progress("tokens", warms_up=scorer.device.type == "cuda", visible=progress)
    windows = line.counted(_windows(documents, result), lambda window: len(window.ids) - 1)

    def read(tokens: int) -> None:
        result.speed.add(tokens)
        line.advance(tokens)

    with in_eval_mode(scorer.model), line:
        for window, nats in losses(scorer, windows, context, batch_size, read):
            if window.context:
                result.contexts.add(window, nats)
                continue
            result.of_windows.append((math.fsum(nats), window.targets))
            result.documents[window.owner].nats += result.of_windows[-1][0]
            if window.begin == 0:
                result.positions.add(window.owner, nats[: leading(window)])
    return result


def _windows(documents: Iterable[Document], result: Perplexity) -> Iterator[Window]:
    for owner, document in enumerate(documents):
        name, ids, n_bytes, n_words, scored = document
        tokens = max(0, len(ids) - 1) if scored is None else int(np.count_nonzero(scored[1:]))
        result.documents.append(Score(name, tokens, n_bytes, 0.0, n_words))
        for window in sliding(owner, document, result.context, result.stride):
            result.windows += 1
            yield window
        if result.contexts.contexts:
            yield from result.contexts.windows(owner, document)


def leading(window: Window) -> int:
    """Return how many tokens are scored before the first one that is not."""
    if window.scored is None or window.scored[1:].all():
        return len(window.ids) - 1
    return int(np.argmin(window.scored[1:]))


def error_of_ratio(pairs: Sequence[tuple[float, float]]) -> float:
    """Standard error of Σ a / Σ b over independent pairs (a, b), linearized (Cochran, Sampling
    Techniques, 1977, 6.4); nan for less than two.
    """
    count, total = len(pairs), math.fsum(b for _, b in pairs)
    if count < 2 or not total:
        return math.nan
    ratio = math.fsum(a for a, _ in pairs) / total
    squares = math.fsum((a - ratio * b) ** 2 for a, b in pairs)
    return math.sqrt(count / (count - 1) * squares) / total


def _exp(nats: float, count: int) -> float:
    mean = nats / count if count else math.nan
    return math.exp(mean) if not mean > 700 else math.inf
