"""data=questions: facts hidden in documents, and questions whose answers alone are learned.

    python train.py 'plugins=[examples/questions.py]' data=questions data.path=docs/

Each document is asked about in one way: for needles (RULER), for how many there are, for chains of
variables (RULER's vt), for the ends of walks in a graph (as GraphWalks), or for the n-th of several
notes, which are lines of the document itself (as MRCR). Everything follows from the text and its
number. What is made of a document is on its side of the split, in a mix with the documents too.
"""

from __future__ import annotations

import random
import re
import string
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence, Set
from functools import partial

from longctx.config.data_config import SOURCES, DataConfig
from longctx.data.sources import Corpus, Document, Shard, Source, exact_key, register
from longctx.evaluation.ruler import PAIRS, PROMPTS, different, inserted

EVERY, MOST = 400, 40  # characters of text for each hidden fact, and how many are hidden at most
ASKED = 8  # questions about a text at most
LINE = 200  # characters of a line after which a fact may follow a word
PIECE = re.compile(rf"[^\n]{{1,{LINE}}}\S*\s?|\n")
Asked = tuple[list[str], list[tuple[str, str]]]  # hidden facts; questions with their answers


@register("questions")
class Questions(Source):
    """Questions about the documents of data.path, or the embedded ones."""

    keys = frozenset({"path", "length", "text_column", "errors"})
    has_answers = True

    def pinned(self, config: DataConfig) -> DataConfig:
        pinned: DataConfig = SOURCES["text"].pinned(config)
        return pinned

    def open(self, config: DataConfig, without: Set[bytes]) -> Corpus:
        corpus = SOURCES["text" if config.paths() else "embedded"].open(config, without)
        shards = [Shard(x.name, partial(documents, x, config.length)) for x in corpus.shards]
        return Corpus([corpus.identity, "questions 1", config.length], shards)


def documents(shard: Shard, length: int) -> Iterator[Document]:
    """Ask about each part of `length` characters of each document."""
    for document in shard.documents():
        for first in range(0, len(document.text), length):
            rng = random.Random(f"questions {exact_key(document.text).hex()} {first}")
            made = asking(document.text[first : first + length], rng)
            yield made._replace(name=f"{document.name}:{first}", origin=document.text)


def asking(text: str, rng: random.Random) -> Document:
    """Hide facts in `text`, and ask for them at its end."""
    pieces = PIECE.findall(text)
    lines = [line for piece in pieces if (line := piece.strip())] or ["-"]
    hidden, asked = rng.choice(KINDS)(rng, max(3, min(MOST, len(text) // EVERY)), lines)
    positions = sorted(rng.choices(range(len(pieces) + 1), k=len(hidden)))
    written = "".join(inserted(pieces, positions, [f"\n{fact}\n" for fact in hidden]))
    spans = []
    for question, answer in rng.sample(asked, min(ASKED, len(asked))):
        written += question
        spans.append((len(written), len(written) + 1 + len(answer)))
        written += f" {answer}"
    return Document("", written, spans)


def needles(rng: random.Random, number: int, lines: Sequence[str]) -> Asked:
    """Ask for all numbers of a key, or how many it has."""
    found = defaultdict[str, list[str]](list)
    keys = different(lambda: rng.choice(PAIRS), max(2, number // 2))
    values = different(lambda: str(rng.randint(10**6, 10**7 - 1)), number)
    facts, counts = [], rng.random() < 0.5
    for value in values:
        key = rng.choice(keys)
        found[key].append(value)
        facts.append(PROMPTS["needle"].format(form="numbers", key=key, value=value))
    question = PROMPTS["count"] if counts else PROMPTS["niah"].partition("{context}")[2]
    answers = {key: str(len(own)) if counts else ", ".join(own) for key, own in found.items()}
    return facts, [(question.format(form="numbers", query=x), y) for x, y in answers.items()]


def chains(rng: random.Random, number: int, lines: Sequence[str]) -> Asked:
    """Ask for all variables that have a value, each assigned from the one before."""
    found, facts = defaultdict[str, list[str]](list), []
    values = different(lambda: str(rng.randrange(10**4, 10**5)), 1 + number // 5)
    for name in different(lambda: "".join(rng.choices(string.ascii_uppercase, k=5)), number):
        value = rng.choice(values)
        facts.append(f"VAR {name} = " + (f"VAR {found[value][-1]}" if found[value] else value))
        found[value].append(name)
    question = PROMPTS["vt"].partition("{context}")[2]
    each = ((question.format(query=x, count=len(own)), " ".join(own)) for x, own in found.items())
    return facts, list(each)


def walks(rng: random.Random, number: int, lines: Sequence[str]) -> Asked:
    """Ask which places some steps along the roads lead to."""
    places = different(lambda: rng.choice(PAIRS), max(2, 2 * number // 3))
    starts = [*places, *rng.choices(places, k=number - len(places))]  # a road leaves each place
    roads = list(dict.fromkeys((here, rng.choice(places)) for here in starts))
    rng.shuffle(roads)
    asked = []
    for place in places:
        steps, reached = rng.randint(2, 4), {place}
        for _ in range(steps):
            reached = {there for here, there in roads if here in reached}
        question = PROMPTS["walk"].format(query=place, steps=steps)
        asked.append((question, ", ".join(sorted(reached))))
    return [PROMPTS["road"].format(here=here, there=there) for here, there in roads], asked


def notes(rng: random.Random, number: int, lines: Sequence[str]) -> Asked:
    """Ask to repeat the n-th of the notes on a key, which are `lines` of the text."""
    found, facts, asked = defaultdict[str, list[str]](list), [], []
    keys = different(lambda: rng.choice(PAIRS), 1 + number // 4)
    for _ in range(number):
        key, line = rng.choice(keys), rng.choice(lines)[:LINE]
        found[key].append(line)
        facts.append(PROMPTS["note"].format(key=key, text=line))
        asked.append((PROMPTS["repeat"].format(number=len(found[key]), key=key), line))
    return facts, asked


KINDS: tuple[Callable[..., Asked], ...] = (needles, chains, walks, notes)
