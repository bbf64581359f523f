"""AdamW and Muon: which parameters decay, what clipping does, where averages are kept, memory."""

import copy
import math

import pytest
import torch
from torch import Tensor

from longctx import cli
from longctx.config.doors import OptimizerConfig
from longctx.config.layout_config import MemoryConfig
from longctx.config.train_config import TrainConfig
from longctx.model import GPT, GPTConfig
from longctx.planner import peak_memory, step_time
from longctx.training.module import clip_gradients
from longctx.training.optimizers import build, muon
from longctx.training.run import Run
from tests.live_memory import LiveMemory, tensors
from tests.processes import ROOT, finished
from tests.training.sample_run import sample_run

ODD = GPTConfig(
    vocab_size=37, layers=2, channels=24, heads=3, kv_heads=1, ffn=35, qkv_bias=True, tied=False
)
NAMES = ["adamw", "muon"]


def config(name: str, stored: str = "fp32", **changes: object) -> Run:
    keys = {"lr": 1e-2, "model": ODD, "optimizer": OptimizerConfig.of(name)} | changes
    return sample_run(TrainConfig(memory=MemoryConfig("fast", optimizer_state=stored), **keys))


def model_and(name: str, stored: str = "fp32") -> tuple[GPT, torch.optim.Optimizer]:
    """Return ODD, the same at each call, and its optimizer."""
    torch.manual_seed(0)
    model = GPT(ODD, "naive")
    return model, build(model, config(name, stored))


def give_gradients(model: torch.nn.Module, step: int, size: float = 1.0) -> None:
    draw = torch.Generator().manual_seed(step)
    for p in model.parameters():
        p.grad = size * torch.randn(p.shape, generator=draw).to(p.device)


def trained(name: str, stored: str = "fp32") -> tuple[GPT, torch.optim.Optimizer]:
    """Return ODD and its optimizer after five clipped steps."""
    model, optimizer = model_and(name, stored)
    for step in range(5):
        give_gradients(model, step)
        clip_gradients(optimizer, 1.0)
        optimizer.step()
    return model, optimizer


def test_matrices_decay_and_vectors_do_not():
    model = GPT(GPTConfig(vocab_size=40, layers=2, qkv_bias=True, qk_norm="head"))
    decayed, free = build(model, config("adamw", weight_decay=0.3)).param_groups
    assert (decayed["weight_decay"], free["weight_decay"]) == (0.3, 0.0)
    assert [{p.ndim for p in group["params"]} for group in (decayed, free)] == [{2}, {1}]
    assert len(decayed["params"]) + len(free["params"]) == len(list(model.parameters()))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("stored", ["fp32", "bf16", "host"])
@pytest.mark.parametrize("clip", [None, 1.0])
def test_every_optimizer_clips_as_torch_does(stored, clip, device):
    """Three steps on gradients far above `clip`, and one far below."""
    torch.manual_seed(0)
    theirs = torch.nn.Linear(70, 30)
    ours = copy.deepcopy(theirs).to(device)
    run = config("adamw", stored)
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


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("slice_of", [64, 2**26])
def test_stored_averages_change_little(slice_of, name, monkeypatch):
    monkeypatch.setattr("longctx.training.optimizers.adamw.SLICE", slice_of)
    found = (trained(name, stored)[0] for stored in ("fp32", "host", "bf16"))
    every = (model.parameters() for model in (model_and(name)[0], *found))
    for start, p, on_host, in_bf16 in zip(*every, strict=True):
        assert torch.equal(p, on_host)
        assert (p - in_bf16).norm() < 0.05 * (p - start).norm()


def test_loading_makes_no_fp32_copy_of_bf16_state():
    model, optimizer = trained("adamw", "bf16")
    saved, weight = optimizer.state_dict(), model.embed.weight
    resumed = build(model, config("adamw", "bf16"))
    with LiveMemory() as live:
        resumed.load_state_dict(saved)
    assert live.peak <= 1.1 * sum(x.nbytes for x in tensors(saved["state"]))
    for name in ("exp_avg", "exp_avg_sq"):
        loaded, kept = resumed.state[weight][name], optimizer.state[weight][name]
        assert loaded.dtype == torch.bfloat16 and loaded.data_ptr() != kept.data_ptr()
        assert torch.equal(loaded, kept)


# Muon


def split(name: str, weight: Tensor) -> list[Tensor]:
    """The matrices of a weight of ODD."""
    if name.endswith("qkv.weight"):
        return list(weight.split((24, 8, 8)))
    return list(weight.split((35, 35))) if name.endswith("gate_up.weight") else [weight]


def test_a_gradient_of_zeros_is_no_direction():
    assert not muon.orthogonalized(torch.zeros(1, 3, 4, dtype=torch.bfloat16), 5).any()


