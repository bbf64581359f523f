"""The door for sources: one class, registered, is read, split, packed, mixed and checked like those
that come with longctx.
"""

from __future__ import annotations

from collections.abc import Iterator, Set
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from longctx.data import DataConfig, load
from longctx.data.sources import (
    SOURCES,
    Corpus,
    Document,
    Shard,
    Source,
    check,
    check_overrides,
    pinned,
    read_documents,
    register,
)
from tests.data.conftest import prose


class Counting(Source):
    """`length` documents of prose."""

    keys = frozenset({"length"})

    def check(self, config: DataConfig) -> None:
        if config.length % 2:
            raise ValueError(f"data.length={config.length}: odd; give an even number")

    def open(self, config: DataConfig, without: Set[bytes]) -> Corpus:
        def read() -> Iterator[Document]:
            for number in range(config.length // 32):
                yield Document(f"counting:{number}", prose(20 + number, 500 + number))

        return Corpus(["counting", config.length], [Shard("counting", read)], None)


@pytest.fixture
def counting(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> DataConfig:
    monkeypatch.setitem(SOURCES, "counting", Counting())  # so that it is gone afterwards
    register("counting")(Counting)
    return DataConfig(
        source="counting", length=512, vocab_size=400, val_fraction=0.2, cache=str(tmp_path / "c")
    )


def test_a_registered_source_becomes_rows(counting: DataConfig) -> None:
    data = load(counting, 32)
    assert data.summary()["documents"] == len(list(read_documents(counting))) == 16
    assert len(data.val) > 0
    rows = [data.train[row]["tokens"] for row in range(len(data.train))]
    texts = {document.name: document.text for document in read_documents(counting)}
    for document in data.documents("train"):
        assert data.tokenizer.decode(document.ids[:-1]) == texts[document.name]
    assert len(torch.cat(rows)) >= data.summary()["train_tokens"]
    assert load(counting, 32).fingerprint == data.fingerprint
    assert load(replace(counting, length=544), 32).fingerprint != data.fingerprint


def test_a_registered_source_is_mixed_with_others(counting: DataConfig, corpus: Path) -> None:
    mix = {"own": {"source": "counting", "length": 640}, "files": {"path": str(corpus)}}
    data = load(replace(counting, source="mix", length=8192, mix=mix), 32)
    names = {document.name.partition("/")[0] for document in data.documents("train")}
    assert names == {"own", "files"}
    assert data.summary()["mix"]["own"]["documents"] == 20


def test_a_registered_source_checks_its_own_keys(counting: DataConfig) -> None:
    with pytest.raises(ValueError, match=r"data\.length=513: "):
        load(replace(counting, length=513), 32)
    with pytest.raises(ValueError, match=r"data\.path=docs: data=counting "):
        check(replace(counting, path="docs"))
    check_overrides(counting, {"data.length": "512", "data.vocab_size": "400"})
    for key in ("errors", "text_column", "split", "revision", "name", "files", "chat"):
        with pytest.raises(ValueError, match=rf"data\.{key}=x: data=counting "):
            check_overrides(counting, {f"data.{key}": "x"})


def test_an_unknown_source_is_named_with_those_that_exist() -> None:
    with pytest.raises(ValueError, match=r"data\.source=books: .*embedded.*text") as caught:
        check(DataConfig(source="books"))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("config", "key", "reason"),
    [
        (DataConfig(source="text", path="a.jsonl", chat=True), "text_column", "data.chat=true"),
        (DataConfig(source="hub", path="a/b", chat=True), "text_column", "data.chat=true"),
        (DataConfig(source="needles"), "errors", "data.path"),
        (DataConfig(source="mix", mix={"a": {"source": "needles"}}), "errors", "mix"),
    ],
)
def test_an_override_without_effect_is_refused(config: DataConfig, key: str, reason: str) -> None:
    check(config)
    with pytest.raises(ValueError, match=rf"data\.{key}=x: .*{reason}"):
        check_overrides(config, {f"data.{key}": "x"})


def test_absolute_paths_are_those_of_the_sources_that_read_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    here = str(tmp_path)
    assert pinned(DataConfig(source="text", path="a")).path == f"{here}/a"
    assert pinned(DataConfig(source="needles", path=["a", "b"])).path == [
        f"{here}/a",
        f"{here}/b",
    ]
    on_the_hub = DataConfig(source="hub", path="a/b", revision="c" * 40)
    assert pinned(on_the_hub) == on_the_hub
    assert pinned(DataConfig(cache="c", tokenizer="t")).cache == f"{here}/c"
    members = {
        "x": {"path": "a", "weight": 2},
        "y": {"source": "hub", "path": "a/b", "revision": "c" * 40},
    }
    mix = pinned(DataConfig(source="mix", mix=members)).mix
    assert mix == {"x": {"path": f"{here}/a", "weight": 2}, "y": members["y"]}
