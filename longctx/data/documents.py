"""Texts and how they are read: a document, the shards of a corpus, and what names a text.

Sources give documents; conversations and compared answers become documents too. The other files of
this folder build on this one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Any, NamedTuple

from longctx.config.fields import refuse
from longctx.data.messages import Row
from longctx.untrusted import named

Span = tuple[int, int]  # characters first .. end - 1
NamedRows = Iterator[tuple[str, str, Row]]  # name of the document, location for messages, row


class Document(NamedTuple):
    """A text and its name: the path of its file, with `:line` or `:row` if the file holds many.

    spans: the parts of a conversation that are learned; None: all of a plain text.
    shortened: a conversation learns its last turn alone, since the template rewrites those before.
    origin: the text that it is made of, whose side of the split it is on; "": its own.
    side, others: answers to one prompt that are compared, see `longctx.data.preferences`.
    """

    name: str
    text: str
    spans: Sequence[Span] | None = None
    shortened: bool = False
    side: int = 0
    others: tuple[Document, ...] = ()
    origin: str = ""

    @property
    def sides(self) -> tuple[Document, ...]:
        """Return this document and the others of its comparison."""
        return (self, *self.others)

    def replaced(self) -> Document:
        """Return this document without halves of surrogate pairs, which JSON can write."""
        text = self.text.encode(errors="replace").decode()
        return self._replace(text=text, others=tuple(other.replaced() for other in self.others))

    @property
    def key(self) -> bytes:
        """Return the hash by which the split knows the text."""
        return exact_key(self.origin or self.whole)

    @property
    def whole(self) -> str:
        """Return the text of all sides."""
        return "".join(document.text for document in self.sides)


class Shard(NamedTuple):
    """A file, or another unit of a corpus; `read` returns its documents from the start."""

    name: str
    read: Callable[[], Iterator[Document]]

    def documents(self) -> Iterator[Document]:
        """Read the documents. Raises ValueError if one is no str, or has no form in UTF-8."""
        problem = "half of a surrogate pair, which is no character; mend it, or data.errors=replace"
        for document in self.read():
            kind = type(document.text).__name__
            refuse((kind != "str", f"{document.name}: its text is a {kind}; give a str"))
            with named(document.name, problem):
                document.whole.encode()
            yield document


@dataclass(frozen=True)
class Corpus:
    """Shards in a fixed order, which can be read again and again.

    identity: a JSON-able value that changes whenever the documents may have changed.
    total: the number of documents, if it is known before reading.
    """

    identity: Any
    shards: list[Shard]
    total: int | None = None

    def documents(self) -> Iterator[Document]:
        """Read every document."""
        for shard in self.shards:
            yield from shard.documents()

    def sample(self, characters: int, piece: int) -> list[str]:
        """Return at most `characters` of all documents, in pieces of `piece` characters."""
        # The pieces with the smallest hashes of name and position are drawn, so the same documents
        # in another order have the same sample. No more than it and a document are in memory.
        drawn: list[tuple[int, str]] = []  # a heap; the largest hash first
        held, limit = 0, -(1 << 128)
        for document in self.documents():
            for first in range(0, len(document.text), piece):
                negated = -int.from_bytes(exact_key(f"{document.name} {first}"), "big")
                if negated > limit:
                    text = document.text[first : first + piece]
                    heappush(drawn, (negated, text))
                    held += len(text)
                # What was left out once stays out, even if a shorter piece had room
                while held > characters:
                    limit, text = heappop(drawn)
                    held -= len(text)
        return [text for _, text in sorted(drawn, reverse=True)]


def exact_key(text: str) -> bytes:
    """Return 16 bytes that stand for a text."""
    return hashlib.sha256(text.encode()).digest()[:16]
