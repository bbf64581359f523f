"""A tensor that is folded at load comes back as it was, in the model and in LoRA's adapter."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig

from longctx.config.model_config import GPTConfig, LoraConfig
from longctx.config.parts import Interleaved, OnePlus, Piece
from longctx.model import lora
from longctx.model.export import export, export_adapter
from longctx.model.families.family import FAMILIES
from longctx.model.families.llama import Llama
from longctx.model.huggingface import pretrained
from tests.model.families.parity import SIZES, reference, write_tokenizer

PAIRS = Interleaved(head_size=8, rotated=4)


class Folded(Llama):
    """Llama with weights of 1 + w in its norms, and interleaved pairs in half of each head."""

    def tensors(self, config: GPTConfig) -> Iterator[Piece]:
        for piece in super().tensors(config):
            if "norm" in piece.theirs:
                yield piece._replace(fold=OnePlus())
            else:
                rotates = "q_proj" in piece.theirs or "k_proj" in piece.theirs
                yield piece._replace(fold=PAIRS) if rotates else piece


@pytest.fixture(params=[torch.float32, torch.bfloat16])
def folder(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    model = reference(LlamaConfig(**SIZES, num_key_value_heads=2, attention_bias=True))
    model.to(request.param).save_pretrained(tmp_path / "in")
    write_tokenizer(tmp_path / "in")
    monkeypatch.setitem(FAMILIES, "llama", Folded())
    return tmp_path / "in"


def test_an_export_is_the_folder_again(folder: Path) -> None:
    export(pretrained(folder), folder, folder.parent / "out")
    before, after = (load_file(folder.parent / x / "model.safetensors") for x in ("in", "out"))
    assert before.keys() == after.keys()
    for name, x in before.items():
        assert after[name].dtype == x.dtype
        # 1 + w is rounded to fp32
        torch.testing.assert_close(after[name], x, rtol=0, atol=2**-24 if "norm" in name else 0)
        if x.dtype == torch.bfloat16:
            assert torch.equal(after[name], x) or x.abs().min() < 2**-16


def test_an_adapter_is_unfolded(folder: Path) -> None:
    model, config = pretrained(folder), LoraConfig(rank=2, scaling=1.0, targets=["qkv"])
    lora.add(model, config)
    for layer in lora.layers(model):
        torch.nn.init.normal_(layer.lora_b)
    export_adapter(model, config, str(folder), folder.parent / "adapter")
    added = load_file(folder.parent / "adapter" / "adapter_model.safetensors")
    name = "model.layers.1.self_attn.k_proj"
    a, b = (added[f"base_model.model.{name}.lora_{x}.weight"] for x in "AB")
    theirs = load_file(folder / "model.safetensors")[f"{name}.weight"].float() + b @ a
    merged = lora.merge(model.float()).blocks[1].attention.qkv.weight[48:64]
    torch.testing.assert_close(merged, PAIRS.load(theirs))


def test_weights_that_changed_are_saved(folder: Path) -> None:
    model = pretrained(folder)
    with torch.no_grad():
        model.norm.weight += 0.25
    export(model, folder, folder.parent / "out", dtype=torch.float32)
    assert torch.equal(pretrained(folder.parent / "out").norm.weight, model.norm.weight)
