"""Mask: what it refuses, binding, windows, positions. That the intervals, their transpose and count
are the definition of each kind is shown by tests/test_fuzz.py.
"""

import pytest
import torch

from longctx.attention import Mask


def test_positions_restart_in_each_document():
    mask = Mask.documents(torch.tensor([[0, 0, 0, 3, 3], [1, 2, 2, 2, 9]]))
    assert mask.positions(2, 5, "cpu").tolist() == [[0, 1, 2, 0, 1], [0, 0, 1, 2, 0]]
    assert Mask.causal().positions(2, 3, "cpu").tolist() == [[0, 1, 2]] * 2


def test_binding_is_idempotent_and_guards_its_shape():
    mask = Mask.documents(torch.zeros(2, 8, dtype=torch.long)).bind(2, 8, 8, "cpu")
    assert mask.bind(2, 8, 8, "cpu") is mask
    with pytest.raises(ValueError, match="doc_ids of shape"):
        mask.bind(2, 9, 9, "cpu")
    with pytest.raises(ValueError, match="bound to 8 keys"):
        Mask.causal().bind(1, 8, 8, "cpu").bind(1, 8, 9, "cpu")


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Mask.causal(0), "window=0"),
        (lambda: Mask.causal(2.5), "window=2.5"),
        (lambda: Mask.causal(True), "window=True"),
        (lambda: Mask.documents(torch.tensor([[1, 0]])), "must not decrease"),
        (lambda: Mask.documents(torch.tensor([0, 1])), r"must be \(B, T\)"),
        (lambda: Mask.intervals(torch.tensor([[1, 0]]), torch.tensor([[1, 1]])), "first must"),
    ],
)
def test_bad_masks_are_refused(build, message):
    with pytest.raises(ValueError, match=message):
        build()


def assert_same(mask, expected, rows):
    """Assert that two masks of rows of 9 tokens have the same intervals."""
    bound, other = (x.bind(rows, 9, 9, "cpu") for x in (mask, expected))
    for name in ("first", "last", "qfirst", "qlast"):
        assert torch.equal(getattr(bound, name), getattr(other, name)), name


@pytest.mark.parametrize("much", [2**31 - 1, 2**31 + 5, 2**40, 2**63 - 1])
def test_numbers_beyond_int32_mean_what_they_say(much):
    """A window or a last key past the end of every row is no limit."""
    ids = torch.zeros(1, 9, dtype=torch.long)
    everything = Mask.intervals(ids, torch.full_like(ids, much))
    for mask, expected in (
        (Mask.causal(much), Mask.causal()),
        (Mask.causal().bind(1, 9, 9, "cpu").windowed(much), Mask.causal()),
        (Mask.documents(ids, much), Mask.documents(ids)),
        (everything, Mask.full()),
        (Mask.intervals(ids - much, everything.last), Mask.full()),
    ):
        assert_same(mask, expected, 1)


def test_windowed_equals_a_mask_built_with_the_window():
    doc_ids = torch.tensor([[0, 0, 0, 0, 1, 1, 1, 2, 2], [0, 1, 1, 1, 1, 1, 1, 1, 1]])
    for window in (1, 3, 20):
        for plain, expected in (
            (Mask.causal(), Mask.causal(window)),
            (Mask.causal(5), Mask.causal(min(5, window))),
            (Mask.documents(doc_ids), Mask.documents(doc_ids, window)),
        ):
            for windowed in (plain.windowed(window), plain.bind(2, 9, 9, "cpu").windowed(window)):
                assert windowed.window == expected.window
                assert windowed.pairs(2, 9, 9) == expected.pairs(2, 9, 9)
                assert_same(windowed, expected, 2)
    with pytest.raises(ValueError, match=r"a window of 3 .*full"):
        Mask.full().windowed(3)
    with pytest.raises(ValueError, match="window=0 must be"):
        Mask.causal().windowed(0)


def test_tiles_begin_with_each_document():
    ids = torch.arange(4).repeat_interleave(torch.tensor([300, 1, 128, 129]))
    mask = Mask.documents(torch.stack([ids, 0 * ids])).bind(2, 558, 558, "cpu").windowed(7)
    several, one = mask.starts.tolist()
    assert several == [0, 128, 256, 300, 301, 429, 557, *[558] * 551, 7]
    assert one == [0, 128, 256, 384, 512, *[558] * 553, 7]
    assert Mask.documents(ids[None][:0]).bind(0, 558, 558, "cpu").starts.shape == (0, 559)


def test_padding_of_narrow_document_ids():
    """The padding's id, one more than the last one, need not fit their type."""
    padded = Mask.documents(torch.full((1, 4), 255, dtype=torch.uint8)).padded(4, 6)
    assert padded.bind(1, 6, 6, "cpu").first.tolist() == [[0, 0, 0, 0, 4, 4]]
