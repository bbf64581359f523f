"""Flash in torch tiles: which rows go to torch's fused kernel; attention/test_flash.py has its rule
for other masks.
"""

import torch

from longctx.attention import Mask
from longctx.kernels.attention import tiled


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
