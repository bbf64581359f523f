"""Pass keys: does a model find keys that are hidden at every depth of texts of every length?

A text is `length` tokens: filler with the key after `depth` of it, the question, the answer. The
model sees all but the answer's last token, and is right if each token of the answer is the most
likely one; greedy decoding would then give the same answer. The hidden sentences are those of
`facts`. `PassKeys` asks for them at each validation of a run.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, islice
from typing import Any, NamedTuple

import numpy as np
import torch

from longctx.config.eval_config import KINDS
from longctx.data import Data, Tokenizer
from longctx.data.dataset import EncodedDocument
from longctx.evaluation import facts
from longctx.evaluation.score import Progress, Scorer
from longctx.evaluation.windows import ScoredDocument
from longctx.parallel.devices import dtype_of
from longctx.runs.metrics import FACTS_FOUND
from longctx.training.callbacks import Callback, Parts, register
from longctx.training.run import Run
from longctx.training.validation import in_eval_mode

DEPTHS = tuple(tenth / 10 for tenth in range(11))
DEPTHS_IN_TRAINING = (0.0, 0.25, 0.5, 0.75, 1.0)
TOKENS_TOGETHER = {"cuda": 65536, "cpu": 8192}


@dataclass
class Cell:
    """The texts of one kind, length and depth: right answers, and Σ ln p of all answers."""

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


class KeyText(NamedTuple):
    """Tokens (length,) int64; the last `answer` of them are the answer."""

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
    default TOKENS_TOGETHER, and one text at least. Raises ValueError as `check_texts` does.
    """
    check_texts(tokenizer, filler, lengths, kinds)
    cells = [Cell(kind, length, depth) for kind in kinds for length in lengths for depth in depths]
    tokens = together or TOKENS_TOGETHER[scorer.device.type]
    line = Progress("texts", len(cells) * samples, progress)
    with in_eval_mode(scorer.model), line:
        texts = _texts(cells, tokenizer, filler, samples)
        for length, texts_of_length in groupby(texts, lambda text: len(text.ids)):
            while batch := list(islice(texts_of_length, scorer.sequences_together(tokens, length))):
                found = scorer.known([text.ids for text in batch], [text.answer for text in batch])
                for text, (nats, is_right) in zip(batch, found, strict=True):
                    text.cell.samples += 1
                    text.cell.right += is_right
                    text.cell.nats += nats
                line.count(len(batch))
    return cells


def check_texts(
    tokenizer: Tokenizer, filler: np.ndarray, lengths: Sequence[int], kinds: Sequence[str]
) -> None:
    """Raise ValueError if the longest text lacks filler, or the shortest has no room for a key."""
    check_filler("passkey.lengths", filler, lengths)
    for _ in _texts([Cell(kind, min(lengths), 0.0) for kind in kinds], tokenizer, filler, 1):
        pass


def check_filler(key: str, filler: np.ndarray, lengths: Sequence[int]) -> None:
    """Raise ValueError, naming `key`, if the longest text repeats `filler` more than four times."""
    if 4 * len(filler) < max(lengths):
        raise ValueError(
            f"{key}={list(lengths)}: the documents have {len(filler):,} tokens, too few for texts "
            f"of {max(lengths):,}; give longer ones with data=text data.path=..., or shorter "
            "lengths"
        )


def filler_of(
    documents: Iterable[ScoredDocument | EncodedDocument], tokenizer: Tokenizer, tokens: int
) -> np.ndarray:
    """Return at least `tokens` tokens of `documents`, or all of them, without special tokens."""
    special = [token for token in (tokenizer.bos_id, tokenizer.eos_id) if token is not None]
    parts = [np.zeros(0, np.int64)]
    count = 0
    for document in documents:
        parts.append(document.ids[~np.isin(document.ids, special)])
        count += len(parts[-1])
        if count >= tokens:
            break
    return np.concatenate(parts)


