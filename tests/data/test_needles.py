"""Generated facts: answered by their text, told before they are asked for, the same every time,
none shared with measuring.
"""

import random
import re
from dataclasses import replace
from pathlib import Path

import pytest

from longctx.config.data_config import DataConfig
from longctx.config.eval_config import KINDS
from longctx.data.sources import needles as facts
from longctx.data.sources import open_corpus

QUESTION = re.compile(r"\? The (?:pass key|secret number of (\w+)) is (\d{5})\.\n")


@pytest.fixture
def config(tmp_path: Path) -> DataConfig:
    (tmp_path / "a.txt").write_text(
        "\n".join(f"line {n} of a long and dull text" for n in range(3000))
    )
    return DataConfig(source="needles", path=str(tmp_path / "a.txt"), documents=20, length=3000)


def test_every_question_of_a_document_is_answered_by_what_stands_before_it(
    config: DataConfig,
) -> None:
    documents = list(open_corpus(config).documents())
    assert len({document.text for document in documents}) == len(documents) == 20
    for _, text in documents:
        assert 2000 < len(text) < 3300
        questions = list(QUESTION.finditer(text))
        assert len(questions) > 5
        for question in questions:
            city, answer = question.groups()
            fact = text.find(
                facts.needle_fact(city, answer) if city else facts.passkey_fact(answer)
            )
            assert 0 <= fact < question.start()
        assert questions[-1][1] is None
        assert questions[-1].end() == len(text)


def test_documents_follow_from_their_number(config: DataConfig) -> None:
    documents = list(open_corpus(config).documents())
    assert documents == list(open_corpus(config).documents())
    assert list(open_corpus(replace(config, documents=7)).documents()) == documents[:7]
    assert open_corpus(config).identity != open_corpus(replace(config, length=4000)).identity


@pytest.mark.parametrize("kind", KINDS)
def test_a_task_has_one_answer(kind: str) -> None:
    for n in range(50):
        task = facts.task(kind, random.Random(n))
        assert task.answer.strip() in task.fact
        assert len(task.others) == (facts.DISTRACTORS if kind == "needle" else 0)
        assert not any(task.answer.strip() in other or other == task.fact for other in task.others)


def test_the_embedded_documents_are_the_default_filler(
    config: DataConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("longctx.data.sources.needles.MOST_FILLER", 1 << 20)
    [document] = open_corpus(replace(config, path=None, documents=1)).documents()
    assert "The pass key is" in document.text
