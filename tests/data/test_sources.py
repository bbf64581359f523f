"""The sources beside files: the door that a user's own goes through, the embedded corpus, and the
checks that all of them share.
"""

import os
import re
import sysconfig
from collections import Counter
from collections.abc import Iterator, Set
from dataclasses import replace
from pathlib import Path

import pytest

from longctx.data import DataConfig, load
from longctx.data.sources import SOURCES, Corpus, Document, Shard, Source, register
from longctx.data.sources.registry import check, open_corpus, pinned, read_documents
from longctx.evaluation import passkey
from tests.data.conftest import check_refused, prose


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

        return Corpus(["counting", config.length], [Shard("counting", read)])


@pytest.fixture
def counting(tmp_path: Path) -> Iterator[DataConfig]:
    register("counting")(Counting)
    cache = str(tmp_path / "c")
    yield DataConfig("counting", length=512, vocab_size=400, val_fraction=0.2, cache=cache)
    SOURCES.remove("counting")


def test_a_registered_source_becomes_sequences(counting, monkeypatch):
    data = load(counting, 32)
    texts = {document.name: document.text for document in read_documents(counting)}
    assert data.summary()["documents"] == len(texts) == 16
    assert len(data.val) > 0
    for document in data.documents("train"):
        assert data.tokenizer.decode(document.ids[:-1]) == texts[document.name]
    assert load(counting, 32).fingerprint == data.fingerprint
    assert load(replace(counting, length=544), 32).fingerprint != data.fingerprint
    # Its file is edited: it reads other texts under the same identity
    monkeypatch.setattr(Counting, "__module__", "my_source_0123456789ab")
    monkeypatch.setitem(globals(), "prose", lambda *_: "other words " * 99)
    assert load(counting, 32).fingerprint != data.fingerprint


@pytest.mark.parametrize(("text", "message"), [(b"a", "bytes; give a str"), ("\ud800", "replace")])
def test_a_text_can_be_written(text, message):
    shard = Shard("s", lambda: iter([Document("s:1", text)]))
    with pytest.raises(ValueError, match=f"^s:1: .*{message}"):
        list(shard.documents())


def test_a_registered_source_checks_its_keys(counting):
    check_refused(replace(counting, length=513), r"data\.length=513: ")
    with pytest.raises(ValueError, match=r"data\.path=docs: data=counting "):
        check(replace(counting, path="docs"))


def test_pinned_paths_are_absolute(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    here = str(tmp_path)
    assert pinned(DataConfig(source="text", path="a")).path == f"{here}/a"
    two = pinned(DataConfig(source="text", path=["a", "b"]))
    assert two.path == [f"{here}/a", f"{here}/b"]
    hub = {"source": "hub", "path": "a/b", "revision": "c" * 40}
    assert pinned(DataConfig(**hub)) == DataConfig(**hub)
    assert pinned(DataConfig(cache="c", tokenizer="t")).cache == f"{here}/c"
    long = {"path": "a", "weight": 2, "filter": "b.jsonl"}
    mix = pinned(DataConfig(source="mix", mix={"x": long, "y": hub})).mix
    assert mix == {"x": long | {"path": f"{here}/a", "filter": f"{here}/b.jsonl"}, "y": hub}


# The embedded corpus


def test_embedded_has_both_libraries():
    corpus = open_corpus(DataConfig())
    names = [shard.name for shard in corpus.shards]
    assert {name.split("/")[0] for name in names} == {"stdlib", "torch"}
    assert "torch/nn/functional.py" in names
    left_out = {"site-packages", "test", "tests", "encodings", "_vendor"}
    assert not [name for name in names if left_out & set(name.split("/"))]
    assert corpus.total == len(names) == len(set(names))
    sample = corpus.sample(300_000, 4096)
    assert sample == Corpus(None, corpus.shards[::-1]).sample(300_000, 4096)
    assert 290_000 < sum(map(len, sample)) <= 300_000
    assert max(map(len, sample)) == 4096
    # Of all documents by their size, not of the first ones alone
    texts = [document.text for document in corpus.documents()]
    whole = sum(map(len, texts))
    for half in (texts[: len(texts) // 2], texts[len(texts) // 2 :]):
        found = sum(any(piece in text for text in half) for piece in sample)
        assert found / len(sample) == pytest.approx(sum(map(len, half)) / whole, abs=0.15)


def test_a_small_corpus_is_sampled_whole(corpus):
    opened = open_corpus(DataConfig(source="text", path=str(corpus)))
    texts = Counter(document.text for document in opened.documents() if document.text)
    assert Counter(opened.sample(10**6, 10**5)) == texts
    characters = sum(map(len, "".join(texts.elements())))
    assert sum(map(len, opened.sample(characters, 7))) == characters
    assert len("".join(opened.sample(characters // 2, 7))) > characters // 2 - 7
    assert opened.sample(1, 7) == []


def test_a_file_changed_at_the_same_size_is_read_again(tmp_path, monkeypatch):
    """Neither size nor time tells: an image of a machine may have replaced both."""
    library = tmp_path / "stdlib"
    library.mkdir()
    monkeypatch.setattr(sysconfig, "get_path", lambda _: str(library))
    monkeypatch.setattr("longctx.data.sources.embedded.find_spec", lambda _: None)
    for number in range(4):
        (library / f"{number}.py").write_text(f"value = {number}\n" * 200)
    identity = open_corpus(DataConfig()).identity
    file = library / "2.py"
    status = file.stat()
    for value, is_equal in ((7, False), (2, True)):
        file.write_text(f"value = {value}\n" * 200)
        os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
        assert file.stat().st_size == status.st_size
        assert (open_corpus(DataConfig()).identity == identity) is is_equal


# The example plugin of generated facts

QUESTION = re.compile(r"\? The (?:pass key|secret number of ([\w-]+)) is (\d{5})\.\n")


@pytest.fixture
def facts(needles, tmp_path: Path) -> DataConfig:
    lines = (f"line {n} of a long and dull text" for n in range(3000))
    (tmp_path / "a.txt").write_text("\n".join(lines))
    return DataConfig(source="needles", path=str(tmp_path / "a.txt"), documents=20, length=3000)


def test_every_question_is_answered_before(facts, needles):
    documents = list(open_corpus(facts).documents())
    assert len({document.text for document in documents}) == len(documents) == 20
    for index, (_, text, spans, *_) in enumerate(documents):
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
        # In every other document answers alone are learned
        learned = [f" {question[2]}" for question in questions] if index % 2 else [text]
        assert [text[slice(*span)] for span in spans] == learned


def test_facts_follow_from_their_number(facts):
    documents = list(open_corpus(facts).documents())
    assert documents == list(open_corpus(facts).documents())
    assert list(open_corpus(replace(facts, documents=7)).documents()) == documents[:7]
    assert open_corpus(facts).identity != open_corpus(replace(facts, length=4000)).identity
