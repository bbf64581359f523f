"""Families with experts compute as in transformers, and their folders go out and come back."""

import json
from copy import deepcopy
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AfmoeConfig, Glm4MoeConfig, GptOssConfig, MixtralConfig, Qwen3MoeConfig
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
        **{"num_key_value_heads": 2, "head_dim": 8},
        **{"num_experts": 4, "num_experts_per_tok": 2},
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


# deepcopy: its class adds to rope_parameters
GLM = {
    **deepcopy(SIZES),
    **{**SPECIAL, "num_key_value_heads": 2, "num_hidden_layers": 3, "num_nextn_predict_layers": 0},
    **{"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24},
}


class TestGlm4Moe(FamilyTests):
    config_class = Glm4MoeConfig
    drawn = {
        **{"moe_intermediate_size": [8, 24], "head_dim": [8, 16], "num_nextn_predict_layers": [0]},
        **{"n_routed_experts": [4, 8], "num_experts_per_tok": [1, 2], "n_group": [1, 2]},
        **{"n_shared_experts": [1, 2], "routed_scaling_factor": [1.0, 2.5]},
        **{"norm_topk_prob": [True, False], "use_qk_norm": [True, False]},
        **{"first_k_dense_replace": [0, 1], "topk_group": [1]},
    }
    widths = (8, 16)
    lora_targets = ("qkv", "out")
    cases = {
        "plain": Glm4MoeConfig(**GLM, head_dim=16),
        "groups": Glm4MoeConfig(
            **GLM, head_dim=8, n_group=4, topk_group=2, n_shared_experts=2, attention_bias=True
        ),
        "raw weights": Glm4MoeConfig(
            **GLM | {"first_k_dense_replace": 0, "routed_scaling_factor": 1.7},
            **{"head_dim": 8, "norm_topk_prob": False, "use_qk_norm": True},
        ),
    }
    stretched = {
        **{"num_key_value_heads": 2, "moe_intermediate_size": 16},
        **{"n_routed_experts": 4, "num_experts_per_tok": 2, "num_nextn_predict_layers": 0},
    }
    special = SPECIAL | {"head_dim": 16}


TRINITY = {
    **{**SIZES, **SPECIAL, "num_key_value_heads": 2, "num_hidden_layers": 4, "sliding_window": 9},
    **{"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
}


class TestAfmoe(FamilyTests):
    config_class = AfmoeConfig
    drawn = {
        **{"moe_intermediate_size": [8, 24], "head_dim": [8, 10], "sliding_window": [7, 30]},
        **{"num_experts": [3, 8], "num_experts_per_tok": [1, 3], "num_shared_experts": [1, 2]},
        **{"global_attn_every_n_layers": [2, 3], "mup_enabled": [True, False]},
        **{"route_scale": [1.0, 2.5], "num_dense_layers": [0, 2]},
    }
    widths = (8, 16)
    lora_targets = ("qkv", "out", "gate")
    cases = {
        "plain": AfmoeConfig(**TRINITY, head_dim=16),
        "layer types": AfmoeConfig(
            **TRINITY | {"layer_types": ["full_attention", *["sliding_attention"] * 3]},
            **{"head_dim": 8, "mup_enabled": True, "attention_bias": True, "route_scale": 2.5},
        ),
    }
    stretched = {
        **{"num_key_value_heads": 2, "head_dim": 8, "moe_intermediate_size": 16},
        **{"num_experts": 4, "num_experts_per_tok": 2, "sliding_window": 40},
    }
    special = SPECIAL


def test_layers_that_predict_further_are_left_out(tmp_path: Path) -> None:
    reference(Glm4MoeConfig(**GLM, head_dim=8)).bfloat16().save_pretrained(tmp_path)
    plain = pretrained(tmp_path).state_dict()
    file = tmp_path / "model.safetensors"
    save_file(load_file(file) | {"model.layers.3.eh_proj.weight": torch.zeros(2, 4)}, file)
    found = pretrained(tmp_path)
    assert all(torch.equal(x, plain[name]) for name, x in found.state_dict().items())
    correction = found.blocks[1].mlp.correction.weight
    assert correction.dtype == torch.float32 and not correction.requires_grad
    save_file(load_file(file) | {"model.norm.bias": torch.zeros(2, 4)}, file)
    with pytest.raises(ValueError, match=r"model\.norm\.bias has no place"):
        pretrained(tmp_path)
