"""RULER, and tasks like GraphWalks, MRCR and OOLONG: texts of every task as long as asked and
answerable, scores by the rules of each.
"""

import re
from collections import Counter
from collections.abc import Sequence
from random import Random
from typing import Any

import pytest

from longctx.config.eval_config import MORE_TASKS, RULER_TASKS, RulerConfig
from longctx.data.chat import Template
from longctx.data.tokenizer import Tokenizer
from longctx.evaluation.evaluate import answered
from longctx.evaluation.ruler import TASKS, Texts, contained, essay_words, inserted, sentences
from longctx.evaluation.score import Scorer
from longctx.model import GPT, GPTConfig
from tests.data.chat_templates import CHATML, write_tokenizer
from tests.data.chat_templates import write as write_template
from tests.evaluation.conftest import ESSAY

LENGTH = 3001
OUTPUTS = {"niah_multivalue": 4, "niah_multiquery": 4, "vt": 5, "cwe": 10, "fwe": 3, "mrcr": 2}
ALL_TASKS = [*RULER_TASKS, *MORE_TASKS]


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
    if match := re.search(
        r"Operation: .* node (\w+)(?: with depth (\d))?\.\nFinal Answer:$", prompt
    ):
        return walked(prompt.split("these edges:\n")[-1], match[1], int(match[2] or 0))
    if match := re.search(r"User: Prepend (\w+) to the (\d)\w\w (.*)\. Do not", prompt):
        answers = re.findall(rf"User: Write a {match[3]}\.\nAssistant: (.*)", prompt)
        assert len(answers) == 4
        return [match[1], answers[int(match[2]) - 1]]
    count = Counter(re.findall(r"\|\| Label: (\w+)$", prompt, re.MULTILINE))
    if match := re.search(r"have the label '(\w+)'\? Answer:$", prompt):
        return [str(count[match[1]])]
    if match := re.search(r"as the label '(\w+)'\? Answer: The label '(\w+)' is$", prompt):
        more = count[match[2]] - count[match[1]]
        return ["as common as" if not more else f"{'more' if more > 0 else 'less'} common than"]
    raise AssertionError(prompt)


def walked(text: str, node: str, depth: int) -> list[str]:
    """The nodes whose shortest path from `node` has `depth` edges; 0: those with an edge to it."""
    edges = re.findall(r"^(\w+) -> (\w+)$", text, re.MULTILINE)
    distance = {node: 0}
    for here in (order := [node]):
        for there in [b if depth else a for a, b in edges if (a if depth else b) == here]:
            if there not in distance:
                distance[there] = distance[here] + 1
                order.append(there)
    return [name for name, steps in distance.items() if steps == max(1, depth)]


