"""Which masks are kept between calls, and how many."""

import pytest
import torch

from longctx.attention import Mask, attention, kept_masks
from longctx.attention.kept_masks import bound, newly_bound


@pytest.fixture(autouse=True)
def nothing_kept():
    kept_masks.forget()
    yield
    kept_masks.forget()


def queries(T, B=1):
    return torch.ones(B, T, 1, 16)


@pytest.mark.parametrize("backend", ["naive", "flash"])
def test_masks_of_lengths_that_come_once_are_not_kept(backend):
    def call(T):
        q = queries(T)
        return attention(q, q, q, backend=backend)

    for T in range(1, 40):
        call(T)
    assert not kept_masks._kept
    first = call(7)
    assert [key[2] for key in kept_masks._kept] == [7]
    assert torch.equal(call(7), first)


def test_few_masks_are_kept():
    for T in range(1, 3 * kept_masks.MOST_KEPT):
        bound(Mask.causal(), queries(T), T)
        bound(Mask.causal(), queries(T), T)
        assert 0 < len(kept_masks._kept) <= kept_masks.MOST_KEPT


def test_a_kept_mask_serves_its_kind_window_and_lengths_for_every_batch():
    for window in (None, 2, 3):
        for T, keys in ((5, 5), (5, 6), (6, 6)):
            for _ in range(3):
                kept = bound(Mask.causal(window), queries(T), keys)
            assert bound(Mask.causal(window), queries(T, B=4), keys) is kept
            new = newly_bound(Mask.causal(window), queries(T), keys)
            assert new is not kept
            assert torch.equal(kept.first, new.first) and torch.equal(kept.last, new.last)


def test_masks_of_one_batch_are_not_kept():
    q = queries(6)
    for _ in range(3):
        bound(Mask.documents(torch.tensor([[0, 0, 1, 1, 1, 2]])), q, 6)
        bound(Mask.intervals(torch.zeros(1, 6).int(), torch.arange(6).int()[None]), q, 6)
        newly_bound(Mask.causal(), q, 6)
    assert not kept_masks._kept
