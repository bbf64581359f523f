"""AdamW: which parameters decay, what clipping does, and where its averages are kept."""

import copy
import math

import pytest
import torch

from longctx.config.layout_config import MemoryConfig
from longctx.config.train_config import TrainConfig
from longctx.model import GPT, GPTConfig
from longctx.training.module import clip_gradients
from longctx.training.optimizers import build
from tests.largest_tensor import LiveMemory, tensors
from tests.training.sample_run import sample_run


def config(**changes: object):
    return sample_run(TrainConfig(**changes), "cpu")  # type: ignore[arg-type]


def test_matrices_decay_and_vectors_do_not():
    model = GPT(GPTConfig(vocab_size=40, layers=2, qkv_bias=True, qk_norm="head"))
    decayed, free = build(model, config(weight_decay=0.3)).param_groups
    assert (decayed["weight_decay"], free["weight_decay"]) == (0.3, 0.0)
    assert all(p.ndim == 2 for p in decayed["params"])
    assert all(p.ndim == 1 for p in free["params"])
    assert len(decayed["params"]) + len(free["params"]) == len(list(model.parameters()))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("stored", ["fp32", "bf16", "host"])
@pytest.mark.parametrize("clip", [None, 1.0])
def test_every_optimizer_clips_as_torch_does(stored, clip, device):
    """Three steps on gradients far above `clip`, and one far below."""
    torch.manual_seed(0)
    theirs = torch.nn.Linear(70, 30)
    ours = copy.deepcopy(theirs).to(device)
    run = config(lr=1e-2, memory=MemoryConfig("fast", optimizer_state=stored))
    optimizer, limit = build(ours, run), math.inf if clip is None else clip
    groups = [{"params": [theirs.weight]}, {"params": [theirs.bias], "weight_decay": 0.0}]
    keys = {"betas": run.config.betas, "weight_decay": run.config.weight_decay}
    reference = torch.optim.AdamW(groups, lr=1e-2, **keys)
    for size in (30.0, 3.0, 300.0, 0.01):
        for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
            q.grad = size * torch.randn(q.shape)
            p.grad = q.grad.to(device, copy=True)
        norm = torch.nn.utils.clip_grad_norm_(theirs.parameters(), limit)
        assert float(clip_gradients(optimizer, clip)) == pytest.approx(float(norm), rel=1e-5)
        optimizer.step()
        reference.step()
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert (p.cpu() - q).abs().max() < (1e-3 if stored == "bf16" else 1e-6)


def trained(stored: str):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(7, 33), torch.nn.Tanh(), torch.nn.Linear(33, 1))
    settings = config(memory=MemoryConfig("fast", optimizer_state=stored))
    x = torch.randn(50, 7)
    optimizer = build(model, settings)
    for _ in range(12):
        optimizer.zero_grad()
        (model(x) - x.sum(dim=1, keepdim=True).sin()).square().mean().backward()
        optimizer.step()
    return model, optimizer


@pytest.mark.parametrize("slice_of", [64, 2**26])
def test_averages_on_the_host_change_no_bit(slice_of, monkeypatch):
    monkeypatch.setattr("longctx.training.optimizers.adamw.SLICE", slice_of)
    for a, b in zip(trained("host")[0].parameters(), trained("fp32")[0].parameters(), strict=True):
        assert torch.equal(a, b)


def test_loading_makes_no_fp32_copy_of_bf16_state():
    model, optimizer = trained("bf16")
    saved, weight = optimizer.state_dict(), model[0].weight
    resumed = build(model, config(memory=MemoryConfig("fast", optimizer_state="bf16")))
    with LiveMemory() as live:
        resumed.load_state_dict(saved)
    assert live.peak <= 1.1 * sum(x.nbytes for x in tensors(saved["state"]))
    for name in ("exp_avg", "exp_avg_sq"):
        loaded, kept = resumed.state[weight][name], optimizer.state[weight][name]
        assert loaded.dtype == torch.bfloat16 and loaded.data_ptr() != kept.data_ptr()
        assert torch.equal(loaded, kept)
