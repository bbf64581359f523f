"""`data=hub` on local files, streamed by the code that streams from the Hub, and what it says
without a network.
"""

from __future__ import annotations

import json
import socket

import pytest

from longctx.data import DataConfig, load, read_documents, sources

pytest.importorskip("datasets", reason="datasets is not installed")


@pytest.fixture
def files(tmp_path):
    for name, first in (("a.jsonl", 0), ("b.jsonl", 20)):
        rows = [
            {"text": f"document number {n} of many, which says {n * n}", "n": n}
            for n in range(first, first + 20)
        ]
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def hub(folder, **options) -> DataConfig:
    values = {
        "source": "hub",
        "path": "json",
        "files": [str(folder / "a.jsonl"), str(folder / "b.jsonl")],
    }
    return DataConfig(**{**values, "cache": str(folder / "cache"), "vocab_size": 300, **options})


def test_a_local_builder_streams_its_files_in_order(files) -> None:
    texts = [document.text for document in read_documents(hub(files))]
    assert len(texts) == 40
    assert texts[25].startswith("document number 25 ")


def test_a_limit_ends_the_stream(files) -> None:
    assert len(list(read_documents(hub(files, documents=7)))) == 7
    assert load(hub(files, documents=7, val_fraction=0.3), 32).summary()["documents"] == 7


def test_a_folder_is_a_data_set(files) -> None:
    (files / "folder").mkdir()
    (files / "a.jsonl").rename(files / "folder" / "train.jsonl")
    assert len(list(read_documents(hub(files, path=str(files / "folder"), files=None)))) == 20


def test_files_of_a_folder_lie_in_it(files) -> None:
    (files / "folder").mkdir()
    (files / "a.jsonl").rename(files / "folder" / "a.jsonl")
    assert len(list(read_documents(hub(files, path=str(files / "folder"), files="a.jsonl")))) == 20
    with pytest.raises(FileNotFoundError, match=r"data\.files=.*folder/b\.jsonl: "):
        sources.check_files(hub(files, path=str(files / "folder"), files=["b.jsonl"]))


def test_local_files_are_looked_for_early_and_hold_from_every_folder(files, monkeypatch) -> None:
    monkeypatch.chdir(files)
    config = hub(files, files=["*.jsonl"])
    sources.check_files(config)
    kept = sources.pinned(config)
    mixed = DataConfig("mix", mix={"a": {"source": "hub", "path": "json", "files": "a.jsonl"}})
    monkeypatch.chdir(files.parent)
    assert len(list(read_documents(kept))) == 40
    with pytest.raises(FileNotFoundError, match=r"^data\.files=\*\.jsonl: "):
        sources.check_files(config)
    with pytest.raises(FileNotFoundError, match=r"a\.jsonl: "):
        sources.check_files(mixed)
    monkeypatch.chdir(files)
    mixed = sources.pinned(mixed)
    monkeypatch.chdir(files.parent)
    sources.check_files(mixed)
    # These files are at the Hub, not here.
    on_the_hub = hub(files, path="me/texts", files=["data/a.parquet"], revision="c" * 40)
    sources.check_files(on_the_hub)
    assert sources.pinned(on_the_hub).files == ["data/a.parquet"]


def test_changed_files_are_read_again(files) -> None:
    before = load(hub(files), 32)
    (files / "b.jsonl").write_text(json.dumps({"text": "only this"}) + "\n")
    after = load(hub(files), 32)
    assert (before.summary()["documents"], after.summary()["documents"]) == (40, 21)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"text_column": "body"}, r"'body' .*text, n.*data\.text_column"),
        ({"text_column": "n"}, r"data\.path=json: row 1: 'n' .*int"),
        ({"split": "nope"}, r"data\.path=json: .*nope"),
        ({"files": "missing.jsonl"}, r"data\.files=missing\.jsonl: "),
        ({"files": None}, r"data\.path=json: .*data\.files="),
        ({"path": ["a", "b"]}, r"data\.path=\['a', 'b'\]: data=hub "),
        ({"path": None}, r"data\.path is not set"),
    ],
)
def test_an_unreadable_data_set_is_one_clear_line(files, options, message) -> None:
    with pytest.raises((ValueError, OSError), match=message) as caught:
        list(read_documents(hub(files, **options)))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", [ConnectionError, socket.gaierror])
def test_a_missing_network_is_named(kind, files, monkeypatch) -> None:
    import huggingface_hub

    def offline(*_, **__):
        raise kind(-2, "Name or service not known")

    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", offline)
    with pytest.raises(ConnectionError, match=r"data\.path=some/texts: "):
        list(read_documents(hub(files, path="some/texts", files=None)))


def test_a_revision_seen_before_is_used_without_a_network(files, monkeypatch, capsys) -> None:
    """A stream that stands in for the Hub; then the network goes, and the cache still answers."""
    import datasets
    import huggingface_hub

    class Info:
        sha = "0123abcd"

    revisions = []

    def stream(*_, revision, **__):
        revisions.append(revision)
        return iter([{"text": f"text {n} of the far away set {n * 7}"} for n in range(9)])

    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", lambda *_, **__: Info)
    monkeypatch.setattr(datasets, "load_dataset", stream)
    config = hub(files, path="some/texts", files=None, val_fraction=0.3)
    online = load(config, 16)
    assert set(revisions) == {"0123abcd"}

    def offline(*_, **__):
        raise ConnectionError("Name or service not known")

    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", offline)
    monkeypatch.setattr(datasets, "load_dataset", offline)
    assert load(config, 16).fingerprint == online.fingerprint
    assert "0123abcd" in capsys.readouterr().err
