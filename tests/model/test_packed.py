"""lora.base: packed weights are near those that they stand for, a model computes with what they
unpack to, and its loss is near that of the base in the precision of the run.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from bitsandbytes import functional
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from longctx.hf import model_folder
from longctx.model import GPT, GPTConfig, lora, packed
from longctx.model.gpt import build
from longctx.parallel import sharding
from longctx.spec.model_config import LoraConfig
from longctx.spec.parts import packed_width
from tests.live_memory import LiveMemory
from tests.model.test_recompute import FEW

SIZES: dict[str, Any] = dict(vocab_size=61, layers=2, channels=64, heads=4, kv_heads=2, ffn=192)
TOKENS = torch.arange(300).view(2, 150) % 61
EXPERTS = {"count": 4, "per_token": 2, "ffn": 64, "shared": 1}


def weight(rows: int, columns: int) -> Tensor:
    """Return a matrix with an outlier and a row of zeros."""
    torch.manual_seed(0)
    w = torch.randn(rows, columns) / columns**0.5
    w[0, 3], w[1] = 1.0, 0.0
    return w


def with_base(memory: str = "fast", **sizes: Any) -> GPT:
    """Return a model with LoRA on a base in nf4; the additions are not zero."""
    torch.manual_seed(0)
    model = GPT(GPTConfig.of_saved(SIZES | sizes), "flash", FEW[memory])
    lora.add(model, LoraConfig(rank=3, base="nf4"))
    torch.manual_seed(1)
    for layer in lora.layers(model):
        torch.nn.init.normal_(layer.lora_a, std=0.1)
        torch.nn.init.normal_(layer.lora_b, std=0.1)
    return model


def gradients(model: GPT) -> dict[str, Tensor]:
    """Return the gradients of the loss of TOKENS."""
    model(TOKENS, TOKENS.roll(-1, 1)).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("columns", [64, 192, 768])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nf4_is_as_near_as_in_qlora(columns, dtype):
    w = weight(7, columns).to(dtype)
    rows = packed.parameter(w)
    assert rows.shape == (7, packed_width(columns)) and rows.shape[1] % 16 == 0
    ours = packed.unpacked(rows, dtype).float()
    codes, state = functional.quantize_4bit(w, compress_statistics=True, quant_type="nf4")
    theirs = functional.dequantize_4bit(codes, state).float()
    assert (ours - w).norm() <= 1.02 * (theirs - w).norm()
    # half of the widest gap between two quantiles, and the rounding of the scales
    largest = w.float().view(-1, 64).abs().amax(1, keepdim=True)
    off = (ours - w).view(-1, 64).abs()
    assert (off <= 0.153 * largest + w.abs().max() / 255).all()
    assert (ours[1] == 0).all()


def test_rows_are_packed_alone():
    w = weight(6, 128)
    whole = packed.parameter(w)
    parts = torch.zeros_like(whole)
    for first in (0, 2, 3):
        sharding.write(parts, w[first : first + 3], first)
    assert torch.equal(parts, whole)


@pytest.mark.parametrize(
    ("memory", "sizes"),
    [
        *(("fast", {}), ("balanced", {"qkv_bias": True}), ("balanced", {"norms": "sandwich"})),
        *(("balanced", {"experts": EXPERTS}), ("fast", {"experts": EXPERTS})),
    ],
)
def test_gradients_are_those_of_the_unpacked_base(memory, sizes):
    model, twin = with_base(memory, **sizes), with_base(**sizes)
    for name, weight in list(twin.named_parameters()):
        if packed.is_packed(weight):
            plain = torch.nn.Parameter(packed.unpacked(weight, torch.float32), requires_grad=False)
            twin.get_submodule(name.removesuffix(".weight")).weight = plain
    found = gradients(model)
    assert all(name.endswith(("lora_a", "lora_b")) for name in found)
    torch.testing.assert_close(found, gradients(twin), rtol=0, atol=1e-6)


def test_under_autocast_and_compiled_it_learns():
    torch.manual_seed(0)
    model = GPT(GPTConfig(**SIZES), "naive")
    model.cast(torch.bfloat16)
    lora.add(model, LoraConfig(rank=2, base="nf4", targets=["qkv"]))
    packs = [name for name, p in model.named_parameters() if p.dtype == torch.uint8]
    assert len(packs) == 4 * SIZES["layers"] and model.embed.weight.dtype == torch.bfloat16

    def of(compiled: Callable[..., Any]) -> tuple[Tensor, Tensor]:
        block = model.blocks[0]
        x = torch.linspace(-1, 1, 2 * 5 * 64).view(2, 5, 64).bfloat16().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            y = compiled(block.mlp)(block.attention.qkv(x)[..., :64])
        (dx,) = torch.autograd.grad(y.float().square().sum(), x)
        return y, dx

    traced = partial(torch.compile, backend="aot_eager")  # inductor would take half a minute
    torch.testing.assert_close(of(traced), of(lambda mlp: mlp), rtol=0.02, atol=1e-3)


@pytest.mark.parametrize("sizes", [{}, {"experts": EXPERTS, "tied": False}])
def test_bytes_are_predicted(sizes):
    model = with_base(**sizes)
    frozen = sum(p.nbytes for p in model.parameters() if not p.requires_grad)
    assert LoraConfig(rank=3, base="nf4").frozen_bytes(model.config, each=4) == frozen
    # Memory that holds nothing yet, as in a dry run
    for p in filter(packed.is_packed, model.parameters()):
        p.fill_(255)
    model.init_weights()
    assert model(TOKENS).isfinite().all()


@pytest.mark.parametrize("by_transformers", ["never", "always"])
def test_loading_holds_no_wide_copy(tmp_path, by_transformers):
    torch.manual_seed(0)
    sizes: dict[str, Any] = dict(vocab_size=64, hidden_size=128, intermediate_size=256)
    heads: dict[str, Any] = dict(num_attention_heads=4, num_key_value_heads=2)
    theirs = LlamaForCausalLM(LlamaConfig(**sizes, **heads, num_hidden_layers=8)).bfloat16()
    theirs.save_pretrained(tmp_path)
    config = model_folder.read_config(tmp_path, by_transformers)
    with torch.device("meta"):
        model = build(config)
    added = LoraConfig(rank=1, base="nf4")
    lora.add(model.to(torch.bfloat16), added)
    with LiveMemory() as live:
        model.to_empty(device="cpu")
        model_folder.load_weights(model, tmp_path)
    # A model of transformers on "meta" gives names and shapes; it is counted, and takes no memory
    held = live.peak - (0 if config.has_kernels else 4 * config.parameters())
    own = sum(x.nbytes for x in model.parameters())
    largest = max(2 * rows * columns for rows, columns in config.frozen_matrices)
    assert own < held < own + 2 * largest < 0.5 * sum(x.nbytes for x in theirs.parameters())
    assert own == added.frozen_bytes(config, each=2) + 4 * added.parameters(config)


def test_matrices_that_do_not_fit_are_refused():
    narrow = GPTConfig(**SIZES | {"channels": 96, "heads": 6})
    with pytest.raises(ValueError, match=r"lora\.base=nf4: a matrix has 96 columns"):
        LoraConfig(rank=2, base="nf4").check_model(narrow)
    with pytest.raises(ValueError, match=r"lora\.targets=gate: the model has qkv"):
        LoraConfig(rank=2, targets=["qkv", "gate"]).check_model(narrow)
