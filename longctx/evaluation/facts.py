"""Facts to hide in texts, and the questions that they answer.

passkey: one number, told once (Mohtashami & Jaggi 2023, arXiv 2305.16300). needle: the number of
one city among numbers of others, so that the question must be matched and not only the form (RULER,
arXiv 2404.06654).
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import NamedTuple

DISTRACTORS = 3  # other cities' numbers in a needle task
DIGITS = 5
PASSKEY_FACT = "\nThe pass key is {0}. Remember it. {0} is the pass key.\n"
PASSKEY_QUESTION = "\nWhat is the pass key? The pass key is"
NEEDLE_FACT = "\nThe secret number of {} is {}.\n"
NEEDLE_QUESTION = "\nWhat is the secret number of {0}? The secret number of {0} is"
CITIES = Path(__file__).with_name("cities.txt").read_text().split()


class Fact(NamedTuple):
    """A fact to hide, the question that it answers, and other facts.

    `question + answer` is the text that the model is to continue, and how.
    """

    fact: str
    others: list[str]
    question: str
    answer: str


def number(rng: random.Random) -> str:
    """Return a number of DIGITS digits, the first not 0."""
    return str(rng.randrange(10 ** (DIGITS - 1), 10**DIGITS))


def draw(kind: str, rng: random.Random) -> Fact:
    """Draw a fact of `kind`, passkey or needle."""
    if kind == "passkey":
        answer = number(rng)
        return Fact(PASSKEY_FACT.format(answer), [], PASSKEY_QUESTION, f" {answer}")
    city, *others = rng.sample(CITIES, 1 + DISTRACTORS)
    answer = number(rng)
    facts = [NEEDLE_FACT.format(other, number(rng)) for other in others]
    question = NEEDLE_QUESTION.format(city)
    return Fact(NEEDLE_FACT.format(city, answer), facts, question, f" {answer}")
