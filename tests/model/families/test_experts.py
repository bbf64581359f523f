"""Families with experts compute as in transformers, and their folders go out and come back."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AfmoeConfig, Glm4MoeConfig, GptOssConfig, MixtralConfig, Qwen3MoeConfig
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from longctx.model.huggingface import pretrained
from tests.model.families.parity import SIZES, SPECIAL, FamilyTests, reference


# torch's grouped product takes rows of a multiple of 16 bytes; LoRA leaves experts alone
class ExpertsTests(FamilyTests):
    widths = (8, 16)
    lora_targets = ("qkv", "out")
    special = SPECIAL


class TestMixtral(ExpertsTests):
    config_class = MixtralConfig
    drawn = {
        **{"intermediate_size": [24, 40], "num_local_experts": [3, 8], "sliding_window": [None, 7]},
        **{"num_experts_per_tok": [2, 3], "head_dim": [8, 16], "router_aux_loss_coef": [0.02]},
    }


class TestQwen3Moe(ExpertsTests):
    config_class = Qwen3MoeConfig
    drawn = {
        **{"intermediate_size": [24, 40], "moe_intermediate_size": [8, 24], "head_dim": [8, 16]},
        **{"num_experts": [3, 8], "num_experts_per_tok": [1, 3], "norm_topk_prob": [True, False]},
        **{"num_hidden_layers": [3], "mlp_only_layers": [[], [0, 1]], "sliding_window": [9]},
        **{"attention_bias": [False, True], "use_sliding_window": [False, True]},
        **{"router_aux_loss_coef": [0.02]},
    }


class TestGptOss(ExpertsTests):
    config_class = GptOssConfig
    drawn = {
        **{"intermediate_size": [24, 40], "num_local_experts": [3, 8], "sliding_window": [7, 30]},
        **{"head_dim": [8, 14], "num_experts_per_tok": [1, 3], "swiglu_limit": [0.3, 7.0]},
        **{"attention_bias": [False, True], "rope_parameters": [None, SIZES["rope_parameters"]]},
        **{"router_aux_loss_coef": [0.02]},
    }


def test_mxfp4_is_dequantized_as_in_transformers(tmp_path):
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 32, "head_dim": 16}
    config = GptOssConfig(**SIZES | SPECIAL | sizes, num_key_value_heads=2, num_local_experts=6)
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


class TestGlm4Moe(ExpertsTests):
    config_class = Glm4MoeConfig
    drawn = {
        **{"moe_intermediate_size": [8, 24], "head_dim": [8, 16], "num_nextn_predict_layers": [0]},
        **{"n_routed_experts": [8], "num_experts_per_tok": [1, 2], "n_group": [2, 4]},
        **{"n_shared_experts": [1, 2], "routed_scaling_factor": [1.0, 2.5]},
        **{"norm_topk_prob": [True, False], "use_qk_norm": [True, False], "topk_group": [1, 2]},
        **{"first_k_dense_replace": [0, 1], "attention_bias": [False, True]},
    }
    special = SPECIAL | {"head_dim": 16}
    stretched = {"head_dim": 16, "n_group": 1, "topk_group": 1}


class TestAfmoe(ExpertsTests):
    config_class = AfmoeConfig
    drawn = {
        **{"moe_intermediate_size": [8, 24], "head_dim": [8, 10], "sliding_window": [7, 30]},
        **{"num_experts": [3, 8], "num_experts_per_tok": [1, 3], "num_shared_experts": [1, 2]},
        **{"global_attn_every_n_layers": [2, 3], "mup_enabled": [True, False]},
        **{"route_scale": [1.0, 2.5], "num_dense_layers": [0, 2], "num_hidden_layers": [4]},
        **{"layer_types": [None, ["full_attention", *["sliding_attention"] * 3]]},
        **{"attention_bias": [False, True]},
    }
    lora_targets = ("qkv", "out", "gate")
    stretched = {"sliding_window": 40}


def test_layers_that_predict_further_are_left_out(tmp_path):
    config = TestGlm4Moe().config(0, num_hidden_layers=3, first_k_dense_replace=1)
    reference(config).bfloat16().save_pretrained(tmp_path)
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
