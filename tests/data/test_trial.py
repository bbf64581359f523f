"""Tokenizers that would never end or fill the memory are refused in one line."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import pytest

from longctx.data.tokenizer import Tokenizer, train


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a harmless tokenizer."""
    train(["some words to learn from"], 300).save(tmp_path / "tokenizer.json")
    return tmp_path


@pytest.mark.parametrize("letter", ["a", "\u4e00"])
def test_doubling_normalizers_are_refused(folder: Path, letter: str) -> None:
    doubling = {"type": "Replace", "pattern": {"String": letter}, "content": letter * 2}
    content = json.loads((folder / "tokenizer.json").read_text())
    content["normalizer"] = {"type": "Sequence", "normalizers": [doubling] * 30}
    (folder / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"tokenizer\.json: this tokenizer .*; use another") as e:
        Tokenizer.load(folder)
    assert "\n" not in str(e.value)


@pytest.mark.parametrize("content", ["[" * 10**6, '{"model":' * 10**5, "\x00", "{}", "7"])
def test_an_odd_tokenizer_is_one_line(folder: Path, content: str) -> None:
    (folder / "tokenizer.json").write_text(content)
    with pytest.raises(ValueError, match=r"tokenizer\.json") as error:
        Tokenizer.load(folder)
    assert "\n" not in str(error.value)


def charsmap(replacement: str) -> str:
    """The table of a Precompiled normalizer, empty but for one replacement."""
    return base64.b64encode(bytes(4) + replacement.encode() + b"\0").decode()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"normalizer": {"type": "Precompiled", "precompiled_charsmap": charsmap("x" * 99)}}, "24"),
        (
            {
                "model": {
                    "type": "WordPiece",
                    "unk_token": "?",
                    "continuing_subword_prefix": "##",
                    "max_input_chars_per_word": 10**9,
                    "vocab": {"?": 0, "<|endoftext|>": 1},
                },
                "added_tokens": [],
            },
            "10,000",
        ),
    ],
    ids=["a table of SentencePiece", "words without end"],
)
def test_what_explodes_on_some_documents_only_is_refused(
    folder: Path, changes: dict[str, object], reason: str
) -> None:
    content = json.loads((folder / "tokenizer.json").read_text())
    (folder / "tokenizer.json").write_text(json.dumps(content | changes))
    with pytest.raises(ValueError, match=rf"tokenizer\.json: this tokenizer .*{reason}"):
        Tokenizer.load(folder)


def test_a_regular_expression_without_end_is_one_line_with_the_text_that_shows_it(
    folder: Path,
) -> None:
    content = json.loads((folder / "tokenizer.json").read_text())
    pattern = {"Regex": "(\u0436|\u0436\u0436)+\u044f"}
    content["normalizer"] = {"type": "Replace", "pattern": pattern, "content": "x"}
    (folder / "tokenizer.json").write_text(json.dumps(content))
    tokenizer = Tokenizer.load(folder)
    assert tokenizer.decode(tokenizer.encode("harmless")) == "harmless"
    with pytest.raises(ValueError, match="the tokenizer does not get through a text") as error:
        tokenizer.encode_documents(["\u0436" * 1000])
    assert "\n" not in str(error.value)
