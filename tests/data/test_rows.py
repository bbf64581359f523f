"""From files to rows: every token but a document's first is predicted exactly once, and never from
another document.
"""

from __future__ import annotations

import pickle
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
import torch

from longctx.data import load
from longctx.data.rows import PADDING_PIECE

SEQ_LENS = (2, 7, 33, 256)


def pieces(row):
    """(tokens, targets) of each piece of a row; the padding too, where there is any."""
    for number in range(int(row["doc_ids"][-1]) + 1):
        inside = row["doc_ids"] == number
        yield row["tokens"][inside].tolist(), row["targets"][inside].tolist()


@pytest.mark.parametrize("seq_len", SEQ_LENS)
@pytest.mark.parametrize("split", ["train", "val"])
def test_every_token_but_the_first_is_scored_once(text_config, seq_len, split) -> None:
    data = load(text_config(), seq_len)
    rows = getattr(data, split)
    scored, inputs, expected, held = Counter(), Counter(), Counter(), Counter()
    for document in data.documents(split):
        ids = document.ids.tolist()
        expected.update(pairwise(ids))
        held.update(ids)
    for index in range(len(rows)):
        for tokens, targets in pieces(rows[index]):
            scored.update((a, b) for a, b in zip(tokens, targets, strict=True) if b != -100)
            if any(target != -100 for target in targets) or tokens == [data.tokenizer.eos_id]:
                inputs.update(tokens)
            assert all(b == c for b, c in zip(targets[:-1], tokens[1:], strict=True) if b != -100)
    assert scored == expected
    eos = data.tokenizer.eos_id
    assert {k: v for k, v in inputs.items() if k != eos} == {
        k: v for k, v in held.items() if k != eos
    }


@pytest.mark.parametrize("seq_len", SEQ_LENS)
def test_rows_keep_their_contract(text_config, seq_len) -> None:
    data = load(text_config(), seq_len)
    filled = 0
    for index in range(len(data.train)):
        row = data.train[index]
        padding = int(row.pop("padding"))
        assert all(
            tensor.shape == (seq_len,) and tensor.dtype == torch.int64 for tensor in row.values()
        )
        of_padding = row["doc_ids"][seq_len - padding :]
        assert not padding or int(of_padding.bincount().max()) <= PADDING_PIECE
        assert of_padding[:1].tolist() != row["doc_ids"][: seq_len - padding][-1:].tolist()
        assert (row["targets"][seq_len - padding :] == -100).all()
        filled += seq_len - padding
        steps = row["doc_ids"].diff()
        assert row["doc_ids"][0] == 0
        assert ((steps == 0) | (steps == 1)).all()
        assert (
            (row["targets"][:-1][steps == 1] != -100)
            .logical_or(row["tokens"][:-1][steps == 1] == data.tokenizer.eos_id)
            .all()
        )
    about = data.summary()
    assert about["train_tokens"] == int(data.store.lengths[data.split["train"]].sum())
    assert filled / (len(data.train) * seq_len) == pytest.approx(
        about["train_efficiency"], abs=1e-6
    )


def test_a_cut_document_goes_on_in_the_target(text_config, corpus) -> None:
    for file in corpus.iterdir():
        file.unlink()
    (corpus / "one.txt").write_text("abcdefghij" * 5)
    data = load(text_config(val_fraction=0, vocab_size=257), 10)
    ids = next(iter(data.documents("train"))).ids
    assert len(ids) == 51
    rows = sorted(
        (data.train[index] for index in range(6)),
        key=lambda row: int((row["targets"] == -100).sum()),
    )
    for row in rows[:5]:
        assert row["targets"].tolist() == [*row["tokens"][1:].tolist(), int(row["targets"][-1])]
    assert sorted(int(row["targets"][-1]) for row in rows[:5])[0] == data.tokenizer.eos_id
    assert rows[5]["tokens"].tolist() == [data.tokenizer.eos_id] * 10
    assert (rows[5]["targets"] == -100).all()


def test_documents_are_uncut_and_decode_to_their_files(text_config, corpus) -> None:
    data = load(text_config(), 16)
    names = []
    for split in ("train", "val"):
        for name, ids, n_bytes, _ in data.documents(split):
            assert ids.dtype == np.int64
            assert ids[-1] == data.tokenizer.eos_id
            text = (corpus / name).read_text(encoding="utf-8")
            assert data.tokenizer.decode(ids[:-1]) == text
            assert n_bytes == len(text.encode())
            names.append(name)
    assert sorted(names) == sorted(file.name for file in corpus.glob("*.txt"))
    assert data.summary()["documents_dropped"] == 1


def test_splits_share_no_document_and_do_not_depend_on_the_row_length(text_config) -> None:
    one, two = load(text_config(), 16), load(text_config(), 129)
    assert [d.name for d in one.documents("val")] == [d.name for d in two.documents("val")]
    assert one.fingerprint == two.fingerprint
    assert not {d.name for d in one.documents("val")} & {d.name for d in one.documents("train")}
    assert one.fingerprint != load(text_config(val_fraction=0.5), 16).fingerprint


def test_no_validation_when_none_is_asked_for(text_config) -> None:
    data = load(text_config(val_fraction=0), 32)
    assert len(data.val) == 0
    assert list(data.documents("val")) == []
    assert data.summary()["train_documents"] == 23


def test_there_is_always_a_validation_document(text_config) -> None:
    data = load(text_config(val_fraction=1e-9), 32)
    assert data.summary()["val_documents"] == 1


def test_rows_survive_pickling_and_workers(text_config) -> None:
    rows = load(text_config(), 48).train
    back = pickle.loads(pickle.dumps(rows))
    batches = torch.utils.data.DataLoader(rows, batch_size=2, num_workers=2)
    for index, batch in enumerate(batches):
        for name, tensor in batch.items():
            assert (tensor[0] == rows[2 * index][name]).all()
            assert (tensor[0] == back[2 * index][name]).all()
    with pytest.raises(IndexError):
        rows[len(rows)]


@pytest.mark.parametrize("seq_len", [1, 0, -4])
def test_a_row_length_without_a_target_is_refused(text_config, seq_len) -> None:
    with pytest.raises(ValueError, match=f"seq_len={seq_len}"):
        load(text_config(), seq_len)


def test_nothing_to_predict_is_one_clear_line(text_config, corpus) -> None:
    for file in corpus.iterdir():
        file.write_text("")
    with pytest.raises(
        ValueError,
        match=r"data\.path=.*corpus: ",
    ):
        load(text_config(), 16)


def test_a_changed_file_is_read_again(text_config, corpus) -> None:
    before = load(text_config(), 16)
    (corpus / "00.txt").write_text("now something else entirely")
    after = load(text_config(), 16)
    assert before.fingerprint != after.fingerprint
    texts = [
        after.tokenizer.decode(d.ids[:-1])
        for s in ("train", "val")
        for d in after.documents(s)
        if d.name == "00.txt"
    ]
    assert texts == ["now something else entirely"]
