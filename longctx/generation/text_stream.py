"""Text of tokens as they come: only whole characters, which may be of several tokens."""

from __future__ import annotations

from collections.abc import Collection

from longctx.data import Tokenizer

BROKEN = "\ufffd"  # stands for bytes that are no character, or not yet
WINDOW = 16  # tokens that are decoded again with each new one: a character has 4 bytes at most


class TextStream:
    """The text of one continuation, without the token of `ends` that ends it."""

    def __init__(self, tokenizer: Tokenizer, ends: Collection[int] = ()) -> None:
        self.tokenizer, self.ends = tokenizer, ends
        self.ids: list[int] = []
        self.text = ""  # that no later token changes
        self._before = 0  # tokens whose text is in `text`
        self._from = 0  # tokens before those that are decoded: a first token may lose its space

    def add(self, token: int) -> None:
        """Take the next token."""
        if token in self.ends:
            return
        self.ids.append(token)
        known = self.tokenizer.decode(self.ids[self._from : self._before])
        grown = self.tokenizer.decode(self.ids[self._from :])
        ends_whole = not grown.endswith(BROKEN) or len(self.ids) - self._before >= WINDOW
        if ends_whole and len(grown) > len(known):
            self.text += grown[len(known) :]
            self._from, self._before = self._before, len(self.ids)

    def whole(self) -> str:
        """All of the text, with the bytes at its end that are no character."""
        known = self.tokenizer.decode(self.ids[self._from : self._before])
        self.text += self.tokenizer.decode(self.ids[self._from :])[len(known) :]
        self._from = self._before = len(self.ids)
        return self.text
