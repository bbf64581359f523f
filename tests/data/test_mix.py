"""Mixes: their sources one after the other, no text on both sides, and mistakes named by key."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml

from longctx.data import DataConfig, Tokenizer, load
from tests.data.conftest import check_refused, prose
from tests.data.test_chat import TALK, chats
from tests.evaluation.test_load import with_begin

Make = Callable[..., DataConfig]


@pytest.fixture
def config(text_config: Make, corpus: Path, needles: object) -> DataConfig:
    recall = {"source": "needles", "path": str(corpus), "documents": 9, "length": 600}
    mix = {
        "long": {"path": str(corpus), "weight": 3, "documents": 12},
        "recall": recall | {"val_fraction": 0.0},
    }
    return text_config(source="mix", path=None, mix=mix)


def test_a_mix_is_its_sources_in_order(config):
    data = load(config, 64)
    long, recall = (part.sequences("train") for part in data.parts.values())
    assert len(data.train) == len(long) + len(recall)
    cases = ((0, long, 0), (len(long), recall, 0), (len(data.train) - 1, recall, len(recall) - 1))
    for row, part, inner in cases:
        assert all(torch.equal(x, part[inner][key]) for key, x in data.train[row].items())
    with pytest.raises(IndexError):
        data.train[len(data.train)]
    names = [document.name.split("/")[0] for document in data.documents("train")]
    summary = data.summary()
    assert len(names) == data.count("train") == summary["train_documents"]
    assert set(names) == {"long", "recall"}
    assert len(data.val) == len(data.parts["long"].sequences("val"))
    assert summary["documents"] == sum(part["documents"] for part in summary["mix"].values())
    assert summary["mix"]["long"]["weight"] == 3
    assert 0 < summary["train_efficiency"] <= 1
    assert next(iter(data.order(1, 0, 1, 0))) in range(len(data.train))
    # The fingerprint covers sources and weights
    assert load(config, 32).fingerprint == data.fingerprint
    other = config.mix | {"long": config.mix["long"] | {"weight": 4}}
    assert load(replace(config, mix=other), 64).fingerprint != data.fingerprint


def test_validation_is_trained_on_in_no_source(text_config, tmp_path, needles):
    """Two sources have the same documents; a third makes its own from those of the first."""
    for name in "ab":
        (tmp_path / name).mkdir()
        for number in range(60):
            (tmp_path / name / f"{number}.txt").write_text(prose(200, number))
    (tmp_path / "b" / "own.txt").write_text(prose(200, 99))
    mix = {name: {"path": str(tmp_path / name)} for name in "ab"}
    recall = {"source": "needles", "documents": 20, "length": 4000, "val_fraction": 0}
    data = load(text_config(source="mix", path=None, mix=mix | {"r": mix["a"] | recall}), 64)
    both = map(data.documents, ("train", "val"))
    train, val = ({x.name: data.tokenizer.decode(x.ids[:-1]) for x in each} for each in both)
    assert {name[0] for name in val} == {"a", "b"} and len(val) > 10
    assert not set(val.values()) & set(train.values())
    generated = "\n".join(text for name, text in train.items() if name[0] == "r")
    for texts, are_there in ((train, True), (val, False)):
        lines = {line for text in texts.values() for line in text.split("\n")}
        assert any(line in generated for line in lines) == are_there


@pytest.mark.parametrize("begins", [False, True])
def test_cut_prompts_fill_no_more_than_a_sequence(text_config, folder, begins):
    """Begin-of-text, the end of the prompt and the answer stay of each side."""
    if begins:
        with_begin(Tokenizer.load(folder)).save(folder / "tokenizer.json")
    rows = [{"prompt": "a rose " * 99, "chosen": f"{n}", "rejected": f"{n}!"} for n in range(9)]
    pairs = {"path": chats(folder, *rows).path}
    values = {"preferences": "pairs", "tokenizer": str(folder), "path": None}
    data = load(text_config(source="mix", mix={"a": pairs, "b": pairs}, **values), 64)
    summary = data.summary()
    assert summary["prompts_cut"] == 18
    assert summary["train_efficiency"] == summary["mix"]["a"]["train_efficiency"] <= 1
    begin, end = data.tokenizer.begin, data.tokenizer.eos_id
    for sequence in data.parts["a"].sequences("train"):
        row = rows[int(sequence["documents"])]
        for side, name in enumerate(("chosen", "rejected")):
            ids = sequence["tokens"][sequence["doc_ids"] == side].tolist()
            assert ids[: len(begin)] == begin and ids[-1] == end and len(ids) > 20
            text = data.tokenizer.decode(ids[len(begin) : -1])
            assert (row["prompt"] + row[name]).endswith(text)


def test_conversations_are_mixed_with_text(text_config, folder, corpus):
    talk = chats(folder, {"messages": TALK})
    text = {"path": str(corpus), "chat": False}
    mix = {"talk": {"path": talk.path}, "text": text, "code": text | {"documents": 3}}
    values = {"source": "mix", "path": None, "mix": mix, "tokenizer": str(folder)}
    data = load(text_config(**values, chat=True, turns="last", val_fraction=0), 64)
    scored = {document.name.split("/")[0]: document.scored for document in data.documents("train")}
    assert scored["text"] is scored["code"] is None
    assert 0 < scored["talk"].sum() < 10


MISTAKES = yaml.safe_load(Path(__file__).with_name("mixes.yaml").read_text())


@pytest.mark.parametrize(("message", "changes"), MISTAKES.items())
def test_a_mistake_is_one_line(text_config, changes, message):
    check_refused(text_config(**{"source": "mix", "path": None} | changes), message)
