"""data=needles: generated documents that ask for what they told far before, to teach a small model
to use its context.

Text of another source (that of data.path, else the embedded one) with facts and questions in it.
Every document follows from its number alone.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Mapping, Set
from dataclasses import replace
from functools import partial

from longctx.config.data_config import DataConfig
from longctx.data import facts
from longctx.data.corpus import Corpus, Document, Shard, Source, content_key, register
from longctx.data.sources.embedded import Embedded
from longctx.data.sources.text import Text

DOCUMENTS = 2000  # where data.documents does not say
EVERY = 250  # characters of text per fact
PER_FACT = 125  # characters that a fact and its question take
MOST_FILLER = 64 << 20  # characters that are read from the other source
_OF_FILES = frozenset({"text_column", "errors"})


@register("needles")
class Needles(Source):
    """Facts and questions in the text of data.path, or in the embedded one."""

    keys = _OF_FILES | {"path", "length"}
    generated = True

    def without_effect(self, config: DataConfig) -> Mapping[str, str]:
        if config.paths():
            return Text().without_effect(config)
        return dict.fromkeys(_OF_FILES, "without data.path the embedded documents are read")

    def check_files(self, config: DataConfig) -> None:
        Text().check_files(config)

    def pinned(self, config: DataConfig) -> DataConfig:
        return Text().pinned(config)

    def open(self, config: DataConfig, without: Set[bytes]) -> Corpus:
        filler = (Text() if config.paths() else Embedded()).open(config, without)
        shards = [Shard(shard.name, partial(_allowed, shard, without)) for shard in filler.shards]
        allowed = replace(filler, shards=shards)
        left_out = [hashlib.sha256(b"".join(sorted(without))).hexdigest()] if without else []
        identity = [filler.identity, "needles 1", config.length, EVERY, *left_out]
        count = config.documents or DOCUMENTS
        generate = partial(_documents, allowed, count, config.length)
        return Corpus(identity, [Shard("needles", generate)], count)


def _allowed(shard: Shard, without: Set[bytes]) -> Iterator[Document]:
    for document in shard.read():
        if not without or content_key(document.text) not in without:
            yield document


def _documents(corpus: Corpus, count: int, length: int) -> Iterator[Document]:
    text = "\n".join(corpus.sample(MOST_FILLER))
    for n in range(count):
        rng = random.Random(f"train {n}")  # seeded by the text, the same in every process
        room = int(length * rng.uniform(0.8, 1.0) / (1 + PER_FACT / EVERY))
        first = rng.randrange(max(1, len(text) - room))
        yield Document(f"needles:{n}", facts.document(text[first : first + room], EVERY, rng))
