"""Pass keys: does a model find a number that is hidden at every depth of texts of every length?

A text is `length` tokens: filler with the number after `depth` of it, the question, the answer
(Mohtashami & Jaggi 2023, arXiv 2305.16300). The model sees all but the answer's last token, and is
right if each token of the answer is the most likely one; greedy decoding would then give the same
answer. `PassKeys` asks for them at each validation of a run.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from itertools import islice, product
from typing import Any

import numpy as np
import torch

from longctx.config.fields import refuse
from longctx.data import Data, Tokenizer
from longctx.data.dataset import EncodedDocument
from longctx.evaluation.score import OnBatch, Scorer
from longctx.parallel.devices import dtype_of
from longctx.runs.metrics import FACTS_FOUND
from longctx.training.callbacks import Callback, Parts, register
from longctx.training.run import Run
from longctx.training.validation import in_eval_mode

FACT = "\nThe pass key is {0}. Remember it. {0} is the pass key.\n"
QUESTION = "\nWhat is the pass key? The pass key is"
DEPTHS = tuple(tenth / 10 for tenth in range(11))
DEPTHS_IN_TRAINING = (0.0, 0.25, 0.5, 0.75, 1.0)
TOKENS_TOGETHER = {"cuda": 65536, "cpu": 8192}


def recall(
    scorer: Scorer,
    tokenizer: Tokenizer,
    filler: np.ndarray,
    lengths: Sequence[int],
    depths: Sequence[float] = DEPTHS,
    samples: int = 10,
    together: int | None = None,
    on_batch: OnBatch = lambda texts: None,
) -> tuple[np.ndarray, np.ndarray]:
    """Score `samples` texts of each length and depth, made of the tokens `filler`.

    Return (lengths, depths, samples) twice: True if the answer is right, and ln p of the whole
    answer. The same arguments give the same texts. A forward takes at most `together` tokens per
    device, by default TOKENS_TOGETHER, and one text at least. Raises ValueError as `check_texts`.
    """
    check_texts(tokenizer, filler, lengths)
    shape = len(lengths), len(depths), samples
    right, logp = np.zeros(shape, bool), np.zeros(shape)
    tokens = together or TOKENS_TOGETHER[scorer.device.type]
    with in_eval_mode(scorer.model):
        for row, length in enumerate(lengths):
            numbers = product(range(len(depths)), range(samples))
            while batch := list(islice(numbers, scorer.sequences_together(tokens, length))):
                texts = [sample(tokenizer, filler, length, depths[d], n) for d, n in batch]
                answers = scorer.known(*zip(*texts, strict=True))
                for (d, n), answer in zip(batch, answers, strict=True):
                    logp[row, d, n], right[row, d, n] = answer
                on_batch(len(batch))
    return right, logp


def check_texts(tokenizer: Tokenizer, filler: np.ndarray, lengths: Sequence[int]) -> None:
    """Raise ValueError if the longest text lacks filler, or the shortest has no room for a key."""
    check_filler("passkey.lengths", filler, lengths)
    sample(tokenizer, filler, min(lengths), 0.0, 0)


def check_filler(key: str, filler: np.ndarray, lengths: Sequence[int]) -> None:
    """Raise ValueError, naming `key`, if the longest text repeats `filler` more than four times."""
    problem = f"{key}={list(lengths)}: the documents have {len(filler):,} tokens, too few"
    advice = "give longer ones with data=text data.path=..., or shorter lengths"
    refuse((4 * len(filler) < max(lengths), f"{problem}; {advice}"))


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


def sample(
    tokenizer: Tokenizer, filler: np.ndarray, length: int, depth: float, number: int
) -> tuple[np.ndarray, int]:
    """Return text `number` of a length as `text` does; at every depth it has the same key."""
    rng = random.Random(f"measure passkey {length} {number}")
    key = str(rng.randrange(10**4, 10**5))  # five digits, the first not 0
    rotated = np.roll(filler, -rng.randrange(len(filler)))
    return text(key, tokenizer, np.resize(rotated, max(len(filler), length)), length, depth)


def text(
    key: str, tokenizer: Tokenizer, filler: np.ndarray, length: int, depth: float
) -> tuple[np.ndarray, int]:
    """Return the tokens (length,) of a text, and how many at its end are the answer.

    The `key` is after `depth` of the filler.
    """
    question = tokenizer.encode(QUESTION)
    question_answer = tokenizer.encode(f"{QUESTION} {key}")
    # A token can begin in the question and end in the answer: it belongs to the answer.
    pairs = zip(question, question_answer, strict=False)
    same = next((at for at, pair in enumerate(pairs) if pair[0] != pair[1]), len(question))
    fact = tokenizer.encode(FACT.format(key))
    room = length - len(tokenizer.begin) - len(fact) - len(question_answer)
    problem = "too short for a key and its question; use more tokens"
    refuse((room < 0, f"passkey.lengths=[{length}]: {problem}"))
    before, after = filler[: round(depth * room)], filler[round(depth * room) : room]
    parts = (tokenizer.begin, before, fact, after, question_answer)
    ids = np.concatenate([np.asarray(part, np.int64) for part in parts])
    return ids, len(question_answer) - same


class PassKeys(Callback):
    """Log the share of hidden pass keys that a run finds, for each length: passkey=true.

    Every rank asks for all of them. A forward takes a micro-batch's tokens at most, as predicted.
    """

    def __init__(self, parts: Parts) -> None:
        self.run, self.data, self.model = parts.run, parts.data, parts.state.module.model

    @classmethod
    def check(cls, run: Run, data: Data) -> None:
        if run.config.passkey.enabled:
            lengths = run.config.passkey.lengths or [run.workload.seq_len]
            check_texts(data.tokenizer, unseen_tokens(data, lengths), lengths)

    def validated(self, step: int, row: dict[str, Any]) -> None:
        config, workload = self.run.config.passkey, self.run.workload
        if not config.enabled:
            return
        lengths, depths = config.lengths or [workload.seq_len], config.depths or DEPTHS_IN_TRAINING
        together = min(workload.batch_size * workload.seq_len, TOKENS_TOGETHER[workload.device])
        scorer = Scorer(self.model, dtype_of(workload.precision))
        texts = self.data.tokenizer, unseen_tokens(self.data, lengths), lengths, depths
        with torch.compiler.set_stance("force_eager"):
            right, _ = recall(scorer, *texts, config.samples, together)
        for length, found in zip(lengths, right, strict=True):
            row[f"{FACTS_FOUND}/passkey/{length}"] = float(found.mean())


def unseen_tokens(data: Data, lengths: Sequence[int]) -> np.ndarray:
    """Return tokens to hide pass keys in: of validation documents, if there are any."""
    documents = data.documents("val" if data.count("val") else "train")
    return filler_of(documents, data.tokenizer, 4 * max(lengths))


register("passkey", PassKeys)
