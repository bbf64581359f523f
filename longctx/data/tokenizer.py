"""Text to token ids and back: a byte-level BPE trained here, or any tokenizer.json.

Hugging Face `tokenizers`, and the token that ends a document: tokenizer.json does not name it.
Text never turns into special tokens: a document that quotes `<|endoftext|>` does not end there.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path

import numpy as np
import tokenizers

from longctx import files, untrusted
from longctx.config.fields import refuse

# Unset, the library warns at every fork of a data worker.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")

EOS = "<|endoftext|>"
_KNOWN_EOS = (EOS, "</s>", "<|end_of_text|>", "<eos>", "<|im_end|>", "<|eot_id|>")
# Characters; longer texts are tokenized in parts, which bounds memory and uses every core.
_SEGMENT = 1 << 20
_BOUNDARY = re.compile(r"[^\W_]\n")
# Characters; the time of the BPE trainer is quadratic in the length of a word.
_LONGEST_RUN = 1000
_BYTE = re.compile(r"<0x[0-9A-F]{2}>")  # a token of one byte, if other tokens are of characters
_BYTE_LETTERS = frozenset(tokenizers.pre_tokenizers.ByteLevel.alphabet())  # each writes a byte
_ENDLESS = re.compile(rf"\S{{{_LONGEST_RUN},}}|\s{{{_LONGEST_RUN},}}")


class Tokenizer:
    """A `tokenizers.Tokenizer` with its end-of-text token. Ids are 0 .. vocab_size - 1."""

    def __init__(self, tokenizer: tokenizers.Tokenizer, eos: str):
        tokenizer.no_padding()
        tokenizer.no_truncation()
        # Else a document that quotes <|endoftext|> would end there.
        tokenizer.encode_special_tokens = True
        eos_id = tokenizer.token_to_id(eos)
        assert eos_id is not None
        self._tokenizer = tokenizer
        self.folder: Path | None = None  # with its settings and chat template
        self.eos: str = eos
        self.eos_id: int = eos_id
        self.vocab_size: int = max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1
        self.bos_id: int | None = self._find_bos()
        self.begin: list[int] = [] if self.bos_id is None else [self.bos_id]  # of a document
        digest = hashlib.sha256(f"{tokenizer.to_str()} {eos}".encode())
        self.fingerprint: str = digest.hexdigest()[:32]
        # A tokenizer that writes a mark at the start of a text (SentencePiece's ▁) would write one
        # at the start of each part, so its texts stay whole.
        parts = [self.encode(part) for part in ("a b", "\nc", "\n\nd")]
        self._can_split = self.encode("a b\nc\n\nd") == [token for ids in parts for token in ids]

    def encode(self, text: str) -> list[int]:
        """Return the token ids of `text` alone, without special tokens."""
        return [token for part in self._encode_parts(self._segments(text)) for token in part]

    def encode_prompt(self, text: str) -> list[int]:
        """Return the token ids of `text` at the beginning of a document, begin-of-text included.

        Without text and begin-of-text, this is the end-of-text of the document before.
        """
        return [*self.begin, *self.encode(text)] or [self.eos_id]

    def decode(self, ids: Iterable[int], special: bool = True) -> str:
        """Return the text of token ids; `special` includes that of special tokens."""
        return self._tokenizer.decode(list(map(int, ids)), skip_special_tokens=not special)

    def encode_documents(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return the token ids of uncut documents, (tokens,) int32 each.

        A document is begin-of-text (if the tokenizer has one), the text, end-of-text.
        """
        parts = [self._segments(text) for text in texts]
        # All at once, so that every core tokenizes.
        encoded = iter(self._encode_parts([part for of_text in parts for part in of_text]))
        documents = []
        for of_text in parts:
            lists = (self.begin, *islice(encoded, len(of_text)), [self.eos_id])
            documents.append(np.concatenate([np.asarray(ids, np.int32) for ids in lists]))
        return documents

    def encode_conversation(
        self, text: str, spans: Sequence[tuple[int, int]]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return token ids (tokens,) int32 of a rendered conversation, and a mark for each token
        with text in one of `spans`, (tokens,) bool.

        `spans` are ascending and apart. Special tokens in the text count as such, and none is put
        before or after it.
        """
        ids, begins, ends = self._encode_rendered(text)
        return ids, overlapping(begins, ends, spans)

    def encode_answer(
        self, text: str, spans: Sequence[tuple[int, int]]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Do as `encode_conversation` for plain text: begin-of-text, the text, and end-of-text,
        which is marked.
        """
        ids, begins, ends = self._encode_rendered(text, special=False)
        whole = np.concatenate([self.begin, ids, [self.eos_id]]).astype(np.int32)
        marked = overlapping(begins, ends, spans)
        return whole, np.concatenate([np.zeros(len(self.begin), bool), marked, [True]])

    def encode_question(self, text: str) -> list[int]:
        """Return the token ids of a rendered conversation that an answer is to follow."""
        # They are those in front of an answer in training: of white space at the end, the first
        # word of an answer may take a part into its token, and GPT-2's splits the rest differently.
        probe = "a" if text[-1:].isspace() else ""
        ids, _, ends = self._encode_rendered(text + probe)
        question: list[int] = ids[ends <= len(text)].tolist()
        return question

    def _encode_rendered(
        self, text: str, special: bool = True
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the ids of a text, and first and last + 1 character of each; `special` tokens in
        it count as such.
        """
        self._tokenizer.encode_special_tokens = not special
        try:
            with _encoding(text):
                encoding = self._tokenizer.encode(text, add_special_tokens=False)
        finally:
            self._tokenizer.encode_special_tokens = True
        begins, ends = np.asarray(encoding.offsets, np.int64).reshape(-1, 2).T
        ends = np.maximum(ends, begins + 1)  # a token without text counts as its next character
        return np.asarray(encoding.ids, np.int32), begins, ends

    @property
    def end_tokens(self) -> set[int]:
        """Return the tokens that end a text, as in transformers: end-of-text, and those in
        generation_config.json, or else config.json.
        """
        if self.folder is None:
            return {self.eos_id}
        paths = [self.folder / name for name in ("generation_config.json", "config.json")]
        settings = (untrusted.read_settings(path).get("eos_token_id") for path in paths)
        declared = next((ids for ids in settings if ids is not None), None)
        declared = declared if isinstance(declared, list) else [declared]
        return {self.eos_id, *(token for token in declared if type(token) is int)}

    @property
    def shortest(self) -> int:
        """Return the tokens of the shortest document with text, begin- and end-of-text included."""
        return len(self.begin) + 2

    def n_bytes(self, token: int) -> int:
        """Return the UTF-8 bytes of a token's text, 0 for begin- and end-of-text.

        The text may be a part of a character.
        """
        if token in (self.bos_id, self.eos_id):
            return 0
        text, written = self.decode([token]), self._tokenizer.id_to_token(token) or ""
        if "\ufffd" not in text:
            return len(text.encode())
        if _BYTE.fullmatch(written):
            return 1
        return len(written) if _BYTE_LETTERS.issuperset(written) else len(text.encode())

    def texts(self) -> dict[str, str]:
        """Return the text of tokenizer.json and of the tokenizer_config.json with its tokens."""
        settings: dict[str, str | None] = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": self.eos,
        }
        if self.bos_id is not None:
            settings["bos_token"] = self._tokenizer.id_to_token(self.bos_id)
        return {
            "tokenizer_config.json": json.dumps(settings, indent=2) + "\n",
            "tokenizer.json": self._tokenizer.to_str(pretty=True),
        }

    def save(self, path: str | Path) -> None:
        """Write `path` (tokenizer.json) and the tokenizer_config.json next to it."""
        settings, tokenizer = self.texts().values()
        files.write_text(Path(path).parent / "tokenizer_config.json", settings)
        files.write_text(Path(path), tokenizer)

    @classmethod
    def load(cls, path: str | Path, vocabulary: int | None = None) -> Tokenizer:
        """Read a tokenizer.json, or a folder that has one (a run, a Hugging Face model).

        Raises FileNotFoundError or ValueError if it is missing or broken, if no token ends a text,
        or if it has more tokens for texts than the `vocabulary` of a model.
        """
        tokenizer, file = _read(path)
        # The library raises plain Exception.
        with untrusted.named(f"tokenizer {file}", "cannot be used ({})", (Exception,)):
            # The same text would become other tokens each time.
            dropout = getattr(tokenizer.model, "dropout", None)
            refuse((dropout, "dropout is set; set it to null"))
            # Models may lack special tokens, which no text becomes, as Gemma 3's 1B lacks images
            tokens = max(tokenizer.get_vocab(with_added_tokens=False).values(), default=-1) + 1
            problem = f"it has {tokens} tokens and the model {vocabulary}; give the model's own"
            refuse((vocabulary is not None and tokens > vocabulary, problem))
            loaded = cls(tokenizer, _find_eos(tokenizer, file.parent))
        loaded.folder = file.parent
        return loaded

    def _find_bos(self) -> int | None:
        # tokenizer.json has no name for it: its post-processor puts it before a text.
        (plain,) = self._encode_parts(["a"])
        (full,) = self._encode_parts(["a"], special=True)
        return full[0] if full != plain and full[1 : 1 + len(plain)] == plain else None

    def _encode_parts(self, parts: Sequence[str], special: bool = False) -> list[list[int]]:
        with _encoding(*parts):
            encoded = self._tokenizer.encode_batch_fast(list(parts), add_special_tokens=special)
        return [encoding.ids for encoding in encoded]

    def _segments(self, text: str) -> list[str]:
        if len(text) <= _SEGMENT or not self._can_split:
            return [text]
        return list(segments(text, _SEGMENT))


@contextmanager
def _encoding(*texts: str) -> Iterator[None]:
    """Turn what the library raises about `texts` into one line."""
    # A shell and a terminal pass any bytes on
    with untrusted.named("text", "has characters that are not UTF-8", (UnicodeEncodeError,)):
        for text in texts:
            text.encode()
    failed = "the tokenizer does not get through a text"
    with untrusted.named(failed, "use another ({})", (Exception,)):
        yield


def _read(path: str | Path) -> tuple[tokenizers.Tokenizer, Path]:
    """Return a tokenizer and its file; raise as `Tokenizer.load`."""
    path = Path(path).expanduser()
    file = path / "tokenizer.json" if path.is_dir() else path
    within = path if path.is_dir() else None
    if not os.path.lexists(file):
        needs = "a tokenizer is a tokenizer.json, or a folder that has one"
        raise FileNotFoundError(f"{file}: no such file; {needs}")
    text = untrusted.read_text(file, untrusted.TOKENIZER_SIZE, within)
    with untrusted.named(f"tokenizer {file}", "cannot be used ({})", (Exception,)):
        return tokenizers.Tokenizer.from_str(text), file


def check_same_ids(tokenizer: str, trained: Path) -> None:
    """Raise ValueError if data.tokenizer=`tokenizer` gives other texts to ids than the tokenizer in
    the folder `trained`, if there is one. It may have more.
    """
    if not os.path.lexists(trained / "tokenizer.json"):
        return
    tables = [_read(path)[0].get_vocab(with_added_tokens=True) for path in (tokenizer, trained)]
    given, known = ({number: text for text, number in table.items()} for table in tables)
    different = sorted(number for number in given.keys() & known if given[number] != known[number])
    example = "".join(f"{n} is {given[n]!r}, there {known[n]!r}" for n in different[:1])
    problem = f"{len(different):,} ids have other texts than in {trained} ({example})"
    advice = "leave it out, or data.replace_tokenizer=true trains the weights on the other texts"
    refuse((different, f"data.tokenizer={tokenizer}: {problem}; {advice}"))


def overlapping(
    begins: np.ndarray, ends: np.ndarray, spans: Sequence[tuple[int, int]]
) -> np.ndarray:
    """Return True for each token, from a character to another, with text in one of `spans`."""
    firsts, lasts = np.asarray(spans, np.int64).reshape(-1, 2).T
    # Of the spans that begin before a token ends, some end before it begins; the rest overlap
    counts = np.searchsorted(firsts, ends) - np.searchsorted(lasts, begins, side="right")
    return np.asarray(counts > 0)


def segments(text: str, size: int) -> Iterator[str]:
    """Split `text` into parts of at least `size` characters without changing its tokens."""
    # Between a letter or digit and a line break, which byte-level pre-tokenizers never join
    first = 0
    while len(text) - first > size and (boundary := _BOUNDARY.search(text, first + size)):
        yield text[first : boundary.start() + 1]
        first = boundary.start() + 1
    yield text[first:]


def train(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Train a byte-level BPE (GPT-2's splits) of up to `vocab_size` tokens, with end-of-text."""
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
    """Split runs of white space, or of anything else, after `_LONGEST_RUN` characters."""
    first = 0
    for run in _ENDLESS.finditer(text):
        for cut in range(run.start() + _LONGEST_RUN, run.end(), _LONGEST_RUN):
            yield text[first:cut]
            first = cut
    yield text[first:]


def _find_eos(tokenizer: tokenizers.Tokenizer, folder: Path) -> str:
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        token = untrusted.read_settings(folder / name).get("eos_token")
        token = token.get("content") if isinstance(token, dict) else token
        if isinstance(token, str) and tokenizer.token_to_id(token) is not None:
            return token
    for name in ("config.json", "generation_config.json"):
        number = untrusted.read_settings(folder / name).get("eos_token_id")
        number = number[0] if isinstance(number, list) and number else number
        if isinstance(number, int) and (text := tokenizer.id_to_token(number)) is not None:
            return text
    known = [token for token in _KNOWN_EOS if tokenizer.token_to_id(token) is not None]
    advice = 'put a tokenizer_config.json with "eos_token" next to it'
    refuse((not known, f"no token that ends a text is known; {advice}"))
    return known[0]
