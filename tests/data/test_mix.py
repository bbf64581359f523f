"""Mixes: shares of rows as asked for, an order that resumes exactly on any number of ranks, and
mistakes named by key.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from longctx.data import DataConfig, Mixture, load
from longctx.data.rows import MixStream
from tests.data.conftest import prose

Make = Callable[..., DataConfig]


@pytest.fixture
def config(text_config: Make, corpus: Path) -> DataConfig:
    mix = {
        "long": {"path": str(corpus), "weight": 3, "documents": 12},
        "recall": {
            "source": "needles",
            "path": str(corpus),
            "documents": 9,
            "length": 600,
            "val_fraction": 0.0,
        },
    }
    return text_config(source="mix", path=None, mix=mix)


def interleaved(world_size: int, consumed: int, count: int) -> list[int]:
    streams = [
        iter(MixStream([5, 13], [1.0, 2.5], 9, rank, world_size, consumed))
        for rank in range(world_size)
    ]
    return [next(streams[sample % world_size]) for sample in range(count)]


@pytest.mark.parametrize("consumed", [0, 1, 30, 1000, 70_000])
@pytest.mark.parametrize("world_size", [1, 3, 8])
def test_resumed_equals_uninterrupted_also_on_other_ranks(consumed: int, world_size: int) -> None:
    uninterrupted = list(islice(MixStream([5, 13], [1.0, 2.5], 9), consumed + 120))
    assert interleaved(world_size, consumed, 120) == uninterrupted[consumed:]


def test_weights_are_shares_of_rows_and_every_source_shows_all_its_rows() -> None:
    rows = np.array(list(islice(MixStream([5, 13, 400], [1.0, 2.5, 6.5], 0), 20_000)))
    shares = np.bincount(np.searchsorted([5, 18], rows, side="right")) / len(rows)
    assert shares == pytest.approx([0.1, 0.25, 0.65], abs=0.01)
    of_first = rows[rows < 5]
    epochs = of_first[: len(of_first) // 5 * 5].reshape(-1, 5)
    assert all(sorted(epoch) == list(range(5)) for epoch in epochs)
    assert set(rows.tolist()) == set(range(418))
    assert list(islice(MixStream([5, 13, 400], [1.0, 2.5, 6.5], 1), 50)) != rows[:50].tolist()


def test_a_mix_is_its_sources_one_after_the_other(config: DataConfig) -> None:
    data = load(config, 64)
    assert isinstance(data, Mixture)
    long, recall = data.parts.values()
    assert data.tokenizer.fingerprint == long.tokenizer.fingerprint == recall.tokenizer.fingerprint
    assert len(data.train) == len(long.train) + len(recall.train)
    for row, part, inner in (
        (0, long, 0),
        (len(long.train), recall, 0),
        (len(data.train) - 1, recall, -1),
    ):
        inner = inner % len(part.train)
        for key, tensor in data.train[row].items():
            assert torch.equal(tensor, part.train[inner][key])
    with pytest.raises(IndexError):
        data.train[len(data.train)]
    names = [document.name.split("/")[0] for document in data.documents("train")]
    assert len(names) == len(data.split["train"]) == data.summary()["train_documents"]
    assert set(names) == {"long", "recall"}
    assert len(data.val) == len(long.val)
    summary = data.summary()
    assert summary["documents"] == sum(part["documents"] for part in summary["mix"].values())
    assert summary["mix"]["long"]["weight"] == 3
    assert 0 < summary["train_efficiency"] <= 1
    assert next(iter(data.order(1, 0, 1, 0))) in range(len(data.train))


def test_validation_documents_are_trained_on_in_no_source(
    text_config: Make, tmp_path: Path
) -> None:
    """Nearly the same documents in two sources, and a third that makes its own out of those of the
    first.
    """
    for name, ending in (("a", ""), ("b", " again")):
        (tmp_path / name).mkdir()
        for n in range(60):
            (tmp_path / name / f"{n}.txt").write_text(prose(200, n) + ending)
    (tmp_path / "b" / "own.txt").write_text(prose(200, 99))
    mix = {name: {"path": str(tmp_path / name)} for name in "ab"}
    mix["recall"] = {
        "source": "needles",
        "path": str(tmp_path / "a"),
        "documents": 20,
        "length": 4000,
        "val_fraction": 0,
    }
    data = load(text_config(source="mix", path=None, mix=mix), 64)
    texts = {
        split: {
            d.name: data.tokenizer.decode(d.ids[:-1]).removesuffix(" again")
            for d in data.documents(split)
        }
        for split in ("train", "val")
    }
    assert {name[0] for name in texts["val"]} == {"a", "b"}
    assert len(texts["val"]) > 10
    assert not set(texts["val"].values()) & set(texts["train"].values())
    generated = "\n".join(
        text for name, text in texts["train"].items() if name.startswith("recall/")
    )
    lines = {
        split: {line for text in of_split.values() for line in text.split("\n")}
        for split, of_split in texts.items()
    }
    assert any(line in generated for line in lines["train"])
    assert not any(line in generated for line in lines["val"])


def test_a_near_duplicate_of_what_is_always_trained_on_does_not_validate(
    text_config: Make, tmp_path: Path
) -> None:
    (tmp_path / "b").mkdir()
    for n in range(23):
        (tmp_path / "b" / f"{n}.txt").write_text(
            (tmp_path / "corpus" / f"{n:02}.txt").read_text() + " again"
        )
    (tmp_path / "b" / "own.txt").write_text(prose(300, 99))
    mix = {
        "a": {"path": str(tmp_path / "corpus")},
        "b": {"path": str(tmp_path / "b"), "val_fraction": 0},
    }
    validating = load(text_config(source="mix", path=None, mix=mix), 64).documents("val")
    assert all(len(document.ids) < 100 for document in validating), (
        "only such as one word makes another document"
    )


def test_fingerprint_covers_sources_and_weights(config: DataConfig) -> None:
    first = load(config, 64)
    assert load(config, 32).fingerprint == first.fingerprint
    other = {name: dict(keys) for name, keys in config.mix.items()}
    other["long"]["weight"] = 4
    tokenizer = str(config.cache_folder() / "tokenizers")
    assert load(replace(config, mix=other), 64).fingerprint != first.fingerprint
    assert Path(tokenizer).is_dir()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mix": {}}, "data.mix is not set"),
        ({"mix": {"a": 3}}, "data.mix.a=3: .*data.mix.a.path="),
        ({"mix": {"a": {"chat": "no"}}}, "data.mix.a.chat=no: .*true"),
        ({"mix": {"a": {"documents": "many"}}}, "data.mix.a.documents=many: .*number"),
        ({"mix": {"a": {"val_fraction": [0.1]}}}, "data.mix.a.val_fraction=.0.1.: .*number"),
        ({"mix": {"a": {"pth": "x"}}}, "data.mix.a.pth: .*path.*weight"),
        ({"mix": {"a": {"tokenizer": "x"}}}, "data.mix.a.tokenizer: "),
        ({"mix": {"a": {"weight": 0}}}, "data.mix.a.weight=0"),
        ({"mix": {"a": {"source": "text"}}}, "data.mix.a: data.path is not set"),
        ({"mix": {"a": {"source": "books"}}}, "data.mix.a: data.source=books: .*embedded"),
        ({"mix": {"a": {"source": "mix"}}}, "data.mix.a: data.source=mix: "),
        ({"mix": {"a": {"length": 900}}}, "data.mix.a.length=900: data=embedded .*data=needles"),
        ({"chat": True, "mix": {"a": {}}}, "data.*chat=true: "),
        ({"source": "embedded", "mix": {"a": {}}}, "data.mix=.*data=embedded .*data=mix"),
        ({"path": "x", "mix": {"a": {}}}, "data.path=x: data=mix "),
        ({"mix": {"a": {"path": "nowhere"}}}, "data.mix.a: data.path=nowhere: "),
    ],
)
def test_a_mistake_is_one_line(text_config: Make, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        load(text_config(**{"source": "mix", "path": None} | changes), 64)
    assert "\n" not in str(caught.value)