@pytest.mark.parametrize("stack", [1, 1000, 2**24])
def test_each_matrix_moves_as_with_torchs_muon(stack, monkeypatch):
    monkeypatch.setattr("longctx.training.optimizers.muon.STACK", stack)
    model, optimizer = model_and("muon")
    alone = {
        name: [torch.nn.Parameter(x.clone()) for x in split(name, weight.detach())]
        for name, weight in model.named_parameters()
        if "blocks." in name and weight.ndim == 2
    }
    everything = [x for matrices in alone.values() for x in matrices]
    keys = {"lr": 1e-2, "weight_decay": 0.1, "adjust_lr_fn": "match_rms_adamw"}
    reference = torch.optim.Muon(everything, **keys)
    for step in range(3):
        give_gradients(model, step)
        for name, matrices in alone.items():
            gradient = model.get_parameter(name).grad
            assert gradient is not None
            for x, part in zip(matrices, split(name, gradient), strict=True):
                x.grad = part.clone()
        optimizer.step()
        reference.step()
    start = dict(model_and("muon")[0].named_parameters())
    for name, matrices in alone.items():
        want = torch.cat(matrices)
        error = (model.get_parameter(name) - want).norm() / (want - start[name]).norm()
        assert error < 0.01, name  # Newton-Schulz is in bf16


def test_the_rest_moves_as_with_adamw():
    (model, optimizer), (twin, adamw) = model_and("muon"), model_and("adamw")
    for step in range(3):
        for m, o in ((model, optimizer), (twin, adamw)):
            give_gradients(m, step)
            o.step()
    for name, p in twin.named_parameters():
        if name in ("embed.weight", "head.weight") or p.ndim == 1:
            assert torch.equal(model.get_parameter(name), p), name


def test_clipping_acts_on_momentum_as_on_averages():
    """Gradients far above the norm equal those that have been clipped before."""
    (model, optimizer), (twin, its_optimizer) = model_and("muon"), model_and("muon")
    for step, size in enumerate((100.0, 0.01, 30.0)):
        give_gradients(model, step, size)
        give_gradients(twin, step, size)
        norm = clip_gradients(optimizer, 1.0)
        its_norm = torch.nn.utils.clip_grad_norm_(twin.parameters(), 1.0)
        assert float(norm) == pytest.approx(float(its_norm), rel=1e-5)
        optimizer.step()
        its_optimizer.step()
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        assert (a - b).abs().max() < 1e-4


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("stored", ["fp32", "bf16"])
def test_the_planner_knows_the_state(name, stored, monkeypatch):
    model, optimizer = model_and(name, stored)
    model.embed.weight.grad = torch.ones_like(model.embed.weight)
    optimizer.step()  # all weights get a state, as a resume expects
    tensors = [x for state in optimizer.state.values() for k, x in state.items() if k != "step"]
    predicted = peak_memory.optimizer_state(config(name, stored).workload)
    assert sum(x.nbytes for x in tensors) == predicted[0]
    monkeypatch.setattr("longctx.training.optimizers.adamw.by_kernel", lambda p: True)
    assert optimizer.can_capture_update() == (name == "adamw")
    if isinstance(optimizer, muon.Muon):
        rows = [(n, p.shape[1]) for p, sizes in optimizer.parts.items() for n in sizes]
        assert sorted(rows) == sorted(step_time.block_matrices(ODD.blocks).elements())


def live_bytes(preset: str, stored: str) -> tuple[float, int]:
    """Return the predicted workspace of an update, and the most live bytes of one."""
    keys = [f"model={preset}", "model.vocab_size=64", "model.layers=9"]
    run = config("muon", stored, model=cli.compose("train", keys).config.model)
    with torch.device("meta"):
        model = GPT(run.workload.model, "naive")
    optimizer = build(model, run)
    for p in optimizer.parts:
        p.grad = torch.zeros_like(p)
    optimizer.step()
    with LiveMemory() as live:
        optimizer.step()
    return peak_memory.update_workspace(run.workload), live.peak


def test_an_updates_memory_is_predicted() -> None:
    # In a process of its own: tensors that other tests of this one leave would count
    script = (
        "from tests.training.optimizers.test_optimizers import live_bytes\n"
        "for preset in ('124m', '8b'):\n"
        "    for stored in ('fp32', 'bf16'): print(*live_bytes(preset, stored))"
    )
    process = finished("-c", [script], ROOT)
    lines = process.stdout.splitlines()
    assert len(lines) == 4, process.stderr
    for line in lines:
        predicted, peak = map(float, line.split())
        assert predicted / 1.35 < peak <= 1.001 * predicted
