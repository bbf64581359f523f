"""flash_attn: the versions found are the versions that import; on a GPU that has one, the
correctness rule.
"""

import importlib
from types import SimpleNamespace

import pytest
import torch

from longctx.attention import Mask, attention, backends, flash_attn, kernels_run
from longctx.attention.flash_attn import APIS, INSTALLED
from longctx.attention.registry import Request
from tests.attention.rule import FREE, GRID, Case, check, inputs

needs_it = pytest.mark.skipif(
    not INSTALLED or not torch.cuda.is_available(), reason="needs FlashAttention and a GPU"
)


def test_installed_versions_import():
    for version in INSTALLED:
        assert callable(importlib.import_module(APIS[version][0]).flash_attn_varlen_func)
    if not torch.cuda.is_available():
        assert "CUDA GPU" in backends()["flash_attn"]


@needs_it
@pytest.mark.gpu
@pytest.mark.parametrize(
    "case", [Case(c.B, c.Tq, c.Tk, c.Hq, c.Hkv, 64, c.mask, c.window) for c in GRID], ids=str
)
def test_rule(case):
    check(case, "flash_attn", torch.bfloat16)


@needs_it
@pytest.mark.gpu
def test_free_intervals_are_refused():
    q, k, v, _ = inputs(FREE[0], torch.bfloat16)
    with pytest.raises(ValueError, match="use attention=flash"):
        attention(q, k, v, mask=FREE[0].build_mask(), backend="flash_attn")
    attention(q, q, q, mask=Mask.causal(), backend="flash_attn")
    assert kernels_run()["flash_attn"].startswith("flash-attention-")


@pytest.mark.parametrize(
    ("installed", "wanted", "generation", "refused"),
    [
        (("4", "3"), "auto", 8, "FlashAttention 4 or 3 does not run on GPUs of"),
        (("4", "2"), "4", 8, "FlashAttention 4 does not run on GPUs of"),
        (("2",), "3", 9, "FlashAttention 3 is not installed"),
        ((), "auto", 9, "FlashAttention is not installed"),
        (("3",), "auto", 10, "FlashAttention 3 does not run on GPUs of compute capability 10"),
        (("4", "2"), "auto", 8, None),
        (("3", "2"), "auto", 10, None),
        (("4",), "auto", 9, None),
    ],
)
def test_gpu_without_a_fitting_version_is_refused(
    monkeypatch, installed, wanted, generation, refused
) -> None:
    monkeypatch.setattr(flash_attn, "INSTALLED", installed)
    gpu = SimpleNamespace(major=generation)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    request = Request(torch.device("cuda"), torch.bfloat16, 64, None, {"version": wanted})
    answer = flash_attn.FlashAttn().refusal(request)
    assert answer is None if refused is None else (answer or "").startswith(refused)
