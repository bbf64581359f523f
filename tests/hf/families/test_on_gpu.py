"""Every family in bf16 on a GPU: flash, recomputed and compiled, next to naive in fp32."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.shapes import settings_of
from longctx.attention import Mask
from longctx.hf.families import FAMILIES
from longctx.hf.model_folder import read_config
from longctx.model.gpt import build

pytestmark = pytest.mark.gpu
AGREE = Path(__file__).with_name("on_gpu.txt").read_text().split()
LENGTHS = (300, 17, 195)
WIDE: dict[str, Any] = {
    "hidden_size": 256,
    "head_dim": 64,
    "global_head_dim": 128,  # instead of 512, which flash has not
    "layers_block_type": ["attention", "moe", "attention", "mlp"],  # Mamba-2 takes fla-core
    "intermediate_size": 384,
    "sliding_window": 100,
    "max_position_embeddings": 1024,
    "initializer_range": 0.02,  # a larger one makes scores that no low precision can hold
}


def gradients(model: Any, tokens: Tensor, mask: Mask, dtype: torch.dtype) -> list[Tensor]:
    """The loss, and the gradient of each weight."""
    with torch.autocast("cuda", dtype, enabled=dtype != torch.float32):
        loss = model(tokens[:, :-1], tokens[:, 1:], mask)
    loss.backward()
    trained = (weight.grad for weight in model.parameters() if weight.grad is not None)
    return [loss.detach(), *(grad.float() for grad in trained)]


def error(found: list[Tensor], expected: list[Tensor]) -> tuple[float, float]:
    """Relative errors of the loss and of all gradients."""
    pairs = list(zip(found, expected, strict=True))
    wrong = sum(float((x - y).norm() ** 2) for x, y in pairs[1:])
    whole = sum(float(y.norm() ** 2) for _, y in pairs[1:])
    return float((found[0] - expected[0]).abs() / expected[0]), (wrong / whole) ** 0.5


@pytest.mark.parametrize(
    ("kind", "way"),
    [
        *((kind, "never") for kind in (*AGREE, "mistral4") if kind in FAMILIES),
        *((kind, "always") for kind in AGREE),
    ],
)
def test_bf16_is_as_near_as_naive(kind, way, tmp_path):
    settings = settings_of(kind)
    twice = {"num_experts": "num_local_experts", "head_dim": "qk_rope_head_dim"}  # of one number
    settings = {x: y for x, y in settings.items() if twice.get(x) not in settings}
    settings |= {x: y for x, y in WIDE.items() if x in settings}
    if kind == "gemma4_text":
        settings["hidden_size_per_layer_input"] *= way == "always"
    (tmp_path / "config.json").write_text(json.dumps(settings))
    config = read_config(tmp_path, way)
    tokens = torch.randint(301, (1, sum(LENGTHS) + 1), device="cuda")
    numbers = torch.arange(len(LENGTHS)).repeat_interleave(torch.tensor(LENGTHS)).cuda()
    mask = Mask.documents(numbers[None])

    def model_of(attention: str, memory: str) -> Any:
        with torch.device("meta"):
            model = build(config, attention, memory)
        model.to_empty(device="cuda")
        torch.manual_seed(0)
        model.init_weights()
        for name, weight in model.named_parameters() if kind == "gemma4_text" else ():
            weight.data.mul_(0.1 if "q_norm" in name else 1.0)  # its scores are not divided by √D
        return model.train()

    exact = gradients(model_of("naive", "fast"), tokens, mask, torch.float32)
    low = error(gradients(model_of("naive", "fast"), tokens, mask, torch.bfloat16), exact)
    model = model_of("flash", "balanced")
    if way == "never":
        model.compile_blocks()
    found = error(gradients(model, tokens, mask, torch.bfloat16), exact)
    print(kind, way, *(f"{x:.1e}" for x in (*found, *low)))
    # In bf16 some tokens choose other experts, whoever computes them
    chosen = (5e-3, 0.1) if any("expert" in key for key in settings) else (1e-3, 1e-3)
    assert found[0] < 2 * low[0] + chosen[0]
    assert found[1] < 2 * low[1] + chosen[1]
