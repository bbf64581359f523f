"""Muon: what it orthogonalizes, that every matrix stands alone, and its memory."""

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
from tests.largest_tensor import LiveMemory
from tests.processes import ROOT, finished
from tests.training.sample_run import sample_run

ODD = GPTConfig(
    vocab_size=37, layers=2, channels=24, heads=3, kv_heads=1, ffn=35, qkv_bias=True, tied=False
)


def config(stored: str = "fp32", **changes: object) -> Run:
    memory = MemoryConfig("fast", optimizer_state=stored)
    return sample_run(
        TrainConfig(
            **{"lr": 1e-2, "model": ODD} | changes,  # type: ignore[arg-type]
            memory=memory,
            optimizer=OptimizerConfig("muon"),
        ),
        "cpu",
    )


def model_and_muon(stored: str = "fp32", **changes: object) -> tuple[GPT, muon.Muon]:
    torch.manual_seed(0)
    model = GPT(ODD, "naive")
    optimizer = build(model, config(stored, **changes))
    assert isinstance(optimizer, muon.Muon)
    return model, optimizer


def give_gradients(model: torch.nn.Module, step: int, size: float = 1.0) -> None:
    draw = torch.Generator().manual_seed(step)
    for p in model.parameters():
        p.grad = size * torch.randn(p.shape, generator=draw).to(p.device)


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
    model, optimizer = model_and_muon()
    names = [n for n, p in model.named_parameters() if "blocks." in n and p.ndim == 2]
    alone = {
        name: [
            torch.nn.Parameter(x.clone()) for x in split(name, model.get_parameter(name).detach())
        ]
        for name in names
    }
    everything = [x for matrices in alone.values() for x in matrices]
    reference = torch.optim.Muon(
        everything, lr=1e-2, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"
    )
    for step in range(3):
        give_gradients(model, step)
        for name, matrices in alone.items():
            gradient = model.get_parameter(name).grad
            assert gradient is not None
            for x, part in zip(matrices, split(name, gradient), strict=True):
                x.grad = part.clone()
        optimizer.step()
        reference.step()
    start = dict(model_and_muon()[0].named_parameters())
    for name, matrices in alone.items():
        want = torch.cat(matrices)
        error = (model.get_parameter(name) - want).norm() / (want - start[name]).norm()
        assert error < 0.01, name  # Newton-Schulz is in bf16


def test_the_rest_moves_as_with_adamw():
    model, optimizer = model_and_muon()
    twin = model_and_muon()[0]
    adamw = build(twin, sample_run(TrainConfig(lr=1e-2, model=ODD), "cpu"))
    for step in range(3):
        for m, o in ((model, optimizer), (twin, adamw)):
            give_gradients(m, step)
            o.step()
    for name, p in twin.named_parameters():
        if name in ("embed.weight", "head.weight") or p.ndim == 1:
            assert torch.equal(model.get_parameter(name), p), name


def trained(stored: str = "fp32") -> dict[str, Tensor]:
    """The weights of ODD after five clipped steps."""
    model, optimizer = model_and_muon(stored)
    for step in range(5):
        give_gradients(model, step)
        clip_gradients(optimizer, 1.0)
        optimizer.step()
    return {name: p.detach() for name, p in model.named_parameters()}


def test_stored_momentum_changes_little():
    weights, start = trained(), dict(model_and_muon()[0].named_parameters())
    on_host, in_bf16 = trained("host"), trained("bf16")
    for name, p in weights.items():
        assert torch.equal(p, on_host[name])
        assert (p - in_bf16[name]).norm() < 0.05 * (p - start[name]).norm()


def test_clipping_acts_on_momentum_as_on_averages():
    """Gradients far above the norm equal those that have been clipped before."""
    (model, optimizer), (twin, its_optimizer) = model_and_muon(), model_and_muon()
    for step, size in enumerate((100.0, 0.01, 30.0)):
        give_gradients(model, step, size)
        give_gradients(twin, step, size)
        norm = clip_gradients(optimizer, 1.0)
        assert float(norm) == pytest.approx(
            float(torch.nn.utils.clip_grad_norm_(twin.parameters(), 1.0)), rel=1e-5
        )
        optimizer.step()
        its_optimizer.step()
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        assert (a - b).abs().max() < 1e-4


@pytest.mark.parametrize("name", ["adamw", "muon"])
@pytest.mark.parametrize("stored", ["fp32", "bf16"])
def test_the_planner_knows_the_state(name, stored):
    memory = MemoryConfig("fast", optimizer_state=stored)
    run = sample_run(TrainConfig(model=ODD, memory=memory, optimizer=OptimizerConfig(name)), "cpu")
    model = GPT(ODD, "naive")
    optimizer = build(model, run)
    give_gradients(model, 0)
    optimizer.step()
    tensors = [x for state in optimizer.state.values() for k, x in state.items() if k != "step"]
    assert sum(x.nbytes for x in tensors) == peak_memory.optimizer_state(run.workload)[0]
    parts = list(step_time.block_matrices(ODD.blocks()).elements())
    if isinstance(optimizer, muon.Muon):
        rows = [(n, p.shape[1]) for p, sizes in optimizer.parts.items() for n in sizes]
        assert sorted(rows) == sorted(parts)


def live_bytes(preset: str, stored: str) -> tuple[float, int]:
    """Return the predicted workspace of an update, and the most live bytes of one."""
    keys = [f"model={preset}", "model.vocab_size=64", "model.layers=9"]
    run = config(stored, model=cli.compose("train", keys).config.model)
    with torch.device("meta"):
        model = GPT(run.workload.model, "naive")
    optimizer = build(model, run)
    assert isinstance(optimizer, muon.Muon)
    for p in optimizer.parts:
        p.grad = torch.zeros_like(p)
    optimizer.step()
    with LiveMemory() as live:
        optimizer.step()
    return peak_memory.update_workspace(run.workload), live.peak


def test_an_updates_memory_is_predicted() -> None:
    # In a process of its own: tensors that other tests of this one leave would count
    script = (
        "from tests.training.optimizers.test_muon import live_bytes\n"
        "for preset in ('124m', '1b', '8b'):\n"
        "    for stored in ('fp32', 'bf16'): print(*live_bytes(preset, stored))"
    )
    process = finished("-c", [script], ROOT)
    lines = process.stdout.splitlines()
    assert len(lines) == 6, process.stderr
    for line in lines:
        predicted, peak = map(float, line.split())
        assert predicted / 1.35 < peak <= 1.001 * predicted
