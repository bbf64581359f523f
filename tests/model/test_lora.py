"""LoRA: it begins as the base, learns alone, merges into a plain model, and peft reads it."""

from typing import Any

import pytest
import torch

from longctx.hf import export
from longctx.model import GPT, GPTConfig, lora
from longctx.spec.experts import ExpertsConfig
from longctx.spec.model_config import LORA_TARGETS, LoraConfig
from tests.model.test_recompute import FEW

SIZES: dict[str, Any] = dict(vocab_size=61, layers=2, channels=24, heads=6, kv_heads=2, ffn=40)
EXPERTS = ExpertsConfig(4, 2, ffn=16, shared=1, biased=True)
TOKENS = torch.arange(300).view(2, 150) % 61


def with_lora(config: LoraConfig, memory: str = "fast", **changes: Any) -> GPT:
    torch.manual_seed(0)
    sizes = GPTConfig(**SIZES, qkv_bias=True, **changes)
    model = lora.add(GPT(sizes, "flash", FEW[memory]), config)
    for name, p in model.named_parameters():
        if name.endswith("lora_b"):
            torch.nn.init.normal_(p, std=0.1)
    return model


@pytest.mark.parametrize(
    ("targets", "changes", "memory"),
    [
        pytest.param(*case, memory, marks=[] if n % 3 == m % 3 else pytest.mark.slow)
        for n, case in enumerate(
            [
                *((["qkv", "down"], {}), (list(LORA_TARGETS), {}), (["gate_up"], {})),
                *((targets, {"experts": EXPERTS}) for targets in (["down"], list(LORA_TARGETS))),
            ]
        )
        for m, memory in enumerate(FEW)
    ],
)
def test_only_adapters_learn_with_the_gradients_of_the_sum(targets, changes, memory):
    config = LoraConfig(rank=3, scaling=1.5, targets=targets)
    model = with_lora(config, memory, **changes)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert all(name.endswith(("lora_a", "lora_b")) for name in trained)
    assert sum(p.numel() for p in trained.values()) == config.parameters(model.config)
    model(TOKENS, TOKENS.roll(-1, 1)).backward()
    assert all(p.grad is None for name, p in model.named_parameters() if name not in trained)

    twin = lora.merge(with_lora(config, **changes))
    twin(TOKENS, TOKENS.roll(-1, 1)).backward()
    for name, p in trained.items():
        layer = name.rpartition(".")[0]
        of: Any = model.get_submodule(layer)
        weights = twin.get_submodule(layer).weight.grad, of.lora_a, of.lora_b
        # Each expert has its own rows
        dw, a, b = (x.unflatten(0, (of.experts, -1)) for x in weights)
        expected = config.scaling * (b.mT @ dw if name.endswith("a") else dw @ a.mT)
        torch.testing.assert_close(p.grad, expected.flatten(0, 1), rtol=1e-4, atol=1e-6)


def test_frozen_weights_may_be_16_bits_wide():
    torch.manual_seed(0)
    model = GPT(GPTConfig(**SIZES))
    model.cast(torch.bfloat16)
    lora.add(model, LoraConfig(rank=2))
    named = [(x.split(".")[-1], p) for x, p in model.named_parameters() if "norm" not in x]
    dtypes = {name: p.dtype for name, p in named}
    assert dtypes == {"weight": torch.bfloat16, "lora_a": torch.float32, "lora_b": torch.float32}
    assert model.norm.weight.dtype == torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        model(TOKENS, TOKENS.roll(-1, 1)).backward()
    grads = [p.grad for name, p in model.named_parameters() if name.endswith("lora_b")]
    assert all(g is not None and g.dtype == torch.float32 and g.abs().sum() > 0 for g in grads)


@pytest.mark.parametrize("changes", [{}, {"experts": EXPERTS}])
def test_a_later_run_adds_to_an_earlier_one(changes):
    first, second = LoraConfig(2, targets=["gate_up"]), LoraConfig(3, 0.7, rslora=True)
    earlier, later = with_lora(first, **changes), with_lora(second, **changes)
    weights = later.state_dict()
    twin = lora.merge(with_lora(first, **changes))
    merged = {name: lora.MergedRows(name, weights, second.factor) for name in twin.state_dict()}
    for name, p in twin.named_parameters():
        rows = [merged[name][at : min(at + 7, len(p))] for at in range(0, len(p), 7)]
        p.data += torch.cat(rows) - weights[name]
    export.stack(earlier, weights, second)
    torch.testing.assert_close(earlier(TOKENS), twin(TOKENS))
    with lora.off(earlier), lora.off(later):
        torch.testing.assert_close(earlier(TOKENS), later(TOKENS))
