"""The share that validates: as large as asked for, copies on one side, one file too."""

import numpy as np
import pytest

from longctx.data import load
from longctx.data.sequences import IGNORED
from longctx.data.split import by_hash
from longctx.data.store import Store
from tests.data.conftest import check_refused, prose


class Documents(Store):
    """Documents of `lengths` tokens of 4 bytes, in groups of `copies`."""

    def __init__(self, lengths: list[int], copies: int = 1, seed: int = 0) -> None:
        keys = np.random.default_rng(seed).integers(0, 256, (len(lengths), 16), dtype=np.uint8)
        self.lengths = np.array(lengths, np.int64)
        self.n_bytes = 4 * self.lengths
        self.keys = keys[np.arange(len(lengths)) // copies]
        self.texts, self.has_answers = self.keys, False

    def split(self, fraction: float | None) -> np.ndarray:
        (trained,) = by_hash([self], {"data": fraction})
        return trained

    def share(self, trained: np.ndarray) -> float:
        return float(1 - trained.sum() / self.lengths.sum())


MANY = (5 + np.random.default_rng(0).lognormal(6, 1, 2000)).astype(int).tolist()


@pytest.mark.parametrize("size", [1, 2, 10, 50])
@pytest.mark.parametrize("fraction", [0.02, 0.3, 0.9])
def test_copies_stay_together_at_the_asked_share(size, fraction):
    store = Documents(MANY, size)
    trained = store.split(fraction)
    # Few large groups may miss the share, and the end of a text makes it up
    sides = (trained < store.lengths).reshape(-1, size)
    assert (sides.all(axis=1) == sides.any(axis=1)).all()
    assert store.share(trained) == pytest.approx(fraction, rel=0.15, abs=0.01)


@pytest.mark.parametrize(
    ("lengths", "fraction"), [([5001, 4003, 7001], 0.1), ([1_000_000, *[100] * 20], 0.02)]
)
def test_the_end_of_the_longest_text_validates(lengths, fraction):
    store, longest = Documents(lengths), int(np.argmax(lengths))
    trained = store.split(fraction)
    assert 0 < trained[longest] < lengths[longest]
    assert 2 * (trained == 0).sum() < len(lengths)
    assert store.share(trained) == pytest.approx(fraction, rel=0.01)


def test_the_shortest_of_few_conversations_validates():
    store = Documents([5001, 4003, 7001])
    store.has_answers = True
    assert store.split(0.1).tolist() == [5001, 0, 7001]
    store.keys[:] = 0
    with pytest.raises(ValueError, match=r"data\.val_fraction=0\.1: .* too short, into"):
        store.split(0.1)
    with pytest.raises(ValueError, match=r"a\.val_fraction=0\.1: .* other sources of the mix too"):
        by_hash([Documents([5001, 4003])] * 2, {"data.mix.a": 0.1, "data.mix.b": 0.1})


@pytest.mark.parametrize(
    ("total", "share"), [(10_000, 0.1), (300_000, 0.1), (500_000, 0.0655), (20_000_000, 0.02)]
)
def test_without_a_fraction_enough_validates(total, share):
    store = Documents([total // 500] * 500)
    assert store.share(store.split(None)) == pytest.approx(share, rel=0.1)


def test_the_split_depends_on_the_texts_alone():
    """In whatever order they come; and few change sides if others come."""
    store, other = Documents(MANY[:500], 3), Documents([1])
    trained, order = store.split(0.1), np.random.default_rng(1).permutation(500)
    for part, most in ((order, 0), (np.arange(480), 0.03)):
        for name in ("lengths", "n_bytes", "keys"):
            setattr(other, name, getattr(store, name)[part])
        assert (other.split(0.1) != trained[part]).mean() <= most


def test_no_document_made_of_a_text_is_cut():
    """The end of the longest would be told by the others of its text."""
    store = Documents([4000, 26, 4000, 26], copies=2)
    store.texts = np.arange(64, dtype=np.uint8).reshape(4, 16)
    trained = store.split(0.05)
    assert sorted(trained.reshape(2, 2).tolist()) == [[0, 0], [4000, 26]]


@pytest.mark.parametrize("fraction", [0.3, 0])
def test_copies_in_two_stores_are_on_one_side(fraction):
    """Of a store that validates nothing, they are trained on."""
    a, b = Documents(MANY[:300]), Documents(MANY[300:600], seed=1)
    b.keys[:200] = a.keys[:200]
    of_a, of_b = by_hash([a, b], {"data.mix.a": 0.2, "data.mix.b": fraction})
    assert ((of_a[:200] == 0) == (of_b[:200] == 0)).all()
    assert (of_a[:200] == 0).any() == (fraction > 0) and (of_a[200:] == 0).any()
    if fraction:
        assert a.share(of_a) == pytest.approx(0.2, rel=0.1)
    assert b.share(of_b) == pytest.approx(fraction, rel=0.1)


@pytest.mark.parametrize("share", [0.1, 0.3017])
@pytest.mark.parametrize("text", [prose(1000, 5), "😀水é" * 400])
def test_one_file_validates_on_its_end(text_config, tmp_path, text, share):
    file = tmp_path / "input.txt"
    file.write_text(text, encoding="utf-8")
    data = load(text_config(path=str(file), vocab_size=400, val_fraction=share), 16)
    (begin,), (end,) = data.documents("train"), data.documents("val")
    assert begin.name != end.name
    assert data.tokenizer.decode([*begin.ids, *end.ids[:-1]]) == text
    assert begin.n_bytes + end.n_bytes == pytest.approx(len(text.encode()), abs=12)
    counts = data.summary()
    assert counts["val_tokens"] == len(end.ids)
    assert counts["val_tokens"] / counts["tokens"] == pytest.approx(share, abs=0.002)
    # Each token but the first of each side is predicted once, none on both sides
    for rows, ids in ((data.train, begin.ids), (data.val, end.ids)):
        targets = [target for row in rows for target in row["targets"].tolist()]
        assert sorted(t for t in targets if t != IGNORED) == sorted(ids[1:].tolist())
    file.write_text("xy")  # too short for both sides
    message = r"data\.val_fraction=null: .*val_fraction=0 "
    check_refused(text_config(path=str(file), val_fraction=None), message)
