"""The example plugin of generated facts."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from longctx.data import DataConfig
from longctx.data.sources.registry import open_corpus
from longctx.evaluation import passkey

QUESTION = re.compile(r"\? The (?:pass key|secret number of (\w+)) is (\d{5})\.\n")


@pytest.fixture
def config(needles, tmp_path: Path) -> DataConfig:
    lines = (f"line {n} of a long and dull text" for n in range(3000))
    (tmp_path / "a.txt").write_text("\n".join(lines))
    return DataConfig(source="needles", path=str(tmp_path / "a.txt"), documents=20, length=3000)


def test_every_question_is_answered_before(config, needles):
    documents = list(open_corpus(config).documents())
    assert len({document.text for document in documents}) == len(documents) == 20
    for text in (document.text for document in documents):
        assert 2000 < len(text) < 3300
        questions = list(QUESTION.finditer(text))
        assert len(questions) > 5
        for question in questions:
            city, _ = question.groups()
            fact = needles.NEEDLE_FACT if city else passkey.FACT
            fact = fact.format(*filter(None, question.groups()))
            assert 0 <= text.find(fact) < question.start()
        assert questions[-1][1] is None
        assert questions[-1].end() == len(text)


def test_facts_follow_from_their_number(config):
    documents = list(open_corpus(config).documents())
    assert documents == list(open_corpus(config).documents())
    assert list(open_corpus(replace(config, documents=7)).documents()) == documents[:7]
    assert open_corpus(config).identity != open_corpus(replace(config, length=4000)).identity
