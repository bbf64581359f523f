"""The example plugin of questions: each answer is in the text, and answers alone are learned."""

import json
import random
import re
from collections import Counter
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest

from longctx.data import load
from longctx.data.sources.registry import open_corpus
from longctx.evaluation.load import of_source
from tests.data.conftest import check_refused, example, prose

NEEDLE = re.compile(r"special magic numbers for (\S+) is: (\d+)\.")
VARIABLE = re.compile(r"VAR (\w+) = (?:VAR )?(\w+)")
ROAD = re.compile(r"The road from (\S+) leads to (\S+)\.")
NOTE = re.compile(r"Note on (\S+): (.*)")


@pytest.fixture
def config(text_config, corpus, questions):
    (corpus / "long.txt").write_text(prose(4000, 77))
    return text_config(source="questions", length=6000)


def expected(text: str, question: str) -> str:
    """Find the answer in the text, by another way than the plugin made it."""
    if match := re.search(r"How many .* for (\S+) are mentioned", question):
        return str(sum(key == match[1] for key, _ in NEEDLE.findall(text)))
    if match := re.search(r"numbers for (\S+) mentioned in the provided text are$", question):
        return ", ".join(value for key, value in NEEDLE.findall(text) if key == match[1])
    if match := re.search(r"assigned the value (\d+) in", question):
        parents = dict(VARIABLE.findall(text))
        roots = {name: name for name in parents}
        for name in roots:
            while roots[name] in parents:
                roots[name] = parents[roots[name]]
        return " ".join(name for name in parents if roots[name] == match[1])
    if match := re.search(r"from (\S+) for (\d) steps", question):
        roads = ROAD.findall(text)
        names = sorted({name for road in roads for name in road})
        step = np.zeros((len(names), len(names)), bool)
        for here, there in roads:
            step[names.index(here), names.index(there)] = True
        ends = np.linalg.matrix_power(step.astype(object), int(match[2]))[names.index(match[1])]
        return ", ".join(name for name, count in zip(names, ends, strict=True) if count)
    match = re.search(r"Repeat note (\d+) on (\S+),", question)
    return [line for key, line in NOTE.findall(text) if key == match[2]][int(match[1]) - 1]


def test_each_answer_is_in_the_text(config, questions):
    kinds = Counter()
    for document in open_corpus(config).documents():
        context = document.text[: document.spans[0][0]]
        before = 0
        for first, end in document.spans:
            question = document.text[before:first]
            assert document.text[first:end] == f" {expected(context, question)}"
            kinds[re.search(r"How many|mentioned|value|steps|Repeat", question)[0]] += 1
            before = end
        assert before == len(document.text)
    assert len(kinds) == 5


def test_answers_alone_are_targets(config):
    data, documents = load(config, 256), list(open_corpus(config).documents())
    asked = {document.name: document for document in documents}
    for document in data.documents("train"):
        made = asked[document.name]
        answers = [made.text[first:end].strip() for first, end in made.spans]
        learned = data.tokenizer.decode(document.ids[document.scored][:-1])
        assert re.fullmatch(".?.?".join(map(re.escape, answers)), learned.strip(), re.DOTALL)
        assert document.scored[-1] and document.ids[-1] == data.tokenizer.eos_id
    evaluated = list(of_source(config, data.tokenizer))
    assert [document.name for document in evaluated] == list(asked)
    documents = [x for split in ("train", "val") for x in data.documents(split)]
    assert sum(x.targets for x in evaluated) == sum(x.targets for x in documents)


def test_a_document_and_its_questions_are_on_one_side(config, corpus):
    text = {"path": str(corpus)}
    mix = {"asked": text | {"source": "questions", "length": 500}, "text": text}
    config.source, config.path, config.mix = "mix", None, mix
    data = load(config, 64)
    found = (data.documents("train"), data.documents("val"))
    train, val = ({x.name.split("/")[1].split(":")[0] for x in documents} for documents in found)
    assert not train & val and min(len(train), len(val)) > 2


def test_docstrings_are_on_the_side_of_their_file(text_config, tmp_path):
    for n in range(40):
        (tmp_path / f"{n}.py").write_text(
            f'"""File."""\nif x:\n    class C:\n        r"""\\d {n}."""\n'
        )
    mix = {x: {"source": x, "path": f"{tmp_path}/*.py"} for x in ("docstrings", "text")}
    with contextmanager(example)("docstrings"):
        data = load(text_config(source="mix", path=None, mix=mix), 64)
        (tmp_path / "9.py").write_text("-" * 10**5)
        check_refused(text_config(**mix["docstrings"]), r"9\.py: no Python file")
    train, val = ({x.name for x in data.documents(split)} for split in ("train", "val"))
    files = [{name.partition("/")[2] for name in names} for names in (train, val)]
    assert len(train | val) == 80 and not files[0] & files[1]
    texts = [data.tokenizer.decode(x.ids[:-1]) for x in data.parts["docstrings"].documents("val")]
    assert texts and all(re.fullmatch(r"File\.\n\n\\d \d+\.", text) for text in texts)


def test_each_part_of_a_document_has_its_gain(config, tmp_path):
    config.length, file = 500, tmp_path / "gains.jsonl"
    parts = [x for x in load(config, 64).documents("train") if x.name.startswith("long.txt")]
    every = list(of_source(config, load(config, 64).tokenizer))
    assert {x.key for x in parts} <= {x.key for x in every} and len(parts) > 9
    rows = ({"key": x.key.hex(), "gain": x.name == parts[4].name} for x in every)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = load(replace(config, filter=str(file), keep=1 / len(every), val_fraction=0), 64)
    assert [x.name for x in data.documents("train")] == [parts[4].name]


def test_questions_follow_from_the_text_alone(config, corpus, questions):
    first = {x.name: x.text for x in open_corpus(config).documents()}
    (corpus / "00.txt").unlink()
    random.seed(1)
    again = {x.name: x.text for x in open_corpus(config).documents()}
    assert again == {name: text for name, text in first.items() if not name.startswith("00.txt")}
