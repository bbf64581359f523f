"""Generated documents that ask for what they told far before: text of another corpus with facts and
questions in it.

For teaching a small model to use its context, as one source of `data.mix`. Every document follows
from its number alone.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Set
from dataclasses import replace
from functools import partial

from longctx.config.data_config import DataConfig
from longctx.data import needles
from longctx.data.sources import Corpus, Document, Part, key
from longctx.data.sources import open_corpus as open_other

DOCUMENTS = 2000  # where data.documents does not say
EVERY = 250  # characters of text per fact
PER_FACT = 125  # characters that a fact and its question take
MOST_FILLER = 64 << 20  # characters that are read from the other corpus


def open_corpus(config: DataConfig, without: Set[bytes] = frozenset()) -> Corpus:
    other = replace(config, source="text" if config.paths() else "embedded", documents=None)
    corpus = open_other(other)
    left_out = [hashlib.sha256(b"".join(sorted(without))).hexdigest()] if without else []
    parts = [Part(part.name, partial(_others, part, without)) for part in corpus.parts]
    count = config.documents or DOCUMENTS
    made = Part("needles", partial(_documents, replace(corpus, parts=parts), count, config.length))
    return Corpus([corpus.identity, "needles 1", config.length, EVERY, *left_out], [made], count)


def _others(part: Part, without: Set[bytes]) -> Iterator[Document]:
    return (
        document for document in part.read() if not without or key(document.text) not in without
    )


def _documents(corpus: Corpus, count: int, length: int) -> Iterator[Document]:
    text = "\n".join(corpus.sample(MOST_FILLER))
    for n in range(count):
        rng = random.Random(f"train {n}")  # seeded by the text, the same in every process
        room = int(length * rng.uniform(0.8, 1.0) / (1 + PER_FACT / EVERY))
        first = rng.randrange(max(1, len(text) - room))
        yield Document(f"needles:{n}", needles.document(text[first : first + room], EVERY, rng))
