"""data=needles: generated documents that ask for facts told far before, to teach a small model to
use its context.

Facts and questions are hidden in the text of another source: data.path, else the embedded one.
Every document follows from its number alone. Evaluation hides the same facts, drawn from other
seeds, so that no answer was seen. passkey: one number, told once (Mohtashami & Jaggi 2023, arXiv
2305.16300). needle: the number of one city among numbers of others, so that the question must
be matched and not only the form (RULER, arXiv 2404.06654).
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Sequence, Set
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from longctx.config.data_config import DataConfig
from longctx.data.documents import Corpus, Document, Shard, exact_key
from longctx.data.sources.embedded import Embedded
from longctx.data.sources.registry import register
from longctx.data.sources.text import LocalFiles

DOCUMENTS = 2000  # if data.documents is null
EVERY = 250  # characters of text per fact
PER_FACT = 125  # characters that a fact and its question take
LINE = 200  # characters in which a line is to end before a fact; in a longer one, a word
FILLER_LIMIT = 64 << 20  # characters that are read from the other source
DISTRACTORS = 3  # other cities' numbers in a needle task
DIGITS = 5
PASSKEY_FACT = "\nThe pass key is {0}. Remember it. {0} is the pass key.\n"
PASSKEY_QUESTION = "\nWhat is the pass key? The pass key is"
NEEDLE_FACT = "\nThe secret number of {} is {}.\n"
NEEDLE_QUESTION = "\nWhat is the secret number of {0}? The secret number of {0} is"
_NAMES = (
    "Accra Adelaide Algiers Amman Ankara Antwerp Athens Austin Baghdad Baku Bangkok Barcelona "
    "Basel Beirut Bergen Berlin Bogota Bonn Boston Brisbane Bruges Brussels Cairo Calgary "
    "Cardiff Chicago Cologne Dakar Dallas Delhi Denver Doha Dresden Dublin Durban Florence "
    "Fresno Geneva Genoa Ghent Glasgow Graz Hague Hamburg Hanoi Havana Helsinki Houston "
    "Istanbul Jakarta Kabul Karachi Kiel Kyoto Lagos Leeds Leipzig Lima Lisbon London Lyon "
    "Madrid Malaga Manila Mecca Miami Milan Minsk Mombasa Montreal Moscow Mumbai Munich Nairobi "
    "Naples Odessa Osaka Oslo Oxford Palermo Paris Perth Porto Prague Quito Rabat Riga Rome "
    "Santiago Seoul Seville Sofia Sydney Tallinn Tampa Tehran Tokyo Toronto Tunis Turin Utrecht "
    "Venice Vienna Vilnius Warsaw York Zagreb Zurich"
)
CITIES = _NAMES.split()


@register("needles")
class Needles(LocalFiles):
    """Facts and questions in the text of data.path, or in the embedded one."""

    keys = frozenset({"path", "length", "text_column", "errors"})
    generated = True

    def ignored(self, config: DataConfig, name: str) -> str:
        if config.paths():
            return super().ignored(config, name)
        return "data.path is not set" if name in ("text_column", "errors") else ""

    def check(self, config: DataConfig) -> None:
        """Take any configuration: without a path, the text is the embedded one."""

    def open(self, config: DataConfig, without: Set[bytes]) -> Corpus:
        read = super().open if config.paths() else Embedded().open
        filler = read(config, without)
        shards = [Shard(shard.name, partial(_allowed, shard, without)) for shard in filler.shards]
        allowed = replace(filler, shards=shards)
        left_out = [hashlib.sha256(b"".join(sorted(without))).hexdigest()] if without else []
        identity = [filler.identity, "needles 3", config.length, EVERY, *left_out]
        count = config.documents or DOCUMENTS
        generate = partial(_documents, allowed, count, config.length)
        return Corpus(identity, [Shard("needles", generate)], count)


def _allowed(shard: Shard, without: Set[bytes]) -> Iterator[Document]:
    for document in shard.documents():
        if not without or exact_key(document.text) not in without:
            yield document


def _documents(corpus: Corpus, count: int, length: int) -> Iterator[Document]:
    text = "\n".join(corpus.sample(FILLER_LIMIT))
    for index in range(count):
        rng = random.Random(f"train {index}")  # seeded by the text, the same in every process
        # Facts and questions take a third of the document, until every city has one
        size = length * rng.uniform(0.8, 1.0)
        room = int(max(size / (1 + PER_FACT / EVERY), size - PER_FACT * len(CITIES)))
        first = rng.randrange(max(1, len(text) - room))
        yield Document(f"needles:{index}", document(text[first : first + room], EVERY, rng))


class Task(NamedTuple):
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


def task(kind: str, rng: random.Random) -> Task:
    """Draw a task of `kind`, passkey or needle."""
    if kind == "passkey":
        answer = number(rng)
        return Task(PASSKEY_FACT.format(answer), [], PASSKEY_QUESTION, f" {answer}")
    # Numbers of other cities: the question must be matched, not only the form.
    city, *others = rng.sample(CITIES, 1 + DISTRACTORS)
    answer = number(rng)
    facts = [NEEDLE_FACT.format(other, number(rng)) for other in others]
    question = NEEDLE_QUESTION.format(city)
    return Task(NEEDLE_FACT.format(city, answer), facts, question, f" {answer}")


def document(filler: str, every: int, rng: random.Random) -> str:
    """Put a fact per about `every` characters into `filler`, and its question and answer later on.

    One fact is a pass key, which the end of the text asks for; the others are cities' numbers, each
    asked for once, at any distance.
    """
    cities = rng.sample(CITIES, max(1, min(len(CITIES), len(filler) // every)))
    events: list[tuple[float, str]] = []
    for city in cities:
        answer = number(rng)
        of_fact, of_question = sorted((_position(rng), _position(rng)))
        events.append((of_fact, NEEDLE_FACT.format(city, answer)))
        events.append((of_question, f"{NEEDLE_QUESTION.format(city)} {answer}.\n"))
    key = number(rng)
    events.append((_position(rng), PASSKEY_FACT.format(key)))
    return f"{_inserted(filler, sorted(events))}{PASSKEY_QUESTION} {key}.\n"


def _position(rng: random.Random) -> float:
    """Return a share of the text, at times its very beginning or end."""
    return min(1.0, max(0.0, rng.uniform(-0.1, 1.05)))


def _inserted(filler: str, events: Sequence[tuple[float, str]]) -> str:
    """Insert each text of `events` after a line of `filler`, at a share of its length; after a word
    if the line is long, or right there if the word is.
    """
    parts = []
    written = 0  # characters of `filler`
    lines = filler + "\n"
    for position, text in events:
        start = max(written, int(position * len(filler)))
        found = [lines.find(end, start, start + LINE) for end in "\n "]
        end = next((index for index in found if index >= 0), start)
        parts += [filler[written:end], text]
        written = end
    return "".join([*parts, filler[written:]])
