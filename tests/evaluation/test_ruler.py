"""RULER: texts of every task as long as asked and answerable, scores by its rules, answers greedy,
tables of them, mistakes in a line.
"""

import re
from collections import Counter
from collections.abc import Sequence
from random import Random
from typing import Any

import pytest

from longctx.config.eval_config import RULER_TASKS, RulerConfig
from longctx.data.tokenizer import Tokenizer
from longctx.evaluation.evaluate import answered
from longctx.evaluation.ruler import TASKS, Texts, essay_words, inserted, score, sentences
from longctx.evaluation.score import Scorer
from longctx.model import GPT, GPTConfig
from tests.evaluation.conftest import ESSAY

LENGTH = 3001
OUTPUTS = {"niah_multivalue": 4, "niah_multiquery": 4, "vt": 5, "cwe": 10, "fwe": 3}


def texts_of(tokenizer: Tokenizer, **keys: Any) -> Texts:
    return Texts(RulerConfig(**{"samples": 2, **keys}), tokenizer, ESSAY)


def solved(prompt: str) -> list[str]:
    """What answers the question at the end of a prompt, found in its text."""
    if match := re.search(r"\? The special magic \w+ for (.+) mentioned .* (is|are)$", prompt):
        keys = re.split(r", and |, ", match[1])
        return [x for key in keys for x in re.findall(rf"for {key} is: ([\w-]+)\.", prompt)]
    if match := re.search(r"assigned the value (\d+), they are:$", prompt):
        names = re.findall(rf"VAR (\w+) = {match[1]}", prompt)
        while successors := re.findall(rf"VAR (\w+) = VAR {names[-1]}\b", prompt):
            names += successors
        return names
    if prompt.endswith("in the list are:"):
        words = re.findall(r"\d+\. ([a-z-]+)", prompt.split("Memorize")[-1])
        return [word for word, _ in Counter(words).most_common(10)]
    if prompt.endswith("appeared words are:"):
        words = prompt.split("coded words. ")[1].split("\nQuestion")[0].split()
        return [word for word, _ in Counter(words).most_common(4)[1:]]
    raise AssertionError(prompt)


class Reader(Scorer):
    """A model that finds every answer, and says it in capitals."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__(GPT(GPTConfig(vocab_size=320, layers=1, channels=16, heads=2, ffn=16)))
        self.tokenizer = tokenizer

    def answers(
        self, prompts: Sequence[Sequence[int]], most: int, ends: Sequence[int], *more: Any
    ) -> list[list[int]]:
        shown = [" ".join(solved(self.tokenizer.decode(ids))) for ids in prompts]
        return [self.tokenizer.encode(f" {text.upper()}.") for text in shown]


@pytest.mark.parametrize("task", RULER_TASKS)
def test_texts_fill_their_length_and_can_be_answered(tokenizer, task):
    texts = texts_of(tokenizer, tasks=[task])
    room = LENGTH - TASKS[task].answer
    rows = list(texts.samples(task, LENGTH))
    for sample, ids in rows:
        assert 0.75 * room < len(ids) <= room
        assert tokenizer.decode(ids) == sample.prompt
        assert sorted(solved(sample.prompt)) == sorted(sample.outputs)
        assert len(set(sample.outputs)) == len(sample.outputs) == OUTPUTS.get(task, 1)
        needles = sample.prompt.count("One of the special magic")
        assert (needles > 4) == (task in ("niah_multikey_2", "niah_multikey_3"))
    assert rows[0][0] != rows[1][0]


def test_who_finds_everything_scores_1(tokenizer):
    texts = texts_of(tokenizer)
    scored = list(answered(Reader(tokenizer), texts, [2500, LENGTH], lambda texts: None))
    assert len(scored) == 2 * len(RULER_TASKS) * 2
    assert {row["score"] for row in scored} == {1.0}


def test_scores_are_those_of_lm_eval():
    pytest.importorskip("lm_eval", reason="needs lm-evaluation-harness")
    common = pytest.importorskip("lm_eval.tasks.ruler.common_utils")
    rng = Random(5)
    for _ in range(200):
        outputs = ["".join(rng.choices("aBc", k=2)) for _ in range(rng.randint(1, 5))]
        answer = "".join(rng.choices("abC \n\t\x01", k=12))
        theirs = common.string_match_all(common.postprocess_pred([answer]), [outputs])
        assert score(answer, outputs) == theirs


def test_essays_are_cut_into_sentences_wherever_there_are_some():
    assert sentences(essay_words("A dog.  A\ncat! End")) == ["A dog.", "A cat!", "End"]
    assert len(sentences(essay_words("x " * 100))) == 3
    unspaced = essay_words("数" * 100 + "。" + "字" * 5)
    assert "".join(unspaced).strip() == "数" * 100 + "。" + "字" * 5
    assert inserted(["a", "b"], [0, 2, 2], ["X", "Y", "Z"]) == ["X", "a", "b", "Y", "Z"]
