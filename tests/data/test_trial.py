"""Tokenizers that would never end or fill the memory are refused in one line."""

from __future__ import annotations

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
