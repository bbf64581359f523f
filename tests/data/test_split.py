"""The share that validates: as large as asked for, near-duplicates on one side, one file too."""

import random
from collections.abc import Callable

import numpy as np
import pytest

from longctx.config.data_config import DataConfig
from longctx.data import load
from longctx.data.rows import IGNORED
from longctx.data.split import by_bytes, near_duplicates, signature
from longctx.data.store import Store
from longctx.data.tokenizer import train
from tests.data.conftest import check_refused, prose

Make = Callable[..., DataConfig]


class Documents(Store):
    """Documents of `lengths` tokens of 4 bytes, each the letter x, in near-duplicate `groups`."""

    has_sides = False
    are_conversations = False

    def __init__(self, lengths: list[int], groups: np.ndarray | None = None, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        self.lengths = np.array(lengths, np.int64)
        self.n_bytes = 4 * self.lengths
        self.groups = np.arange(len(lengths)) if groups is None else groups
        self.keys = rng.integers(0, 256, (len(lengths), 16), dtype=np.uint8)

    def tokens(self, document: int, start: int = 0, stop: int | None = None) -> np.ndarray:
        return np.full((stop or 0) - start, 88)

    def marks(self, document: int, start: int = 0, stop: int | None = None) -> np.ndarray | None:
        return self.tokens(document, start, stop) if self.are_conversations else None


TOKENIZER = train(["x"], 257)


def split(store: Store, fraction: float | None) -> np.ndarray:
    (trained,) = by_bytes([store], {"data": fraction}, TOKENIZER)
    return trained


def validating_share(store: Store, trained: np.ndarray) -> float:
    return float(1 - trained.sum() / store.lengths.sum())


def firsts(groups: np.ndarray) -> np.ndarray:
    """Return the first document in the group of each document."""
    return np.array([int(np.flatnonzero(groups == group)[0]) for group in groups])


def lengths_of(count: int, seed: int = 0) -> list[int]:
    return (5 + np.random.default_rng(seed).lognormal(6, 1, count)).astype(int).tolist()


@pytest.mark.parametrize("size", [1, 2, 10, 50])
@pytest.mark.parametrize("fraction", [0.02, 0.3, 0.9])
def test_groups_stay_together_at_the_asked_share(size, fraction):
    store = Documents(lengths_of(2000), firsts(np.arange(2000) // size))
    trained = split(store, fraction)
    assert ((trained == 0) | (trained == store.lengths)).all()
    sides = (trained == 0).reshape(-1, size)
    assert (sides.all(axis=1) == sides.any(axis=1)).all()
    assert validating_share(store, trained) == pytest.approx(fraction, rel=0.15)


def test_groups_larger_than_the_share_give_the_smallest():
    store = Documents(lengths_of(200), firsts(np.arange(200) // 50))
    trained = split(store, 0.001)
    assert (trained == 0).sum() == 50
    assert (trained[trained > 0] == store.lengths[trained > 0]).all()
    validating = store.lengths[trained == 0].sum()
    assert validating == store.lengths.reshape(4, 50).sum(axis=1).min()


@pytest.mark.parametrize(
    ("lengths", "fraction"),
    [([300_007], 0.02), ([5001, 4003, 7001], 0.1), ([1_000_000, *[100] * 20], 0.02)],
)
def test_the_ends_of_few_documents_validate(lengths, fraction):
    store = Documents(lengths)
    trained = split(store, fraction)
    assert (trained < store.lengths).any()
    assert 0 < trained[0] < lengths[0]
    assert validating_share(store, trained) == pytest.approx(fraction, rel=0.01)


@pytest.mark.parametrize("lengths", [[5001, 4003, 7001], [300_007]])
def test_a_conversation_is_cut_only_if_it_is_the_only_one(lengths):
    store = Documents(lengths)
    store.are_conversations = True
    trained = split(store, 0.1)
    is_cut = (0 < trained) & (trained < store.lengths)
    assert is_cut.sum() == (len(lengths) == 1)
    assert (trained < store.lengths).sum() == 1


def test_ends_of_near_duplicates_do_not_validate():
    """The end of one near-duplicate may lie in the middle of another."""
    store = Documents([1000, 1000, 5000], np.array([0, 0, 2]))
    trained = split(store, 0.05)
    assert trained[:2].tolist() == [1000, 1000]
    assert trained[2] == pytest.approx(5000 - 350, abs=5)
    store.keys[1] = store.keys[0]
    trained = split(store, 0.05)
    assert trained[0] == trained[1] == pytest.approx(950, abs=2)


@pytest.mark.parametrize(
    ("total", "share"), [(10_000, 0.1), (300_000, 0.1), (500_000, 0.0655), (20_000_000, 0.02)]
)
def test_without_a_fraction_enough_validates(total, share):
    store = Documents([total // 500] * 500)
    assert validating_share(store, split(store, None)) == pytest.approx(share, rel=0.1)


def test_the_split_depends_on_the_texts_alone():
    """In whatever order they come; and few change sides where others come."""
    store = Documents(lengths_of(500), firsts(np.arange(500) // 3))
    trained = split(store, 0.1)
    order = np.random.default_rng(1).permutation(500)
    other = Documents([1])
    for name in ("lengths", "n_bytes", "keys"):
        setattr(other, name, getattr(store, name)[order])
    other.groups = firsts((np.arange(500) // 3)[order])
    permuted = split(other, 0.1)
    assert (permuted == trained[order]).all()
    for name in ("lengths", "n_bytes", "keys", "groups"):
        setattr(other, name, getattr(store, name)[:480])
    fewer = split(other, 0.1)
    assert (fewer != trained[:480]).mean() < 0.03


def test_groups_of_two_stores_are_on_one_side():
    a, b = Documents(lengths_of(300)), Documents(lengths_of(300, 1), seed=1)
    rng = np.random.default_rng(2)
    a.signatures = rng.integers(0, 2**32, (300, 64), dtype=np.uint64).astype(np.uint32)
    b.signatures = a.signatures.copy()
    b.signatures[200:] = rng.integers(0, 2**32, (100, 64), dtype=np.uint64).astype(np.uint32)
    of_a, of_b = by_bytes([a, b], {"data.mix.a": 0.2, "data.mix.b": 0.3}, TOKENIZER)
    assert ((of_a[:200] == 0) == (of_b[:200] == 0)).all()
    assert (of_a[:200] == 0).any()
    for store, trained, fraction in ((a, of_a, 0.2), (b, of_b, 0.3)):
        assert validating_share(store, trained) == pytest.approx(fraction, rel=0.1)
    of_a, of_b = by_bytes([a, b], {"data.mix.a": 0.2, "data.mix.b": 0}, TOKENIZER)
    assert (of_b == b.lengths).all()
    assert (of_a[:200] == a.lengths[:200]).all()
    assert (of_a[200:] == 0).any()


@pytest.mark.parametrize("share", [0.1, 0.2003, 0.3017])
@pytest.mark.parametrize("text", [prose(1000, 5), "😀水é" * 400])
@pytest.mark.parametrize("vocab_size", [257, 400])
def test_one_file_validates_on_its_end(text_config, tmp_path, vocab_size, text, share):
    """No character is cut, though it takes several tokens of a small vocabulary."""
    file = tmp_path / "input.txt"
    file.write_text(text, encoding="utf-8")
    data = load(text_config(path=str(file), vocab_size=vocab_size, val_fraction=share), 16)
    (begin,), (end,) = data.documents("train"), data.documents("val")
    assert begin.name != end.name
    texts = [data.tokenizer.decode(ids) for ids in (begin.ids, end.ids[:-1])]
    assert "".join(texts) == text
    assert begin.n_bytes == len(texts[0].encode())
    assert end.n_bytes == len(texts[1].encode())
    counts = data.summary()
    assert counts["val_tokens"] == len(end.ids)
    assert counts["val_tokens"] / counts["tokens"] == pytest.approx(share, abs=0.002)
    # Each token but the first of each side is predicted once, none on both sides.
    for rows, ids in ((data.train, begin.ids), (data.val, end.ids)):
        targets = [target for row in rows for target in row["targets"].tolist()]
        assert sorted(t for t in targets if t != IGNORED) == sorted(ids[1:].tolist())


@pytest.mark.parametrize("text", ["x", "xy"])
def test_text_too_short_for_both_sides_is_refused(text_config, tmp_path, text):
    file = tmp_path / "short.txt"
    file.write_text(text)
    message = r"data\.val_fraction=null: .*val_fraction=0 "
    check_refused(text_config(path=str(file), val_fraction=None), message)


def edited(text: str, share: float, seed: int) -> str:
    rng = random.Random(seed)
    words = text.split(" ")
    return " ".join(word if rng.random() > share else f"edit{rng.randrange(99)}" for word in words)


def grouped(texts: list[str]) -> list[int]:
    return near_duplicates(np.stack([signature(text) for text in texts])).tolist()


def test_copies_differ_in_white_space_and_case():
    text = prose(300, 1)
    others = [text.upper(), text.replace("\n", " \n\n  "), prose(300, 3)]
    assert grouped([text, prose(300, 2), *others]) == [0, 1, 0, 0, 4]
    assert grouped(["yes", "no", "yes ", "yes and no", ""]) == [0, 1, 0, 3, 4]


@pytest.mark.parametrize("size", [60, 400, 3000])
def test_lightly_edited_copies_are_grouped(size):
    originals = [prose(size, seed) for seed in range(20)]
    copies = [edited(text, 0.01, seed) for seed, text in enumerate(originals)]
    group = grouped(originals + copies)
    assert group[:20] == list(range(20))
    assert sum(copy == original for original, copy in enumerate(group[20:])) >= 18
    # A shared licence joins no documents
    others = [edited(text, 0.5, seed) + prose(40, 99) for seed, text in enumerate(originals)]
    assert grouped(originals + others) == list(range(40))


@pytest.mark.parametrize("first", "ก水あက")
def test_copies_without_spaces_are_grouped(first):
    """In Thai, Chinese, Japanese and Burmese."""
    rng = random.Random(0)
    letters = [chr(ord(first) + number) for number in range(40)]
    texts = ["".join(rng.choices(letters, k=300)) for _ in range(2)]
    edited = texts[0][:100] + first + texts[0][101:]
    assert grouped([*texts, edited]) == [0, 1, 0]


def test_signatures_do_not_change_with_a_release():
    first = signature("the quick brown fox jumps over the lazy dog")[:4].tolist()
    assert first == [45200130, 288114253, 161584545, 1690409200]
