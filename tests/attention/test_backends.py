"""The correctness rule for every backend but flash, and what flex and flash_attn promise."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from longctx.attention import Mask, attention, flash_attn, kernels_run
from longctx.attention.flash_attn import INSTALLED
from longctx.attention.flex import BLOCK, block_mask
from longctx.attention.naive import visible
from longctx.attention.registry import AttentionRequest
from tests.attention.rule import FREE, GRID, ON_GPU, Case, check, inputs

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
lacks_it = pytest.mark.skipif(not INSTALLED, reason="needs FlashAttention")
needs_flash_attn = [pytest.mark.gpu, lacks_it]


RULE = [
    *(
        ("sdpa", dtype, case)
        for case in GRID
        for dtype in ([BF16, FP16] if ON_GPU else [FP32, BF16])
    ),
    # refused on a GPU
    *(pytest.param("sdpa", FP32, case, marks=pytest.mark.no_gpu) for case in FREE),
    *(pytest.param("flex", BF16, case, marks=pytest.mark.gpu) for case in GRID + FREE),
    *(pytest.param("flash_attn", BF16, replace(x, D=64), marks=needs_flash_attn) for x in GRID),
]


@pytest.mark.parametrize(("backend", "dtype", "case"), RULE, ids=str)
def test_rule(backend, dtype, case):
    check(case, backend, dtype)


@pytest.mark.parametrize(
    ("lengths", "mask", "window"),
    [((300, 300), "documents", None), ((257, 513), "causal", 200), ((300, 400), "intervals", None)],
)
def test_flex_block_mask_covers_the_intervals(lengths, mask, window):
    case = Case(2, *lengths, mask=mask, window=window)
    mask = case.build_mask().bind(case.B, case.Tq, case.Tk, "cpu")
    blocks = block_mask(mask, case.Tk)
    is_visible = visible(mask, case.Tk)[:, 0]
    for b in range(is_visible.shape[0]):
        for i in range(-(-case.Tq // BLOCK)):
            partial = set(blocks.kv_indices[b, 0, i, : blocks.kv_num_blocks[b, 0, i]].tolist())
            count = blocks.full_kv_num_blocks[b, 0, i]
            full = set(blocks.full_kv_indices[b, 0, i, :count].tolist())
            assert not partial & full
            for j in range(-(-case.Tk // BLOCK)):
                tile = is_visible[b, i * BLOCK : (i + 1) * BLOCK, j * BLOCK : (j + 1) * BLOCK]
                assert j not in full or (bool(tile.all()) and tile.shape == (BLOCK, BLOCK))
                assert not tile.any() or j in partial | full


@pytest.mark.gpu
def test_flex_scores_never_exist_without_compiling():
    T = 16384
    q, k, v = torch.randn(3, 1, T, 4, 64, device="cuda", dtype=BF16)
    mask = Mask.causal().bind(1, T, T, "cuda")
    before = torch.cuda.max_memory_allocated()
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
        attention(q, k, v, mask=mask, backend="flex")
    assert torch.cuda.max_memory_allocated() - before < 4 * T * T


@pytest.mark.gpu
@needs_flash_attn[1]
def test_flash_attn_refuses_free_intervals():
    q, k, v, _ = inputs(FREE[0], BF16)
    with pytest.raises(ValueError, match="use attention=flash"):
        attention(q, k, v, mask=FREE[0].build_mask(), backend="flash_attn")
    attention(q, q, q, mask=Mask.causal(), backend="flash_attn")
    assert kernels_run()["flash_attn"].startswith("flash-attention-")


NEEDS = "does not run on GPUs of"


@pytest.mark.parametrize(
    ("installed", "wanted", "major", "refused"),
    [
        *(("43", "auto", 8, f" 4 or 3 {NEEDS}"), ("42", "4", 8, f" 4 {NEEDS}")),
        *(("2", "3", 9, " 3 is not installed"), ("", "auto", 9, " is not installed")),
        ("3", "auto", 10, f" 3 {NEEDS} compute capability 10"),
        *((x, "auto", major, None) for x, major in (("42", 8), ("32", 10), ("4", 9))),
    ],
)
def test_flash_attn_needs_a_version_for_the_gpu(monkeypatch, installed, wanted, major, refused):
    monkeypatch.setattr(flash_attn, "INSTALLED", tuple(installed))
    gpu = SimpleNamespace(major=major)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    request = AttentionRequest(torch.device("cuda"), BF16, 64, None, {"version": wanted})
    answer = flash_attn.FlashAttn().refusal(request)
    assert answer is None if refused is None else answer.startswith(f"FlashAttention{refused}")
