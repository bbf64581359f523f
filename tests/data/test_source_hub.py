"""`data=hub` on local files, streamed as from the Hub, and without a network."""

import json
import socket
from types import SimpleNamespace
from unittest.mock import Mock

import datasets
import huggingface_hub
import pytest

from longctx.data import DataConfig, load, read_documents
from tests.data.conftest import check_refused

SHA = "0123abcd" * 5


@pytest.fixture
def asked(tmp_path, monkeypatch):
    """Let local files stand for a data set of the Hub; return what is asked of it."""
    for name, first in (("a.jsonl", 0), ("b.jsonl", 20)):
        numbers = range(first, first + 20)
        rows = [{"text": f"document number {n} of many, or {n * n}", "n": n} for n in numbers]
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    asked, load_dataset = [], datasets.load_dataset

    def stream(path, name, data_files, revision, **options):
        asked.append((path, data_files, revision))
        names = data_files or ["a.jsonl", "b.jsonl"]
        return load_dataset("json", data_files=[str(tmp_path / name) for name in names], **options)

    info = SimpleNamespace(sha=SHA)
    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", lambda *_, **__: info)
    monkeypatch.setattr(datasets, "load_dataset", stream)
    return asked


@pytest.fixture
def config(asked, tmp_path):
    return lambda **options: DataConfig(
        **{"source": "hub", "path": "some/texts", "vocab_size": 300, "val_fraction": 0.3}
        | {"cache": str(tmp_path / "cache"), **options}
    )


def test_a_data_set_is_streamed_in_order(config, asked):
    texts = [document.text for document in read_documents(config())]
    assert len(texts) == 40 and texts[25].startswith("document number 25 ")
    assert len(list(read_documents(config(files="b.jsonl", revision="c" * 40)))) == 20
    assert asked == [("some/texts", None, SHA), ("some/texts", ["b.jsonl"], "c" * 40)]
    assert load(config(documents=7), 32).summary()["documents"] == 7


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"text_column": "body"}, r"'body' .*text, n.*data\.text_column"),
        ({"text_column": "n"}, r"data\.path=some/texts: row 1: 'n' .*int"),
        ({"split": "nope"}, r"data\.split=nope: .*\['train'\]"),
        ({"files": "missing.jsonl"}, r"data\.path=some/texts: "),
        ({"path": "."}, r"data\.path=\.: .*data=text"),
        ({"path": ["a", "b"]}, r"data\.path=\['a', 'b'\]: data=hub "),
        ({"path": None}, r"data\.path=None: data=hub "),
    ],
)
def test_an_unreadable_data_set_is_one_line(config, options, message):
    check_refused(config(**options), message)


def test_a_wrong_key_is_refused_before_the_hub_is_asked(config, monkeypatch):
    monkeypatch.setattr(
        huggingface_hub.HfApi, "dataset_info", lambda *_, **__: pytest.fail("asked")
    )
    check_refused(config(files=5), r"data\.files=5: ")


def test_a_known_revision_needs_no_network(config, monkeypatch):
    online = load(config(), 16)
    offline = Mock(side_effect=socket.gaierror(-2, "Name or service not known"))
    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", offline)
    monkeypatch.setattr(datasets, "load_dataset", offline)
    assert load(config(revision=SHA), 16).fingerprint == online.fingerprint
    check_refused(config(), r"data\.path=some/texts: ")
