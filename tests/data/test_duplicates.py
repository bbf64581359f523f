"""Copies and near-copies are one group, and a group never lies on both sides of the split."""

from __future__ import annotations

import random

import numpy as np
import pytest

from longctx.data import load
from longctx.data.split import near_duplicates, signature
from tests.data.conftest import prose


def edited(text: str, share: float, seed: int) -> str:
    rng = random.Random(seed)
    words = text.split(" ")
    return " ".join(word if rng.random() > share else f"edit{rng.randrange(99)}" for word in words)


def grouped(texts: list[str]) -> list[int]:
    return near_duplicates(np.stack([signature(text) for text in texts])).tolist()


def test_signatures_estimate_the_share_of_equal_shingles() -> None:
    words = prose(3000, 0).split()
    for shared in (0, 600, 1500, 2700):
        other = [*words[:shared], *prose(3000 - shared, 77).split()]
        shingles = [
            {tuple(text[i : i + 5]) for i in range(len(text) - 4)} for text in (words, other)
        ]
        jaccard = len(shingles[0] & shingles[1]) / len(shingles[0] | shingles[1])
        estimate = (signature(" ".join(words)) == signature(" ".join(other))).mean()
        assert estimate == pytest.approx(jaccard, abs=0.2)


def test_copies_meet_whatever_their_white_space_and_case() -> None:
    text = prose(300, 1)
    assert grouped(
        [text, prose(300, 2), text.upper(), text.replace("\n", " \n\n  "), prose(300, 3)]
    ) == [0, 1, 0, 0, 4]


@pytest.mark.parametrize("size", [60, 400, 3000])
def test_lightly_edited_copies_meet_and_others_do_not(size: int) -> None:
    originals = [prose(size, seed) for seed in range(20)]
    copies = [edited(text, 0.01, seed) for seed, text in enumerate(originals)]
    group = grouped(originals + copies)
    assert group[:20] == list(range(20))
    assert sum(copy == original for original, copy in enumerate(group[20:])) >= 18
    rewritten = [edited(text, 0.5, seed) for seed, text in enumerate(originals)]
    assert grouped(originals + rewritten) == list(range(40))


def test_a_shared_licence_does_not_join_documents() -> None:
    licence = prose(40, 99)
    assert grouped([licence + "\n" + prose(300, seed) for seed in range(10)]) == list(range(10))


def test_signatures_do_not_change_with_a_release() -> None:
    assert signature("the quick brown fox jumps over the lazy dog")[:4].tolist() == [
        45200130,
        288114253,
        161584545,
        1690409200,
    ]


def test_short_texts_are_compared_too() -> None:
    assert grouped(["yes", "no", "yes ", "yes and no", ""]) == [0, 1, 0, 3, 4]


def test_near_duplicates_in_files_stay_on_one_side(text_config, corpus) -> None:
    for seed in range(8):
        for copy in range(4):
            (corpus / f"copy{seed}-{copy}.txt").write_text(
                edited(prose(400, 1000 + seed), 0.005, copy)
            )
    data = load(text_config(val_fraction=0.4), 64)
    assert data.summary()["near_duplicates"] >= 22
    sides = {}
    for split in ("train", "val"):
        for name, *_ in data.documents(split):
            sides.setdefault(name.split("-")[0], set()).add(split)
    assert all(len(splits) == 1 for splits in sides.values())
    assert {"val"} in sides.values()
