"""data=needles: documents that ask for facts told far before, to teach a small model to use its
context.

    python train.py 'plugins=[examples/needles.py]' data=needles data.path=docs/ data.length=20000

An example of a data source in a file of one's own whose documents are made from those of another
one: the files of data.path, else the embedded ones. Every document follows from its number alone.
Pass keys of an evaluation have the same form, drawn from other seeds, so no answer was seen.
Answers are few of the tokens, so in every other document they are the only targets. In the rest all
tokens are.
"""

from __future__ import annotations

import hashlib
import random
import re
from collections.abc import Iterator, Sequence, Set
from functools import partial
from pathlib import Path

from longctx.config.data_config import SOURCES, DataConfig
from longctx.data.sources import Corpus, Document, Shard, Source, exact_key, register
from longctx.evaluation import passkey, ruler

NEEDLE_FACT = "\nThe secret number of {} is {}.\n"
NEEDLE_QUESTION = "\nWhat is the secret number of {0}? The secret number of {0} is"
ANSWER = re.compile(r"\? The [^?\n]+ is( \d+)\.\n")
CITIES = Path(__file__).with_name("cities.txt").read_text().split()
# No word is in two names, so a name's last token tells it from others
PAIRS = map("-".join, zip(ruler.ADJECTIVES, ruler.NOUNS, strict=False))
NAMES = [*CITIES, *PAIRS]
DOCUMENTS = 2000  # if data.documents is null
EVERY = 250  # characters of text per fact
PER_FACT = 125  # characters that a fact and its question take
LINE = 200  # characters in which a line is to end before a fact; in a longer one, a word
FILLER_LIMIT = 64 << 20  # characters that are read from the other source


@register("needles")
class Needles(Source):
    """Facts and questions in the text of data.path, or in the embedded one."""

    keys = frozenset({"path", "length", "text_column", "errors"})
    # In a mix it is opened last, `without` the texts of other sources that validate
    generated = True
    has_answers = True

    def pinned(self, config: DataConfig) -> DataConfig:
        pinned: DataConfig = SOURCES["text"].pinned(config)
        return pinned

    def open(self, config: DataConfig, without: Set[bytes]) -> Corpus:
        filler = SOURCES["text" if config.paths() else "embedded"].open(config, without)
        left_out = hashlib.sha256(b"".join(sorted(without))).hexdigest()
        identity = [filler.identity, "needles 6", config.length, EVERY, left_out]
        count = config.documents or DOCUMENTS
        read = partial(documents, filler, without, count, config.length)
        return Corpus(identity, [Shard("needles", read)], count)


def documents(filler: Corpus, without: Set[bytes], count: int, length: int) -> Iterator[Document]:
    """Make `count` documents of about `length` characters."""
    shards = [Shard(shard.name, partial(allowed, shard, without)) for shard in filler.shards]
    text = "\n".join(Corpus(None, shards).sample(FILLER_LIMIT, FILLER_LIMIT // 8))
    for index in range(count):
        rng = random.Random(f"train {index}")  # seeded by the text, the same in every process
        # Facts and questions take a third of the document, until every name has one
        size = length * rng.uniform(0.8, 1.0)
        room = int(max(size / (1 + PER_FACT / EVERY), size - PER_FACT * len(NAMES)))
        first = rng.randrange(max(1, len(text) - room))
        made = hidden_in(text[first : first + room], EVERY, rng)
        answers = [found.span(1) for found in ANSWER.finditer(made)]
        yield Document(f"needles:{index}", made, answers if index % 2 else [(0, len(made))])


def allowed(shard: Shard, without: Set[bytes]) -> Iterator[Document]:
    """Read the documents whose text does not validate."""
    return (one for one in shard.documents() if exact_key(one.text) not in without)


def hidden_in(filler: str, every: int, rng: random.Random) -> str:
    """Put a fact per about `every` characters into `filler`, and its question and answer later on.

    One fact is a pass key, which the end of the text asks for; the others are numbers of cities and
    of pairs of words, each asked for once, at any distance.
    """
    names = rng.sample(NAMES, max(1, min(len(NAMES), len(filler) // every)))
    events: list[tuple[float, str]] = []
    for name in names:
        answer = str(rng.randrange(10**4, 10**5))
        of_fact, of_question = sorted((position(rng), position(rng)))
        events.append((of_fact, NEEDLE_FACT.format(name, answer)))
        events.append((of_question, f"{NEEDLE_QUESTION.format(name)} {answer}.\n"))
    key = str(rng.randrange(10**4, 10**5))
    events.append((position(rng), passkey.FACT.format(key)))
    return f"{inserted(filler, sorted(events))}{passkey.QUESTION} {key}.\n"


def position(rng: random.Random) -> float:
    """Return a share of the text, at times its very beginning or end."""
    return min(1.0, max(0.0, rng.uniform(-0.1, 1.05)))


def inserted(filler: str, events: Sequence[tuple[float, str]]) -> str:
    """Insert each text of `events` after a line of `filler`, at a share of its length; after a word
    if the line is long, or right there if the word is.
    """
    parts = []
    written = 0  # characters of `filler`
    lines = filler + "\n"
    for share, text in events:
        start = max(written, int(share * len(filler)))
        found = [lines.find(end, start, start + LINE) for end in "\n "]
        end = next((index for index in found if index >= 0), start)
        parts += [filler[written:end], text]
        written = end
    return "".join([*parts, filler[written:]])
