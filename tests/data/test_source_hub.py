"""`data=hub` on local files, streamed as from the Hub, and without a network."""

import json
import os
import socket
from types import SimpleNamespace
from unittest.mock import Mock

import datasets
import huggingface_hub
import pytest

from longctx.data import DataConfig, load, read_documents
from longctx.data.sources import registry
from tests.data.conftest import check_refused


@pytest.fixture
def files(tmp_path):
    for name, first in (("a.jsonl", 0), ("b.jsonl", 20)):
        numbers = range(first, first + 20)
        rows = [{"text": f"document number {n} of many, or {n * n}", "n": n} for n in numbers]
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def hub(folder, **options) -> DataConfig:
    both = [str(folder / "a.jsonl"), str(folder / "b.jsonl")]
    values = {"source": "hub", "path": "json", "files": both, "vocab_size": 300}
    return DataConfig(**{**values, "cache": str(folder / "cache"), **options})


def texts(config: DataConfig) -> list[str]:
    return [document.text for document in read_documents(config)]


def test_a_builder_streams_its_files_in_order(files):
    assert len(texts(hub(files))) == 40
    assert texts(hub(files))[25].startswith("document number 25 ")
    assert len(texts(hub(files, documents=7))) == 7
    assert load(hub(files, documents=7, val_fraction=0.3), 32).summary()["documents"] == 7


def test_a_folder_is_a_data_set(files):
    folder = files / "folder"
    folder.mkdir()
    (files / "a.jsonl").rename(folder / "train.jsonl")
    for names in (None, "train.jsonl"):
        assert len(texts(hub(files, path=str(folder), files=names))) == 20
    with pytest.raises(FileNotFoundError, match=r"data\.files=.*folder/b\.jsonl: "):
        registry.check_files(hub(files, path=str(folder), files=["b.jsonl"]))


def test_pinned_files_are_found_from_every_folder(files, monkeypatch):
    monkeypatch.chdir(files)
    config = hub(files, files=["*.jsonl"])
    mixed = DataConfig("mix", mix={"a": {"source": "hub", "path": "json", "files": "a.jsonl"}})
    registry.check_files(config)
    pinned, pinned_mix = registry.pinned(config), registry.pinned(mixed)
    monkeypatch.chdir(files.parent)
    assert len(texts(pinned)) == 40
    registry.check_files(pinned_mix)
    for missing in (config, mixed):
        with pytest.raises(FileNotFoundError, match=r"^data\.files=.*\.jsonl: "):
            registry.check_files(missing)
    # These files are at the Hub, not here.
    on_the_hub = hub(files, path="me/texts", files=["data/a.parquet"], revision="c" * 40)
    registry.check_files(on_the_hub)
    assert registry.pinned(on_the_hub).files == ["data/a.parquet"]


@pytest.mark.parametrize("source", ["hub", "text"])
@pytest.mark.parametrize("is_dated", [False, True])
def test_changed_files_are_read_again(files, is_dated, source):
    """Also if size and time of modification are those of before."""
    options = {"source": "text", "path": f"{files}/*.jsonl", "files": None}
    config = hub(files, **(options if source == "text" else {}))
    before = load(config, 32)
    file = files / "b.jsonl"
    status = file.stat()
    line = json.dumps({"text": "only this"}) + "\n"
    file.write_text(line.rjust(status.st_size))
    if is_dated:
        os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    after = load(config, 32)
    assert (before.summary()["documents"], after.summary()["documents"]) == (40, 21)
    assert before.fingerprint != after.fingerprint


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"text_column": "body"}, r"'body' .*text, n.*data\.text_column"),
        ({"text_column": "n"}, r"data\.path=json: row 1: 'n' .*int"),
        ({"split": "nope"}, r"data\.split=nope: .*\['train'\]"),
        ({"files": "missing.jsonl"}, r"data\.files=missing\.jsonl: "),
        ({"files": None}, r"data\.path=json: .*data\.files="),
        ({"path": ["a", "b"]}, r"data\.path=\['a', 'b'\]: data=hub "),
        ({"path": None}, r"data\.path is not set"),
    ],
)
def test_an_unreadable_data_set_is_one_line(files, options, message):
    check_refused(hub(files, **options), message)


def test_a_known_revision_needs_no_network(files, monkeypatch, capsys):
    """A stream stands in for the Hub; then the network is gone, and the cache still answers."""

    revisions = []
    info = SimpleNamespace(sha="0123abcd")

    def stream(*_, revision, **__):
        revisions.append(revision)
        return iter([{"text": f"text {n} of the far away set {n * 7}"} for n in range(9)])

    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", lambda *_, **__: info)
    monkeypatch.setattr(datasets, "load_dataset", stream)
    config = hub(files, path="some/texts", files=None, val_fraction=0.3)
    online = load(config, 16)
    assert set(revisions) == {"0123abcd"}

    offline = Mock(side_effect=socket.gaierror(-2, "Name or service not known"))
    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", offline)
    monkeypatch.setattr(datasets, "load_dataset", offline)
    assert load(config, 16).fingerprint == online.fingerprint
    assert "0123abcd" in capsys.readouterr().err
    check_refused(hub(files, path="other/texts", files=None), r"data\.path=other/texts: ")
