"""Text to token ids and back: a byte-level BPE trained here, or any tokenizer that a tokenizer.json
describes.

Around Hugging Face `tokenizers`; adds what training needs and tokenizer.json does not say: which
token ends a document. Text never turns into special tokens: a document that quotes `<|endoftext|>`
does not end there.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers

from longctx import files, untrusted

# Unset, the library warns at every fork of a data worker.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")

EOS = "<|endoftext|>"
_KNOWN_EOS = (EOS, "</s>", "<|end_of_text|>", "<eos>", "<|im_end|>", "<|eot_id|>")
# Characters; longer texts are tokenized in parts, which bounds memory and uses every core.
_SEGMENT = 1 << 20
_BOUNDARY = re.compile(r"[^\W_]\n")
# Characters; the time of the BPE trainer is quadratic in the length of a word.
_LONGEST_RUN = 1000
_BYTE = re.compile(r"<0x[0-9A-F]{2}>")  # a token of one byte, where others are of characters
_BYTE_LETTERS = frozenset(tokenizers.pre_tokenizers.ByteLevel.alphabet())  # each writes a byte
_ENDLESS = re.compile(rf"\S{{{_LONGEST_RUN},}}|\s{{{_LONGEST_RUN},}}")


class Tokenizer:
    """A `tokenizers.Tokenizer` with its end-of-text token. Ids are 0 .. vocab_size - 1."""

    def __init__(self, tokenizer: tokenizers.Tokenizer, eos: str):
        tokenizer.no_padding()
        tokenizer.no_truncation()
        tokenizer.encode_special_tokens = True
        eos_id = tokenizer.token_to_id(eos)
        if eos_id is None:
            raise ValueError(f"the tokenizer has no token '{eos}' to end a document with")
        self._tokenizer = tokenizer
        self.eos: str = eos
        self.eos_id: int = eos_id
        self.vocab_size: int = max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1
        self.bos_id: int | None = self._find_bos()
        self.begin: list[int] = [] if self.bos_id is None else [self.bos_id]  # of a document
        digest = hashlib.sha256(f"{tokenizer.to_str()} {eos}".encode())
        self.fingerprint: str = digest.hexdigest()[:32]
        parts = [self.encode(part) for part in ("a b", "\nc", "\n\nd")]
        self._can_split = self.encode("a b\nc\n\nd") == [token for ids in parts for token in ids]

    def encode(self, text: str) -> list[int]:
        """Token ids of `text` alone, without special tokens."""
        return [token for part in self._encode_parts(self._segments(text)) for token in part]

    def encode_prompt(self, text: str) -> list[int]:
        """Token ids of `text` at the beginning of a document: begin-of-text if the tokenizer has
        one, the text. Of no text without begin-of-text: the end-of-text of the document before it.
        """
        return [*self.begin, *self.encode(text)] or [self.eos_id]

    def decode(self, ids: Iterable[int], special: bool = True) -> str:
        """Text of token ids; `special`: that of special tokens too."""
        return self._tokenizer.decode([int(x) for x in ids], skip_special_tokens=not special)

    def encode_documents(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Token ids of uncut documents, (tokens,) int32 each: begin-of-text if the tokenizer has
        one, the text, end-of-text.
        """
        parts: list[str] = []
        ends = []
        for text in texts:
            parts += self._segments(text)
            ends.append(len(parts))
        encoded = self._encode_parts(parts)
        documents = []
        first = 0
        for end in ends:
            lists = (self.begin, *encoded[first:end], [self.eos_id])
            documents.append(np.concatenate([np.asarray(ids, np.int32) for ids in lists]))
            first = end
        return documents

    def encode_conversation(
        self, text: str, spans: Sequence[tuple[int, int]]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return token ids (tokens,) int32 of a rendered conversation, and which of them have text
        in one of `spans`, (tokens,) bool.

        `spans` are ascending and apart. Special tokens in the text count as such, and none is put
        before or after it.
        """
        self._tokenizer.encode_special_tokens = False
        try:
            with _failures_named():
                encoding = self._tokenizer.encode(text, add_special_tokens=False)
        finally:
            self._tokenizer.encode_special_tokens = True
        begins, ends = np.asarray(encoding.offsets, np.int64).reshape(-1, 2).T
        ends = np.maximum(ends, begins + 1)  # a token without text counts as its next character
        firsts, lasts = np.asarray(spans, np.int64).reshape(-1, 2).T
        # Spans that begin before the token's end, less those that end before it begins
        overlapping = np.searchsorted(firsts, ends) - np.searchsorted(lasts, begins, side="right")
        return np.asarray(encoding.ids, np.int32), overlapping > 0

    @property
    def shortest(self) -> int:
        """Tokens of the shortest document that has text, begin- and end-of-text among them."""
        return len(self.begin) + 2

    def n_bytes(self, token: int) -> int:
        """UTF-8 bytes of the text that a token stands for, which may be a part of a character; 0
        for begin- and end-of-text.
        """
        if token in (self.bos_id, self.eos_id):
            return 0
        text, written = self.decode([token]), self._tokenizer.id_to_token(token) or ""
        if "\ufffd" not in text:
            return len(text.encode())
        if _BYTE.fullmatch(written):
            return 1
        return len(written) if _BYTE_LETTERS.issuperset(written) else len(text.encode())

    def save(self, path: str | Path) -> None:
        """Write `path` (tokenizer.json) and, beside it, tokenizer_config.json that names the
        end-of-text token.
        """
        path = Path(path)
        settings: dict[str, str | None] = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": self.eos,
        }
        if self.bos_id is not None:
            settings["bos_token"] = self._tokenizer.id_to_token(self.bos_id)
        files.write_text(
            path.parent / "tokenizer_config.json", json.dumps(settings, indent=2) + "\n"
        )
        files.write_text(path, self._tokenizer.to_str(pretty=True))

    @classmethod
    def load(cls, path: str | Path) -> Tokenizer:
        """Read a tokenizer.json, or a folder that has one (a run, a Hugging Face model).

        Raises FileNotFoundError or ValueError with one line if there is none, it is broken, or no
        token ends a text.
        """
        place = Path(path).expanduser()
        file = place / "tokenizer.json" if place.is_dir() else place
        if not os.path.lexists(file):
            raise FileNotFoundError(
                f"tokenizer {path}: not there; "
                "give a tokenizer.json, or a Hugging Face folder that has one"
            )
        within = place if place.is_dir() else None
        text = untrusted.read_text(file, untrusted.TOKENIZER_SIZE, within)
        try:
            tokenizer = tokenizers.Tokenizer.from_str(text)
        except Exception as error:  # the library raises plain Exception
            raise ValueError(
                f"tokenizer {file}: does not describe a tokenizer ({error})"
            ) from error
        if dropout := getattr(tokenizer.model, "dropout", None):
            raise ValueError(
                f"tokenizer {file}: dropout={dropout} makes other tokens of the same text each "
                "time; set it to null"
            )
        eos = _find_eos(tokenizer, file)
        try:
            return cls(tokenizer, eos)
        except ValueError as error:
            raise ValueError(f"tokenizer {file}: {error}") from error

    def _find_bos(self) -> int | None:
        with _failures_named():
            plain = self._tokenizer.encode("a", add_special_tokens=False).ids
            full = self._tokenizer.encode("a", add_special_tokens=True).ids
        return full[0] if full != plain and full[1 : 1 + len(plain)] == plain else None

    def _encode_parts(self, parts: Sequence[str]) -> list[list[int]]:
        with _failures_named():
            encodings = self._tokenizer.encode_batch_fast(list(parts), add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    def _segments(self, text: str) -> list[str]:
        if len(text) <= _SEGMENT or not self._can_split:
            return [text]
        return list(segments(text, _SEGMENT))


@contextmanager
def _failures_named() -> Iterator[None]:
    """Raise ValueError where the library gives up on a text. It raises a plain Exception where a
    word is unknown and no token stands for such, and panics, which is no Exception, where a regular
    expression would take for ever.
    """
    try:
        yield
    except BaseException as error:
        if type(error) is not Exception and type(error).__name__ != "PanicException":
            raise
        reason = " ".join(str(error).split())[:200]
        raise ValueError(
            f"the tokenizer does not get through a text ({reason}); use another"
        ) from error


def segments(text: str, size: int) -> Iterator[str]:
    """Split `text` into parts of at least `size` characters without changing its tokens.

    Cuts lie between a letter or digit and a line break, which byte-level pre-tokenizers never join.
    """
    first = 0
    while len(text) - first > size and (boundary := _BOUNDARY.search(text, first + size)):
        yield text[first : boundary.start() + 1]
        first = boundary.start() + 1
    yield text[first:]


def train(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Train a byte-level BPE (GPT-2's pre-tokenizer) of at most `vocab_size` tokens, end-of-text
    included.
    """
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[EOS],
        initial_alphabet=sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(
        (part for text in texts for part in _without_endless_runs(text)), trainer
    )
    return Tokenizer(tokenizer, EOS)


def _without_endless_runs(text: str) -> Iterator[str]:
    """Split `text` where white space, or anything else, runs on for `_LONGEST_RUN` characters."""
    first = 0
    for run in _ENDLESS.finditer(text):
        for cut in range(run.start() + _LONGEST_RUN, run.end(), _LONGEST_RUN):
            yield text[first:cut]
            first = cut
    yield text[first:]


def _find_eos(tokenizer: tokenizers.Tokenizer, file: Path) -> str:
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        token = read_json(file.parent / name).get("eos_token")
        token = token.get("content") if isinstance(token, dict) else token
        if isinstance(token, str) and tokenizer.token_to_id(token) is not None:
            return token
    for name in ("config.json", "generation_config.json"):
        number = read_json(file.parent / name).get("eos_token_id")
        number = number[0] if isinstance(number, list) and number else number
        if isinstance(number, int) and (text := tokenizer.id_to_token(number)) is not None:
            return text
    for token in _KNOWN_EOS:
        if tokenizer.token_to_id(token) is not None:
            return token
    raise ValueError(
        f"{file}: no token that ends a text is known; "
        'put a tokenizer_config.json with "eos_token" beside it'
    )


def read_json(file: Path, most: int = untrusted.SETTINGS_SIZE) -> dict[str, Any]:
    """The object in a JSON file of at most `most` bytes, {} if there is no file; ValueError if it
    is no JSON, or lies elsewhere.
    """
    try:
        content = untrusted.read_json(file, most, within=file.parent)
    except FileNotFoundError:
        return {}
    return content if isinstance(content, dict) else {}
