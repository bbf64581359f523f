"""The embedded corpus: both libraries, in one order, and read without torch."""

from __future__ import annotations

import os
import sysconfig
from pathlib import Path

import pytest

from longctx.data import DataConfig, load
from longctx.data.sources import open_corpus


def test_embedded_holds_both_libraries_without_the_skipped_folders() -> None:
    corpus = open_corpus(DataConfig())
    names = [shard.name for shard in corpus.shards]
    assert names == [shard.name for shard in open_corpus(DataConfig()).shards]
    assert {name.split("/")[0] for name in names} == {"stdlib", "torch"}
    assert "torch/nn/functional.py" in names
    left_out = {"site-packages", "test", "tests", "encodings", "_vendor"}
    assert not [name for name in names if left_out & set(name.split("/"))]
    assert corpus.total == len(names) == len(set(names))


def test_a_sample_is_spread_over_the_corpus_and_always_the_same() -> None:
    corpus = open_corpus(DataConfig())
    texts = list(corpus.sample(300_000))
    assert texts == list(corpus.sample(300_000))
    assert 250_000 < sum(map(len, texts)) <= 300_000
    assert len(texts) >= 8


def test_a_few_of_its_documents_become_rows(tmp_path) -> None:
    data = load(
        DataConfig(documents=12, vocab_size=600, val_fraction=0.2, cache=str(tmp_path)), 512
    )
    assert data.summary()["documents"] == 12
    assert len(data.train) > 10
    assert next(iter(data.documents("val"))).name.startswith("stdlib/")


def test_a_file_changed_at_the_same_size_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither size nor time tells: an image of a machine may have replaced both."""
    library = tmp_path / "stdlib"
    library.mkdir()
    monkeypatch.setattr(sysconfig, "get_path", lambda _: str(library))
    monkeypatch.setattr("longctx.data.sources.embedded.find_spec", lambda _: None)
    for number in range(4):
        (library / f"{number}.py").write_text(f"value = {number}\n" * 200)
    config = DataConfig(vocab_size=300, val_fraction=0.3, cache=str(tmp_path / "cache"))
    before, identity = load(config, 64), open_corpus(config).identity
    file = library / "2.py"
    status = file.stat()
    for value, is_equal in ((7, False), (2, True)):
        file.write_text(f"value = {value}\n" * 200)
        os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
        assert file.stat().st_size == status.st_size
        assert (load(config, 64).fingerprint == before.fingerprint) is is_equal
        assert (open_corpus(config).identity == identity) is is_equal
