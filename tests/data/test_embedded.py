"""The embedded corpus: both libraries, in one order, and read without torch."""

from __future__ import annotations

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