class Reader(Scorer):
    """A model that finds every answer, and says it in capitals if that may not matter."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__(GPT(GPTConfig(vocab_size=320, layers=1, channels=16, heads=2, ffn=16)))
        self.tokenizer = tokenizer

    def answers(
        self, prompts: Sequence[Sequence[int]], most: int, ends: Sequence[int], *more: Any
    ) -> list[list[int]]:
        texts = [self.tokenizer.decode(ids) for ids in prompts]
        shown = [(" ".join(solved(text)), "User:" in text) for text in texts]
        said = [text if is_exact else f"{text.upper()}." for text, is_exact in shown]
        return [self.tokenizer.encode(f" {text}") for text in said]


@pytest.mark.parametrize("task", ALL_TASKS)
def test_texts_fill_their_length_and_can_be_answered(tokenizer, task):
    texts = texts_of(tokenizer, tasks=[task])
    room = LENGTH - TASKS[task].answer
    rows = list(texts.samples(task, LENGTH))
    for sample, ids in rows:
        assert 0.75 * room < len(ids) <= room
        assert tokenizer.decode(ids) == sample.prompt
        assert sorted(solved(sample.prompt)) == sorted(sample.outputs)
        assert len(set(sample.outputs)) == len(sample.outputs) > 0
        assert task == "graphwalks" or len(sample.outputs) == OUTPUTS.get(task, 1)
        needles = sample.prompt.count("One of the special magic")
        assert (needles > 4) == (task in ("niah_multikey_2", "niah_multikey_3"))
    assert rows[0][0] != rows[1][0]


def test_who_finds_everything_scores_1(tokenizer):
    assert texts_of(tokenizer).config.chosen == RULER_TASKS
    texts = texts_of(tokenizer, tasks=ALL_TASKS)
    scored = list(answered(Reader(tokenizer), texts, [2500, LENGTH], lambda texts: None))
    assert len(scored) == 2 * len(ALL_TASKS) * 2
    assert {row["score"] for row in scored} == {1.0}


def test_a_chat_template_writes_the_prompts_of_a_user(tmp_path):
    write_tokenizer(tmp_path)
    write_template(tmp_path, CHATML)
    tokenizer, template = Tokenizer.load(tmp_path), Template(tmp_path)
    essay = f"{ESSAY} A turn ends by <|im_end|> in this template. " * 3
    texts = Texts(RulerConfig(samples=2), tokenizer, essay, template)
    for task in ("niah_single_2", "oolong"):
        room = LENGTH - TASKS[task].answer
        for sample, ids in texts.samples(task, LENGTH):
            row = {"messages": [{"role": "user", "content": sample.prompt}]}
            assert tokenizer.decode(ids) == template.prompt("", row)[0]
            assert 0.75 * room < len(ids) <= room
            assert sorted(solved(sample.prompt)) == sorted(sample.outputs)


TEXT = "a rose is a rose"
SCORED = [
    ("graphwalks", " [a1, b2]\n", ["a1", "b2"], 1),
    ("graphwalks", "Final Answer: [B2, c3] [a1]", ["a1", "b2"], 0.5),
    ("graphwalks", " [a1]", ["a1", "b2", "c3"], 0.5),
    ("graphwalks", "", ["a1"], 0),
    ("mrcr", f" x9{TEXT}\nUser: more", ["x9", TEXT], 1),
    ("mrcr", f"x9 {TEXT[:8]}", ["x9", TEXT], 2 * 8 / (8 + 16)),
    ("mrcr", f"Here: x9 {TEXT}", ["x9", TEXT], 0),
    ("mrcr", TEXT, ["x9", TEXT], 0),
    ("oolong", " 1,234 lines, not 7", ["1234"], 1),
    ("oolong", " 12.", ["14"], 0.75**2),
    ("oolong", f" {'9' * 4000}", ["14"], 0),
    ("oolong", " many", ["14"], 0),
    ("oolong", " More common than", ["more common than"], 1),
    ("oolong", "It is **as common**.", ["as common as"], 1),
    ("oolong", "'fox' is less common than", ["more common than"], 0),
    ("oolong", " not more common than", ["more common than"], 0),
]


@pytest.mark.parametrize(("task", "answer", "outputs", "expected"), SCORED)
def test_scores_follow_the_rules_of_each_task(task, answer, outputs, expected):
    assert TASKS[task].score(answer, outputs) == pytest.approx(expected)


def test_questions_of_all_kinds_are_asked(tokenizer):
    texts = texts_of(tokenizer, samples=12)
    prompts = [sample.prompt for task in MORE_TASKS for sample, _ in texts.samples(task, LENGTH)]
    questions = "".join(prompt[-200:] for prompt in prompts)
    for words in ("depth 1", "depth 2", "depth 3", "parents of node", "to the 1st", "to the 4th"):
        assert words in questions
    assert "How many of these lines" in questions and "more common than, less" in questions


def test_scores_are_those_of_lm_eval():
    pytest.importorskip("lm_eval", reason="needs lm-evaluation-harness")
    common = pytest.importorskip("lm_eval.tasks.ruler.common_utils")
    rng = Random(5)
    for _ in range(200):
        outputs = ["".join(rng.choices("aBc", k=2)) for _ in range(rng.randint(1, 5))]
        answer = "".join(rng.choices("abC \n\t\x01", k=12))
        theirs = common.string_match_all(common.postprocess_pred([answer]), [outputs])
        assert contained(answer, outputs) == theirs


def test_essays_are_cut_into_sentences_wherever_there_are_some():
    assert sentences(essay_words("A dog.  A\ncat! End")) == ["A dog.", "A cat!", "End"]
    assert len(sentences(essay_words("x " * 100))) == 3
    unspaced = essay_words("数" * 100 + "。" + "字" * 5)
    assert "".join(unspaced).strip() == "数" * 100 + "。" + "字" * 5
    assert inserted(["a", "b"], [0, 2, 2], ["X", "Y", "Z"]) == ["X", "a", "b", "Y", "Z"]
