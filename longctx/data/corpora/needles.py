"""Generated documents that ask for what they told far before: text of another corpus with facts and questions in it.

For teaching a small model to use its context, as one source of `data.mix`. Every document follows from its number alone.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from longctx.data import needles
from longctx.data.config import DataConfig
from longctx.data.corpora import Corpus, Document, Part
from longctx.data.corpora import open_corpus as open_other

DOCUMENTS = 2000  # where data.documents does not say
EVERY = 250  # characters of text per fact
PER_FACT = 125  # characters that a fact and its question take
MOST_FILLER = 64 << 20  # characters that are read from the other corpus


def open_corpus(config: DataConfig) -> Corpus:
    other = replace(config, source="text" if config.paths() else "embedded", documents=None)
    corpus = open_other(other)
    count = config.documents or DOCUMENTS
    part = Part("needles", partial(_documents, corpus, count, config.length))
    return Corpus([corpus.identity, "needles 1", config.length, EVERY], [part], count)


def _documents(corpus: Corpus, count: int, length: int) -> Iterator[Document]:
    text = "\n".join(corpus.sample(MOST_FILLER))
    for n in range(count):
        rng = random.Random(f"train {n}")  # seeded by the text, the same in every process
        room = int(length * rng.uniform(0.8, 1.0) / (1 + PER_FACT / EVERY))
        first = rng.randrange(max(1, len(text) - room))
        yield Document(f"needles:{n}", needles.document(text[first : first + room], EVERY, rng))
