"""Experts: what the router decides, the balancing loss, memory, parameters, and what is refused."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from longctx import cli
from longctx.model import GPT, GPTConfig, experts, packed
from longctx.model.lora import LoraLinear
from longctx.spec.experts import ExpertsConfig
from longctx.spec.model_config import LoraConfig
from longctx.spec.parts import Pass
from tests.live_memory import LiveMemory
from tests.model.test_recompute import FEW

MODEL = GPTConfig(
    **{"vocab_size": 61, "layers": 3, "channels": 24, "heads": 6, "kv_heads": 2, "ffn": 40},
    **{"init_std": 0.3, "experts": ExpertsConfig(8, 3, ffn=16, dense_layers=[1], balance=0.3)},
)
TOKENS = torch.randint(61, (2, 150), generator=torch.Generator().manual_seed(2))
TARGETS = TOKENS.roll(-1, 1).masked_fill(torch.arange(150) % 5 == 0, -100)


def make(memory: str = "fast", config: GPTConfig = MODEL) -> GPT:
    torch.manual_seed(0)
    return GPT(config, "flash", FEW[memory])


def gradients(model: GPT) -> dict[str, Tensor]:
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert len(found) == sum(p.requires_grad for p in model.parameters())
    return found


def chances_of(model: GPT) -> list[Tensor]:
    """Return the probabilities of all experts in each layer, with their graph."""
    seen: list[Tensor] = []
    with ExitStack() as stack:
        for block in model.blocks:
            if isinstance(block.mlp, experts.Experts):
                router = block.mlp.router
                stack.enter_context(router.register_forward_hook(lambda _, __, z: seen.append(z)))
        model(TOKENS)
    if model.config.experts.router == "softmax":
        return [z.softmax(-1) for z in seen]
    return [z.sigmoid() / z.sigmoid().sum(-1, keepdim=True) for z in seen]


@pytest.mark.parametrize("router", ["softmax", "sigmoid_bias"])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("memory", FEW)
def test_gradients_have_the_balancing_loss_of_all_layers(memory, reduction, router):
    routed = replace(MODEL.experts, router=router)
    model = make(memory, replace(MODEL, experts=routed))
    plain = make(config=replace(MODEL, experts=replace(routed, balance=0.0)))
    scale = torch.tensor(0.7)
    targets = int((TARGETS != -100).sum()) if reduction == "sum" else 1
    alone = plain(TOKENS, TARGETS, reduction=reduction, scale=scale)
    p = torch.cat(chances_of(plain))
    chosen = torch.zeros_like(p).scatter(1, p.topk(3).indices, 1.0)
    # E · Σ_e f_e P_e over the tokens of all layers
    balance = p.shape[1] * (chosen.mean(0) * p.mean(0)).sum()
    want = alone + 0.3 * balance * targets * scale
    # Another forward before backward does not change what is balanced
    loss = model(TOKENS, TARGETS, reduction=reduction, scale=scale)
    model(TOKENS.flip(1), TARGETS)
    torch.testing.assert_close(loss, alone, rtol=1e-5, atol=0)
    (3 * loss).backward()
    (3 * want).backward()
    expected = gradients(plain)
    for name, grad in gradients(model).items():
        assert (grad - expected[name]).abs().max() < 2e-5 * expected[name].abs().max(), name


def test_each_thread_balances_its_own_forward():
    with experts.balancing(experts.Balance(0.3)), ThreadPoolExecutor(1) as pool:
        assert pool.submit(experts.running).result() is None


def test_experts_without_tokens_have_no_gradient():
    module = MODEL.block(0).mlp.build()
    for p in module.parameters():
        torch.nn.init.normal_(p, std=0.5)
    module.router.weight.data[3] = 0
    module.router.weight.data[3, 0] = -100.0
    x = torch.randn(50, 24)
    x[:, 0] = 1
    module(x).sum().backward()
    assert not module.gate_up.weight.grad.unflatten(0, (8, -1))[3].any()
    assert module.gate_up.weight.grad.unflatten(0, (8, -1))[2].any()


@pytest.mark.parametrize("clamp", [None, 0.5])
def test_lora_of_experts_is_that_of_a_loop(clamp):
    torch.manual_seed(0)
    routed = ExpertsConfig(6, 2, ffn=16, clamp=clamp, biased=True)
    module = replace(MODEL, experts=routed).block(0).mlp.build()
    module.requires_grad_(False)
    module.gate_up, module.down = (LoraLinear(x, 3, 0.7) for x in (module.gate_up, module.down))
    for p in module.parameters():
        torch.nn.init.normal_(p, std=0.5)
    module.router.weight.data[4] = 0  # an expert without tokens
    module.router.bias.data[4] = -100
    x = torch.randn(30, 24, requires_grad=True)
    dy = torch.randn_like(x)
    trained = [x, *(p for p in module.parameters() if p.requires_grad)]

    def added(layer: LoraLinear, expert: int, x: Tensor) -> Tensor:
        each = (layer.weight, layer.bias, layer.lora_a, layer.lora_b)
        w, bias, a, b = (p.unflatten(0, (6, -1))[expert] for p in each)
        return w @ x + bias + 0.7 * b @ (a @ x)

    rows = []
    for row in x:
        chances, chosen = module.router(row).softmax(-1).topk(2)
        row_sum = torch.zeros(24)
        for weight, expert in zip(chances / chances.sum(), chosen.tolist(), strict=True):
            gate, up = added(module.gate_up, expert, row).chunk(2)
            inner = torch.nn.functional.silu(gate) * up
            if clamp is not None:
                gate, up = gate.clamp(max=clamp), up.clamp(-clamp, clamp)
                inner = gate * torch.sigmoid(1.702 * gate) * (up + 1)
            row_sum = row_sum + weight * added(module.down, expert, inner)
        rows.append(row_sum)
    want = torch.stack(rows)
    torch.testing.assert_close(module(x), want, rtol=1e-4, atol=1e-4)
    expected = torch.autograd.grad(want, trained, dy)
    for found, gradient in zip(torch.autograd.grad(module(x), trained, dy), expected, strict=True):
        assert (found - gradient).abs().max() < 1e-5 * gradient.abs().max()


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize(("activation", "clamp"), [("silu", None), ("silu", 7.0), ("gelu_tanh", 0)])
def test_lora_of_experts_in_16_bits_is_near_fp32(device, activation, clamp):
    torch.manual_seed(0)
    routed = ExpertsConfig(8, 2, ffn=64, clamp=clamp, biased=True, beside=clamp == 0)
    part = replace(MODEL, channels=64, heads=4, activation=activation, experts=routed).block(0).mlp
    with torch.device(device):
        module = part.build().requires_grad_(False)
        for name in ("gate_up", "down"):
            layer = getattr(module, name)
            layer.weight = packed.parameter(layer.weight)
            setattr(module, name, LoraLinear(layer, 8, 2.0))
            torch.nn.init.normal_(getattr(module, name).lora_b, std=0.1)
        x = torch.randn(200, 64, requires_grad=True)
    routing = module.chosen(module.router(x.detach()))
    module.chosen = lambda logits: routing  # a rounded router chooses others for a few tokens
    trained = [x, *(p for p in module.parameters() if p.requires_grad)]

    def found() -> list[Tensor]:
        y = module(x)
        return [y, *torch.autograd.grad(y, trained, torch.ones_like(y))]

    with torch.autocast(device, torch.bfloat16):
        rounded = found()
    assert all(p.dtype == torch.float32 for p in rounded[1:])
    for in_16_bits, in_fp32 in zip(rounded, found(), strict=True):
        assert (in_16_bits.float() - in_fp32).norm() < 0.02 * in_fp32.norm()


def test_autocast_computes_in_16_bits():
    model = make()
    module, x = model.blocks[0].mlp, torch.randn(1, 50, 24)
    with torch.autocast("cpu", torch.bfloat16):
        y = module(x)
        assert torch.equal(y, module(x.bfloat16()))
    torch.testing.assert_close(y.float(), module(x), rtol=0.1, atol=0.1)
    with torch.autocast("cpu", torch.bfloat16):
        model(TOKENS, TARGETS).backward()
    assert all(p.dtype == torch.float32 for p in gradients(model).values())


def test_few_weights_multiply_a_token():
    model = make()
    assert sum(p.numel() for p in model.parameters()) == MODEL.parameters()
    attention, dense, expert, router = 24 * 24 * 2 + 24 * 16, 3 * 24 * 40, 3 * 24 * 16, 24 * 8
    active = 3 * attention + dense + 2 * (router + 3 * expert) + 61 * 24
    assert MODEL.matmul_parameters() == active
    assert MODEL.flops_per_token(0.0) == 6 * active
    added = LoraConfig(8, targets=["down"])
    assert added.parameters(MODEL) == 8 * (40 + 24 + 2 * 8 * (16 + 24))
    assert added.parameters(MODEL, of_token=True) == 8 * (40 + 24 + 2 * 3 * (16 + 24))


# Products of the right shapes, as a GPU's fused kernels hold memory
SHAPES: dict[str, Any] = {
    "grouped": lambda x, w, _: x.new_empty(len(x), w.shape[2]),
    "grouped_outer": lambda dy, x, ends, to: x.new_empty(len(ends) * dy.shape[1], len(x[0])).to(to),
    "gated": lambda x, _: x.new_empty(len(x), x.shape[1] // 2),
    "gated_backward": lambda x, dy, _: (torch.empty_like(x), torch.empty_like(dy)),
}


def take_shapes(monkeypatch: pytest.MonkeyPatch, clamp: float | None) -> None:
    """Put them in the place of products; a clamp has no kernel."""
    for name in [name for name in SHAPES if clamp is None or name.startswith("grouped")]:
        monkeypatch.setattr(experts, name, SHAPES[name])


@pytest.mark.parametrize(
    ("channels", "ffn", "count", "per_token", "tokens", "clamp", "router"),
    [
        (256, 96, 32, 4, 999, None, "softmax"),
        (256, 96, 32, 4, 999, None, "sigmoid_bias"),
        (256, 96, 64, 2, 40, None, "softmax"),
        (128, 448, 8, 2, 555, None, "softmax"),
        (128, 448, 8, 2, 555, 7.0, "softmax"),
    ],
)
def test_memory_is_predicted(channels, ffn, count, per_token, tokens, clamp, router, monkeypatch):
    take_shapes(monkeypatch, clamp)
    sizes = {"channels": channels, "heads": 4, "ffn": ffn}
    routed = ExpertsConfig(count, per_token, clamp=clamp, router=router)
    part = replace(MODEL, **sizes, experts=routed).block(0).mlp
    module = part.build()
    x = torch.randn(tokens, channels, dtype=torch.bfloat16, requires_grad=True)
    dy = torch.randn_like(x)
    through = Pass(tokens, tokens, "none", 2, 0, weight_copy=2, gradient=4, is_fused=True)
    with LiveMemory() as live:
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
            y = module(x)
        held = sum(live.held.values()) - y.nbytes
        assert held == pytest.approx(part.saved(through), rel=0.02)
        live.peak = 0
        del y
    with LiveMemory() as live, torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        y = module(x)
        before, live.peak = sum(live.held.values()), 0
        y.backward(dy)
        assert live.peak - before == pytest.approx(part.backward(through), rel=0.05)
    with LiveMemory() as live, torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        module(x)
    weights = 2 * max(linear.weights for linear in part.linears)
    assert live.peak - weights <= 1.02 * part.forward(through)


@pytest.mark.parametrize(
    ("base", "rank", "ffn", "tokens", "clamp"),
    [
        (None, None, 128, 999, 7.0),  # gated in clamped formulas
        ("nf4", 8, 448, 555, None),
        ("nf4", None, 192, 40, None),  # the unpacked weights take most
        (None, 8, 64, 999, None),
    ],
)
def test_memory_of_frozen_experts_is_predicted(base, rank, ffn, tokens, clamp, monkeypatch):
    take_shapes(monkeypatch, clamp)
    sizes = {"channels": 256, "heads": 4, "ffn": ffn}
    part = replace(MODEL, **sizes, experts=ExpertsConfig(32, 4, clamp=clamp)).block(0).mlp
    module = part.build().bfloat16().requires_grad_(False)
    for name in ("gate_up", "down"):
        layer = getattr(module, name)
        layer.weight = layer.weight if base is None else packed.parameter(layer.weight)
        setattr(module, name, layer if rank is None else LoraLinear(layer, rank, 1.0))
    x = torch.randn(tokens, 256, dtype=torch.bfloat16, requires_grad=True)
    dy = torch.randn_like(x)
    of_pass = {"is_fused": True, "adapted": ("qkv",) if rank is None else ("gate_up", "down")}
    # Unpacking is one operation here, without the codes that it copies on a GPU
    through = Pass(tokens, tokens, "none", 2, 0, 0, 0, **of_pass, unpacked=2 if base else 0)
    with LiveMemory() as live, torch.no_grad():
        module(x)
    assert live.peak == pytest.approx(part.forward(through), rel=0.05)
    with LiveMemory() as live:
        y = module(x)
        held = sum(live.held.values())
        assert held - y.nbytes == pytest.approx(part.saved(through), rel=0.02)
        live.peak = 0
        y.backward(dy)
    # The planner adds gradients of A and B
    added = sum(p.nbytes for p in module.parameters() if p.requires_grad)
    assert live.peak - held == pytest.approx(part.backward(through) + added, rel=0.05)


def test_odd_ranks_and_fp8_of_experts_are_refused():
    config = cli.compose("train", ["model=tiny", "init=folder", "lora.rank=12"]).config
    with pytest.raises(ValueError, match=r"lora\.rank=12: experts take a multiple of 8"):
        config.check_model(MODEL)
    of_attention = replace(config, lora=replace(config.lora, targets=["qkv"]))
    of_attention.check_model(MODEL)
    replace(config, lora=replace(config.lora, rank=8)).check_model(MODEL)
    with pytest.raises(ValueError, match=r"precision=fp8: .*model\.experts\.count=8"):
        replace(of_attention, precision="fp8").check_model(MODEL)
