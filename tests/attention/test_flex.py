"""flex: its block mask is the intervals, block by block; on a GPU, the correctness rule."""

import pytest
import torch

from longctx.attention import Mask, attention
from longctx.attention.flex import BLOCK, block_mask
from longctx.attention.naive import visible
from tests.attention.rule import FREE, GRID, Case, check


@pytest.mark.parametrize(
    "case",
    [
        Case(2, 300, 300, mask="documents"),
        Case(1, 257, 513, window=200),
        Case(2, 300, 400, mask="intervals"),
    ],
    ids=str,
)
def test_block_mask_covers_the_intervals(case):
    mask = case.build_mask().bind(case.B, case.Tq, case.Tk, "cpu")
    blocks = block_mask(mask, case.Tk)
    is_visible = visible(mask, case.Tk)[:, 0]
    for b in range(is_visible.shape[0]):
        for i in range(-(-case.Tq // BLOCK)):
            partial = set(blocks.kv_indices[b, 0, i, : blocks.kv_num_blocks[b, 0, i]].tolist())
            full = set(
                blocks.full_kv_indices[b, 0, i, : blocks.full_kv_num_blocks[b, 0, i]].tolist()
            )
            for j in range(-(-case.Tk // BLOCK)):
                tile = is_visible[b, i * BLOCK : (i + 1) * BLOCK, j * BLOCK : (j + 1) * BLOCK]
                assert j not in full or (bool(tile.all()) and tile.shape == (BLOCK, BLOCK))
                assert not tile.any() or j in partial | full
                assert not (j in partial and j in full)


@pytest.mark.gpu
@pytest.mark.parametrize("case", GRID + FREE, ids=str)
def test_rule(case):
    check(case, "flex", torch.bfloat16)


@pytest.mark.gpu
def test_scores_never_exist_without_compiling():
    T = 16384
    q, k, v = torch.randn(3, 1, T, 4, 64, device="cuda", dtype=torch.bfloat16)
    mask = Mask.causal().bind(1, T, T, "cuda")
    before = torch.cuda.max_memory_allocated()
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
        attention(q, k, v, mask=mask, backend="flex")
    assert torch.cuda.max_memory_allocated() - before < 4 * T * T
