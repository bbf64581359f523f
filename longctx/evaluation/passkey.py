"""Pass keys: whether a model finds facts hidden at every depth of texts of every length.

A text is `length` tokens: filler with the fact after `depth` of it, the question, the answer. The
model sees all but the answer's last token, and is right if each token of the answer is the most
likely one; greedy decoding would then give the same answer. Logits exist for the answer's tokens
alone. The facts are those of `longctx.data.sources.needles`.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, islice
from typing import NamedTuple

import numpy as np
import torch

from longctx.config.eval_config import KINDS
from longctx.data import Tokenizer
from longctx.data.dataset import EncodedDocument
from longctx.data.sources.needles import Task, task
from longctx.evaluation.progress import Progress
from longctx.evaluation.scorer import Scorer, in_eval_mode
from longctx.evaluation.windows import Document

DEPTHS = tuple(n / 10 for n in range(11))
TOKENS_TOGETHER = {"cuda": 65536, "cpu": 8192}


@dataclass
class Cell:
    """The texts of one kind, length and depth: how many were answered right, and Σ ln p of their
    answers.
    """

    kind: str
    length: int
    depth: float
    samples: int = 0
    right: int = 0
    nats: float = 0.0

    @property
    def accuracy(self) -> float:
        return self.right / self.samples

    @property
    def logprob(self) -> float:
        """Mean ln p of a whole answer."""
        return self.nats / self.samples


class Text(NamedTuple):
    """Tokens (length,) int64, the last `answer` of which are to be found."""

    cell: Cell
    ids: np.ndarray
    answer: int


def recall(
    scorer: Scorer,
    tokenizer: Tokenizer,
    filler: np.ndarray,
    lengths: Sequence[int],
    depths: Sequence[float] = DEPTHS,
    samples: int = 10,
    kinds: Sequence[str] = KINDS,
    together: int | None = None,
    progress: bool = False,
) -> list[Cell]:
    """Score `samples` texts of each kind, length and depth, made of the tokens `filler`.

    The same arguments give the same texts. A forward takes at most `together` tokens per device, by
    default TOKENS_TOGETHER, and one text at least. Raises ValueError if `filler` is shorter than a
    quarter of a text: it would be repeated too often to be a text.
    """
    check_texts(tokenizer, filler, lengths, kinds)
    cells = [Cell(kind, length, depth) for kind in kinds for length in lengths for depth in depths]
    line = Progress("texts", len(cells) * samples, scorer.device.type == "cuda", progress)
    with in_eval_mode(scorer.model), line:
        for batch in _batches(_texts(cells, tokenizer, filler, samples), scorer, together):
            _score(scorer, batch)
            line.advance(len(batch))
    return cells


def check_texts(
    tokenizer: Tokenizer, filler: np.ndarray, lengths: Sequence[int], kinds: Sequence[str]
) -> None:
    """ValueError where `filler` is too short for the longest of `lengths`, or the shortest of them
    for a fact.
    """
    if 4 * len(filler) < max(lengths):
        raise ValueError(
            f"passkey.lengths={list(lengths)}: the documents have {len(filler):,} tokens, too few "
            f"to fill {max(lengths):,}; give longer ones with data=text data.path=..., "
            "or shorter lengths"
        )
    for _ in _texts([Cell(kind, min(lengths), 0.0) for kind in kinds], tokenizer, filler, 1):
        pass


def filler_of(
    documents: Iterable[Document | EncodedDocument], tokenizer: Tokenizer, tokens: int
) -> np.ndarray:
    """At least `tokens` tokens of `documents`, one after the other, if there are so many.

    Without the tokens that begin and end a text.
    """
    special = [x for x in (tokenizer.bos_id, tokenizer.eos_id) if x is not None]
    parts = []
    count = 0
    for document in documents:
        parts.append(document.ids[~np.isin(document.ids, special)])
        count += len(parts[-1])
        if count >= tokens:
            break
    return np.concatenate(parts) if parts else np.zeros(0, np.int64)


def text(
    hidden: Task,
    tokenizer: Tokenizer,
    filler: np.ndarray,
    length: int,
    depth: float,
    others: Sequence[float],
) -> tuple[np.ndarray, int]:
    """Tokens (length,) of a text, and the number of tokens at its end that are the answer.

    The fact of `hidden` stands after `depth` of the filler, and its other facts after `others`.
    """
    question = tokenizer.encode(hidden.question)
    question_answer = tokenizer.encode(hidden.question + hidden.answer)
    pairs = zip(question, question_answer, strict=False)
    same = next((n for n, (a, b) in enumerate(pairs) if a != b), len(question))
    tokens = map(tokenizer.encode, (hidden.fact, *hidden.others))
    facts = sorted(zip((depth, *others), tokens, strict=True))
    least = len(tokenizer.begin) + sum(len(fact) for _, fact in facts) + len(question_answer)
    room = length - least
    if room < 0:
        raise ValueError(
            f"passkey.lengths=[{length}]: too short for a fact and its question; use more tokens"
        )
    body = list(tokenizer.begin)
    at = 0
    for place, fact in facts:
        end = round(place * room)
        body += [*filler[at:end].tolist(), *fact]
        at = end
    body += [*filler[at:room].tolist(), *question_answer]
    return np.asarray(body, dtype=np.int64), len(question_answer) - same


def _texts(
    cells: Sequence[Cell], tokenizer: Tokenizer, filler: np.ndarray, samples: int
) -> Iterator[Text]:
    for cell in cells:
        for n in range(samples):
            # The same texts at every depth.
            rng = random.Random(f"measure {cell.kind} {cell.length} {n}")
            hidden = task(cell.kind, rng)
            first = rng.randrange(len(filler))
            rotated = np.concatenate([filler[first:], filler[:first]])
            while len(rotated) < cell.length:
                rotated = np.concatenate([rotated, rotated])
            others = [rng.random() for _ in hidden.others]
            yield Text(cell, *text(hidden, tokenizer, rotated, cell.length, cell.depth, others))


def _batches(texts: Iterable[Text], scorer: Scorer, together: int | None) -> Iterator[list[Text]]:
    """Yield texts of one length, as many as go through the model at a time."""
    tokens = together or TOKENS_TOGETHER[scorer.device.type]
    for length, group in groupby(texts, lambda one: len(one.ids)):
        while batch := list(islice(group, scorer.rows_together(tokens, length))):
            yield batch


def _score(scorer: Scorer, batch: Sequence[Text]) -> None:
    ids = torch.from_numpy(np.stack([one.ids for one in batch]))  # (B, T)
    most = max(one.answer for one in batch)
    length = ids.shape[1]
    at = torch.arange(length - 1 - most, length - 1).repeat(len(batch), 1)
    wanted = ids[:, length - most :]
    logp, likeliest = scorer.predictions(ids[:, :-1], at, wanted)
    right = (likeliest == wanted).tolist()
    for one, hits, each in zip(batch, right, logp.tolist(), strict=True):
        one.cell.samples += 1
        one.cell.right += all(hits[-one.answer :])
        one.cell.nats += sum(each[-one.answer :])
