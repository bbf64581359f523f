"""`data=hub` on local files, streamed by the code that streams from the Hub, and what it says
without a network.
"""

from __future__ import annotations

import json

import pytest

from longctx.data import DataConfig, load, read_documents

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


def test_changed_files_are_read_again(files) -> None:
    before = load(hub(files), 32)
    (files / "b.jsonl").write_text(json.dumps({"text": "only this"}) + "\n")
    after = load(hub(files), 32)
    assert (before.summary()["documents"], after.summary()["documents"]) == (40, 21)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"text_column": "body"}, r"no field 'body' \(there are: text, n\).*data\.text_column"),
        ({"text_column": "n"}, r"row 1: 'n' is int, expected a string"),
        ({"split": "nope"}, r"cannot be read as a data set \(ValueError: Bad split: nope"),
        ({"files": "missing.jsonl"}, r"data\.files=missing\.jsonl: no such file"),
        (
            {"files": None},
            r"data\.path=json: a builder of local files; name them with data\.files=",
        ),
        ({"path": ["a", "b"]}, r"takes one data set's name"),
    ],
)
def test_what_cannot_be_read_is_one_clear_line(files, options, message) -> None:
    with pytest.raises((ValueError, OSError), match=message) as caught:
        list(read_documents(hub(files, **options)))
    assert "\n" not in str(caught.value)


def test_without_a_network_it_says_so(files, monkeypatch) -> None:
    import huggingface_hub

    def offline(*_, **__):
        raise ConnectionError("[Errno -2] Name or service not known")

    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", offline)
    with pytest.raises(
        ConnectionError, match=r"data\.path=some/texts: the Hugging Face Hub cannot be reached"
    ):
        list(read_documents(hub(files, path="some/texts", files=None)))


def test_a_revision_seen_before_is_used_without_a_network(files, monkeypatch, capsys) -> None:
    """A stream that stands in for the Hub; then the network goes, and the cache still answers."""
    import datasets
    import huggingface_hub

    class Info:
        sha = "0123abcd"

    asked = []

    def stream(*_, revision, **__):
        asked.append(revision)
        return iter([{"text": f"text {n} of the far away set {n * 7}"} for n in range(9)])

    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", lambda *_, **__: Info)
    monkeypatch.setattr(datasets, "load_dataset", stream)
    config = hub(files, path="some/texts", files=None, val_fraction=0.3)
    online = load(config, 16)
    assert set(asked) == {"0123abcd"}

    def offline(*_, **__):
        raise ConnectionError("Name or service not known")

    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", offline)
    monkeypatch.setattr(datasets, "load_dataset", offline)
    assert load(config, 16).fingerprint == online.fingerprint
    assert "using revision 0123abcd" in capsys.readouterr().err