def text(
    hidden: facts.Fact,
    tokenizer: Tokenizer,
    filler: np.ndarray,
    length: int,
    depth: float,
    others: Sequence[float],
) -> tuple[np.ndarray, int]:
    """Return the tokens (length,) of a text, and how many at its end are the answer.

    The key of `hidden` is after `depth` of the filler, and the other keys after `others`.
    """
    question = tokenizer.encode(hidden.question)
    question_answer = tokenizer.encode(hidden.question + hidden.answer)
    # A token can begin in the question and end in the answer: it belongs to the answer.
    pairs = zip(question, question_answer, strict=False)
    same = next((at for at, pair in enumerate(pairs) if pair[0] != pair[1]), len(question))
    sentences = map(tokenizer.encode, (hidden.fact, *hidden.others))
    keys = sorted(zip((depth, *others), sentences, strict=True))
    room = length - len(tokenizer.begin) - len(question_answer)
    room -= sum(len(sentence) for _, sentence in keys)
    if room < 0:
        raise ValueError(
            f"passkey.lengths=[{length}]: too short for a key and its question; use more tokens"
        )
    body = list(tokenizer.begin)
    start = 0
    for share, sentence in keys:
        end = round(share * room)
        body += [*filler[start:end].tolist(), *sentence]
        start = end
    body += [*filler[start:room].tolist(), *question_answer]
    return np.asarray(body, dtype=np.int64), len(question_answer) - same


def _texts(
    cells: Sequence[Cell], tokenizer: Tokenizer, filler: np.ndarray, samples: int
) -> Iterator[KeyText]:
    for cell in cells:
        for number in range(samples):
            # The same texts at every depth.
            rng = random.Random(f"measure {cell.kind} {cell.length} {number}")
            hidden = facts.draw(cell.kind, rng)
            first = rng.randrange(len(filler))
            rotated = np.resize(np.roll(filler, -first), max(len(filler), cell.length))
            others = [rng.random() for _ in hidden.others]
            yield KeyText(cell, *text(hidden, tokenizer, rotated, cell.length, cell.depth, others))


def content(cells: Sequence[Cell]) -> dict[str, Any]:
    """Return the JSON: for each kind lengths, depths, and numbers as [length][depth]."""
    kinds = {}
    for kind in dict.fromkeys(cell.kind for cell in cells):
        grid = {(cell.length, cell.depth): cell for cell in cells if cell.kind == kind}
        lengths, depths = (sorted(set(values)) for values in zip(*grid, strict=True))
        rows = [[grid[length, depth] for depth in depths] for length in lengths]
        kinds[kind] = {
            "lengths": lengths,
            "depths": depths,
            "accuracy": [[round(cell.accuracy, 6) for cell in row] for row in rows],
            "logprob": [[round(cell.logprob, 6) for cell in row] for row in rows],
        }
    return {"samples": cells[0].samples, "kinds": kinds}


class PassKeys(Callback):
    """Log the share of hidden pass keys that a run finds, for each kind and length: passkey=true.

    Every rank asks for all of them. A forward takes a micro-batch's tokens at most, as predicted.
    """

    def __init__(self, parts: Parts) -> None:
        self.run, self.data, self.model = parts.run, parts.data, parts.state.module.model

    @classmethod
    def check(cls, run: Run, data: Data) -> None:
        if run.config.passkey.enabled:
            lengths = run.config.passkey.lengths or [run.workload.seq_len]
            unseen = unseen_tokens(data, lengths)
            check_texts(data.tokenizer, unseen, lengths, run.config.passkey.kinds)

    def validated(self, step: int, row: dict[str, Any]) -> None:
        config, workload = self.run.config.passkey, self.run.workload
        if not config.enabled:
            return
        lengths, depths = config.lengths or [workload.seq_len], config.depths or DEPTHS_IN_TRAINING
        together = min(workload.batch_size * workload.seq_len, TOKENS_TOGETHER[workload.device])
        scorer = Scorer(self.model, dtype_of(workload.precision))
        texts = self.data.tokenizer, unseen_tokens(self.data, lengths), lengths, depths
        with torch.compiler.set_stance("force_eager"):
            cells = recall(scorer, *texts, config.samples, config.kinds, together)
        right: Counter[str] = Counter()
        for cell in cells:
            right[f"{FACTS_FOUND}/{cell.kind}/{cell.length}"] += cell.right
        row |= {key: count / (len(depths) * config.samples) for key, count in right.items()}


def unseen_tokens(data: Data, lengths: Sequence[int]) -> np.ndarray:
    """Return tokens to hide pass keys in: of validation documents, if there are any."""
    documents = data.documents("val" if data.count("val") else "train")
    return filler_of(documents, data.tokenizer, 4 * max(lengths))


register("passkey", PassKeys)
