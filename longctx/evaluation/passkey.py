"""Pass keys: does a model find keys that are hidden at every depth of texts of every length?

A text is `length` tokens: filler with the key after `depth` of it, the question, the answer. The
model sees all but the answer's last token, and is right if each token of the answer is the most
likely one; greedy decoding would then give the same answer. The hidden sentences are those of
`facts`. `PassKeys` asks for them at each validation of a run.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from itertools import islice, product
from typing import Any, NamedTuple

import numpy as np
import torch

from longctx.config.eval_config import KINDS
from longctx.data import Data, Tokenizer
from longctx.data.dataset import EncodedDocument
from longctx.evaluation import facts
from longctx.evaluation.score import OnBatch, Scorer
from longctx.parallel.devices import dtype_of
from longctx.runs.metrics import FACTS_FOUND
from longctx.training.callbacks import Callback, Parts, register
from longctx.training.run import Run
from longctx.training.validation import in_eval_mode

DEPTHS = tuple(tenth / 10 for tenth in range(11))
DEPTHS_IN_TRAINING = (0.0, 0.25, 0.5, 0.75, 1.0)
TOKENS_TOGETHER = {"cuda": 65536, "cpu": 8192}


class Recall(NamedTuple):
    """The texts of one kind, each (lengths, depths, samples): True if the answer is right, and ln p
    of the whole answer.
    """

    right: np.ndarray
    logp: np.ndarray


def recall(
    scorer: Scorer,
    tokenizer: Tokenizer,
    filler: np.ndarray,
    lengths: Sequence[int],
    depths: Sequence[float] = DEPTHS,
    samples: int = 10,
    kinds: Sequence[str] = KINDS,
    together: int | None = None,
    on_batch: OnBatch = lambda texts: None,
) -> dict[str, Recall]:
    """Score `samples` texts of each kind, length and depth, made of the tokens `filler`.

    The same arguments give the same texts. A forward takes at most `together` tokens per device, by
    default TOKENS_TOGETHER, and one text at least. Raises ValueError as `check_texts` does.
    """
    check_texts(tokenizer, filler, lengths, kinds)
    shape = len(lengths), len(depths), samples
    recalls = {kind: Recall(np.zeros(shape, bool), np.zeros(shape)) for kind in kinds}
    tokens = together or TOKENS_TOGETHER[scorer.device.type]
    with in_eval_mode(scorer.model):
        for (kind, recalled), (n, length) in product(recalls.items(), enumerate(lengths)):
            positions = product(enumerate(depths), range(samples))
            while batch := list(islice(positions, scorer.sequences_together(tokens, length))):
                texts = [
                    sample(kind, tokenizer, filler, length, depth, number)
                    for (_, depth), number in batch
                ]
                for ((d, _), number), (logp, is_right) in zip(
                    batch, scorer.known(*zip(*texts, strict=True)), strict=True
                ):
                    recalled.right[n, d, number] = is_right
                    recalled.logp[n, d, number] = logp
                on_batch(len(batch))
    return recalls


def check_texts(
    tokenizer: Tokenizer, filler: np.ndarray, lengths: Sequence[int], kinds: Sequence[str]
) -> None:
    """Raise ValueError if the longest text lacks filler, or the shortest has no room for a key."""
    check_filler("passkey.lengths", filler, lengths)
    for kind in kinds:
        sample(kind, tokenizer, filler, min(lengths), 0.0, 0)


def check_filler(key: str, filler: np.ndarray, lengths: Sequence[int]) -> None:
    """Raise ValueError, naming `key`, if the longest text repeats `filler` more than four times."""
    if 4 * len(filler) < max(lengths):
        raise ValueError(
            f"{key}={list(lengths)}: the documents have {len(filler):,} tokens, too few for texts "
            f"of {max(lengths):,}; give longer ones with data=text data.path=..., or shorter "
            "lengths"
        )


def filler_of(
    documents: Iterable[EncodedDocument], tokenizer: Tokenizer, tokens: int
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


def sample(
    kind: str, tokenizer: Tokenizer, filler: np.ndarray, length: int, depth: float, number: int
) -> tuple[np.ndarray, int]:
    """Return text `number` of a kind and length, which asks for the same key at every depth."""
    rng = random.Random(f"measure {kind} {length} {number}")
    hidden = facts.draw(kind, rng)
    first = rng.randrange(len(filler))
    rotated = np.resize(np.roll(filler, -first), max(len(filler), length))
    others = [rng.random() for _ in hidden.others]
    return text(hidden, tokenizer, rotated, length, depth, others)


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
            recalls = recall(scorer, *texts, config.samples, config.kinds, together)
        row |= {
            f"{FACTS_FOUND}/{kind}/{length}": float(right.mean())
            for kind, recalled in recalls.items()
            for length, right in zip(lengths, recalled.right, strict=True)
        }


def unseen_tokens(data: Data, lengths: Sequence[int]) -> np.ndarray:
    """Return tokens to hide pass keys in: of validation documents, if there are any."""
    documents = data.documents("val" if data.count("val") else "train")
    return filler_of(documents, data.tokenizer, 4 * max(lengths))


register("passkey", PassKeys)
