"""Families with experts compute as in transformers, and their folders go out and come back."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GptOssConfig, MixtralConfig, Qwen3MoeConfig
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from longctx.model.huggingface import pretrained
from tests.model.families.parity import SIZES, SPECIAL, FamilyTests, reference

SMALL = {**SIZES, **SPECIAL, "num_key_value_heads": 2, "router_aux_loss_coef": 0.02}


# torch's grouped product takes rows of a multiple of 16 bytes; LoRA leaves experts alone
class TestMixtral(FamilyTests):
    config_class = MixtralConfig
    drawn = {"intermediate_size": [24, 40], "num_local_experts": [3, 8], "sliding_window": [7, 30]}
    widths = (8, 16)
    lora_targets = ("qkv", "out")
    cases = {
        "plain": MixtralConfig(**SMALL, num_local_experts=8, head_dim=8),
        "windows": MixtralConfig(
            **SMALL, num_local_experts=5, num_experts_per_tok=3, sliding_window=9, head_dim=16
        ),
    }
    stretched = {"num_key_value_heads": 2, "num_local_experts": 4, "head_dim": 8}
    special = SPECIAL


QWEN = {**SMALL, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24}


class TestQwen3Moe(FamilyTests):
    config_class = Qwen3MoeConfig
    drawn = {
        **{"intermediate_size": [24, 40], "moe_intermediate_size": [8, 24], "head_dim": [8]},
        **{"num_experts": [3, 8], "num_experts_per_tok": [1, 3], "norm_topk_prob": [True, False]},
    }
    widths = (8, 16)
    lora_targets = ("qkv", "out")
    cases = {
        "plain": Qwen3MoeConfig(**QWEN, head_dim=16),
        "dense layers": Qwen3MoeConfig(
            **QWEN | {"num_hidden_layers": 3},
            **{"head_dim": 8, "attention_bias": True, "tie_word_embeddings": True},
            **{"norm_topk_prob": True, "mlp_only_layers": [0, 1]},
        ),
        "windows": Qwen3MoeConfig(**QWEN, head_dim=8, use_sliding_window=True, sliding_window=9),
    }
    stretched = {
        "num_key_value_heads": 2,
        "head_dim": 8,
        "num_experts": 4,
        "num_experts_per_tok": 2,
    }
    special = SPECIAL


OSS = {**SMALL, "num_local_experts": 6, "num_experts_per_tok": 2, "sliding_window": 9}


class TestGptOss(FamilyTests):
    config_class = GptOssConfig
    drawn = {
        **{"intermediate_size": [24, 40], "num_local_experts": [3, 8], "sliding_window": [7, 30]},
        **{"head_dim": [8, 14], "num_experts_per_tok": [1, 3], "swiglu_limit": [0.5, 7.0]},
    }
    widths = (8, 16)
    lora_targets = ("qkv", "out")
    cases = {
        "every second windowed": GptOssConfig(**OSS, head_dim=16),
        "own rope": GptOssConfig(**OSS | {"rope_parameters": None}, head_dim=8),
        "clamped": GptOssConfig(**OSS, head_dim=8, swiglu_limit=0.3, attention_bias=False),
    }
    stretched = {"num_key_value_heads": 2, "head_dim": 8, "num_local_experts": 4}
    special = SPECIAL


def test_mxfp4_is_dequantized_as_in_transformers(tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 32}
    config = GptOssConfig(**OSS | sizes, head_dim=16)
    reference(config).bfloat16().save_pretrained(tmp_path / "plain")
    reference(config).bfloat16().save_pretrained(tmp_path / "packed")
    plain = load_file(tmp_path / "plain" / "model.safetensors")
    packed = dict(plain)
    for name in [name for name in plain if name.endswith("up_proj") or name.endswith("down_proj")]:
        experts, columns, rows = packed.pop(name).shape
        blocks = torch.randint(256, (experts, rows, columns // 32, 16), dtype=torch.uint8)
        scales = torch.randint(110, 132, (experts, rows, columns // 32), dtype=torch.uint8)
        packed |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        plain[name] = convert_moe_packed_tensors(blocks, scales).contiguous()
    save_file(plain, tmp_path / "plain" / "model.safetensors")
    save_file(packed, tmp_path / "packed" / "model.safetensors")
    file = tmp_path / "packed" / "config.json"
    content = json.loads(file.read_text())
    file.write_text(json.dumps(content | {"quantization_config": {"quant_method": "mxfp4"}}))
    expected = pretrained(tmp_path / "plain").state_dict()
    found = pretrained(tmp_path / "packed").state_dict()
    assert len(found) == len(expected)
    for name, weight in expected.items():
        assert torch.equal(found[name], weight), name
    file.write_text(json.dumps(content | {"quantization_config": {"quant_method": "fp8"}}))
    with pytest.raises(ValueError, match=r"quantization_config\.quant_method=fp8"):
        pretrained(tmp_path / "packed")
