"""RULER: what a model finds, follows and counts in texts of every length (arXiv 2404.06654).

A text of a length has at most so many tokens together with the answer, which is generated greedily.
An answer scores the share of what it is to contain (`match_all`); a question is answered if one of
its right answers is in it (`match_part`). A task scores the mean of its samples.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from longctx.config.eval_config import QUESTIONS, RulerConfig
from longctx.data import Tokenizer
from longctx.evaluation import ruler_texts
from longctx.evaluation.passkey import TOKENS_TOGETHER
from longctx.evaluation.questions import MadeQuestions, Questions, read_hotpotqa, read_squad
from longctx.evaluation.ruler_texts import Sample, Sized
from longctx.evaluation.scorer import Scorer, in_eval_mode

READERS = {"qa_1": read_squad, "qa_2": read_hotpotqa}
TRIES = 12  # texts that are made to find the size that fills a length


def needs_text(config: RulerConfig) -> bool:
    """Whether a task of `config` is made of one's own text."""
    return bool(config.made) or any(ruler_texts.needs_essay(task) for task in config.chosen)


class Scored(NamedTuple):
    """One sample, what the model answered, and the score of that, 0 to 1."""

    task: str
    length: int
    tokens: int  # of the prompt
    outputs: list[str]
    answer: str
    score: float


@dataclass
class Texts:
    """The samples of every task and length that `config` names, made of `essay`, a text."""

    config: RulerConfig
    tokenizer: Tokenizer
    essay: list[str]
    questions: dict[str, Questions]

    @classmethod
    def of(cls, config: RulerConfig, tokenizer: Tokenizer, text: str) -> Texts:
        """Raises ValueError naming the file for questions that cannot be read."""
        essay = ruler_texts.words_of(text)
        questions: dict[str, Questions] = {}
        for hops, (task, read) in enumerate(READERS.items(), start=1):
            if task in config.made:
                questions[task] = MadeQuestions(ruler_texts.sentences(essay), hops)
            elif task in config.chosen:
                questions[task] = read(Path(config.file_of(task) or ""))
        return cls(config, tokenizer, essay, questions)

    def count(self, prompt: str) -> int:
        """Tokens of a prompt."""
        return len(self.tokenizer.encode_prompt(prompt))

    def sized(self, task: str, length: int) -> Sized:
        return ruler_texts.sized(task, length, self.essay, self.questions.get(task), self.count)

    def chance(self, task: str, length: int, number: int) -> random.Random:
        return random.Random(f"ruler {self.config.seed} {task} {length} {number}")

    def check(self, task: str, length: int) -> None:
        """ValueError where the smallest texts of `task` are longer than `length`."""
        texts = self.sized(task, length)
        chances = [self.chance(task, length, number) for number in range(self.config.samples)]
        least = texts.answer + max(self.count(texts.make(texts.least, x).prompt) for x in chances)
        if least > length:
            raise ValueError(
                f"ruler.lengths=[{length}]: {task} needs {least:,} tokens at least, "
                f"{texts.answer} of them for the answer; give greater lengths, or other ruler.tasks"
            )

    def samples(self, task: str, length: int) -> Iterator[tuple[Sample, list[int]]]:
        """Samples with the tokens of their prompts, as long as `length` allows."""
        texts = self.sized(task, length)
        room = length - texts.answer

        def tokens(size: int) -> int:
            return self.count(texts.make(size, self.chance(task, length, 0)).prompt)

        size, per_unit = fitting(tokens, room, texts.least, texts.most)
        for number in range(self.config.samples):
            of_this = size
            while True:
                sample = texts.make(of_this, self.chance(task, length, number))
                ids = self.tokenizer.encode_prompt(sample.prompt)
                if len(ids) <= room:
                    break
                assert of_this > texts.least, "see `check`"
                over = max(1, round((len(ids) - room) / per_unit))
                of_this = max(texts.least, of_this - over)
            yield sample, ids


def fitting(tokens: Callable[[int], int], room: int, least: int, most: int) -> tuple[int, float]:
    """The greatest size whose text has at most `room` tokens, nearly, and the tokens per unit of
    size.

    `least` fits, and `tokens` grows about evenly with the size.
    """
    low, high = least, most + 1
    base = at_low = tokens(low)
    guess = 2 * low + 8
    per_unit = 1.0
    for _ in range(TRIES):
        if high - low <= 1:
            break
        guess = min(guess, high - 1)
        count = tokens(guess)
        per_unit = max(1e-3, (count - base) / (guess - least))
        if count <= room:
            low, at_low = guess, count
        else:
            high = guess
        step = max(1, int((room - at_low) / per_unit))
        guess = low + step if low + step < high else (low + high) // 2
    return low, per_unit


def measured(
    scorer: Scorer, texts: Texts, lengths: Sequence[int], ends: Collection[int]
) -> Iterator[Scored]:
    """Every sample of every length and task, answered up to one of `ends` and scored."""
    for length in lengths:
        for task in texts.config.chosen:
            texts.check(task, length)
    with in_eval_mode(scorer.model):
        for length in lengths:
            rows = scorer.rows_together(TOKENS_TOGETHER[scorer.device.type], length)
            for task in texts.config.chosen:
                yield from _answered(scorer, texts, task, length, rows, sorted(ends))


def _answered(
    scorer: Scorer, texts: Texts, task: str, length: int, rows: int, ends: Sequence[int]
) -> Iterator[Scored]:
    match = match_part if task in QUESTIONS else match_all
    most = texts.sized(task, length).answer
    samples = texts.samples(task, length)
    while batch := list(islice(samples, rows)):
        prompts = [ids for _, ids in batch]
        tokens = scorer.answers(prompts, most, ends, length)
        for (sample, ids), of_this in zip(batch, tokens, strict=True):
            answer = texts.tokenizer.decode(of_this)
            score = match(answer, sample.outputs)
            yield Scored(task, length, len(ids), sample.outputs, answer, score)


def match_all(answer: str, outputs: Sequence[str]) -> float:
    """The share of `outputs` that stand in `answer`, in capitals or not."""
    answer = cleaned(answer)
    return sum(output.lower() in answer for output in outputs) / len(outputs)


def match_part(answer: str, outputs: Sequence[str]) -> float:
    """1 if one of `outputs` stands in `answer`, in capitals or not."""
    answer = cleaned(answer)
    return float(any(output.lower() in answer for output in outputs))


def cleaned(answer: str) -> str:
    """An answer in small letters, control characters as ends of lines, as RULER compares it."""
    return re.sub(r"[\x00-\x1f]", "\n", answer.strip()).strip().lower()
