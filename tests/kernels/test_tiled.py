"""Flash in torch tiles: which rows go to torch's fused kernel, and that every visible pair is in
exactly one tile.
"""

import pytest
import torch

from longctx.attention import Mask
from longctx.attention.naive import visible
from longctx.kernels.attention import tiled
from tests.attention.rule import FREE, GRID


def documents(mask, Tq, Tk):
    bound = mask.bind(1, Tq, Tk, "cpu")
    return tiled.fused_documents(bound.first[0], bound.last[0], Tk)


def test_documents_are_recognized():
    assert documents(Mask.causal(), 5, 5) == [(0, 5, True)]
    assert documents(Mask.full(), 5, 7) == [(0, 5, False)]
    assert documents(Mask.documents(torch.tensor([[0, 0, 1, 4, 4]])), 5, 5) == [
        (0, 2, True),
        (2, 3, True),
        (3, 5, True),
    ]


@pytest.mark.parametrize(
    ("mask", "Tq", "Tk"),
    [
        (Mask.causal(), 5, 7),
        (Mask.causal(), 7, 5),
        (Mask.causal(2), 5, 5),
        (Mask.documents(torch.tensor([[0, 0, 0, 1]]), window=2), 4, 4),
        (Mask.intervals(torch.tensor([[0, 1, 1]]), torch.tensor([[0, 1, 1]])), 3, 3),
    ],
)
def test_other_masks_are_not_documents(mask, Tq, Tk):
    assert documents(mask, Tq, Tk) is None


@pytest.mark.parametrize("case", GRID + FREE, ids=str)
def test_tiles_cover_each_visible_pair_once(case, monkeypatch):
    monkeypatch.setattr(tiled, "ROWS", 16)
    monkeypatch.setattr(tiled, "COLS", 24)
    bound = case.build_mask().bind(case.B, case.Tq, case.Tk, "cpu")
    for b in range(bound.first.shape[0]):
        count = torch.zeros(case.Tq, case.Tk, dtype=torch.int)
        for i, j, visible_pairs in tiled._tiles(bound.first[b], bound.last[b]):
            count[i, j] += 1 if visible_pairs is None else visible_pairs.int()
        assert torch.equal(count, visible(bound, case.Tk)[b, 0].int())
