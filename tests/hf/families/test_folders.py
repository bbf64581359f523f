"""What folders of particular families hold: older names, windows, packed experts, adapters."""

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GptOssConfig, MinistralConfig
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from longctx.config.rope_config import RopeConfig
from longctx.hf.export import export, export_adapter
from longctx.hf.families import write_config
from longctx.hf.model_folder import pretrained, read_config
from longctx.model import lora
from longctx.model.context_extension import extended
from longctx.spec.model_config import LORA_TARGETS, GPTConfig, LoraConfig
from tests.hf.families.parity import SMALL, check_computation, reference, write_tokenizer
from tests.hf.families.test_families import family_tests

FULL, WINDOWED = "full_attention", "sliding_attention"


def read(folder: Path, content: dict[str, Any]) -> GPTConfig:
    """Write `content` as config.json of a folder, and read it."""
    (folder / "config.json").write_text(json.dumps(content))
    return read_config(folder)


@pytest.mark.parametrize(
    ("layer_types", "window", "window_layers"),
    [([WINDOWED, FULL], 9, [0]), ([WINDOWED] * 2, 9, None), ([FULL] * 2, None, None)],
)
def test_windows_follow_layer_types(layer_types, window, window_layers, tmp_path):
    # transformers opens a mistral folder with layer_types as Ministral
    sizes = deepcopy(SMALL) | {"num_hidden_layers": 2, "head_dim": 8, "sliding_window": 9}
    reference(MinistralConfig(**sizes)).save_pretrained(tmp_path)
    content = json.loads((tmp_path / "config.json").read_text())
    config = read(tmp_path, content | {"model_type": "mistral", "layer_types": layer_types})
    assert (config.window, config.window_layers) == (window, window_layers)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").eval()
    check_computation(theirs, tmp_path)


def test_files_of_pythia_have_older_keys_and_masks(tmp_path):
    reference(family_tests("gpt_neox")().config(0)).save_pretrained(tmp_path)
    content = json.loads((tmp_path / "config.json").read_text())
    expected, rope = read_config(tmp_path), content.pop("rope_parameters")
    older = {"rotary_pct": rope["partial_rotary_factor"], "rotary_emb_base": rope["rope_theta"]}
    assert read(tmp_path, content | older) == expected
    file, layer = tmp_path / "model.safetensors", "gpt_neox.layers.0.attention"
    masks = {"bias": torch.ones(1, 1, 4, 4, dtype=torch.bool), "masked_bias": torch.tensor(-1e9)}
    save_file(load_file(file) | {f"{layer}.{name}": x for name, x in masks.items()}, file)
    assert pretrained(tmp_path).config.rotary_share == rope["partial_rotary_factor"] < 1


@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe", "gpt_oss"])
def test_experts_are_balanced_only_with_output_router_logits(kind, tmp_path):
    family = family_tests(kind)
    content = family().content() | {"router_aux_loss_coef": 0.02, "output_router_logits": True}
    assert read(tmp_path, content).experts.balance == 0.02
    assert read(tmp_path, content | {"output_router_logits": False}).experts.balance == 0
    del content["router_aux_loss_coef"]
    assert read(tmp_path, content).experts.balance == family.config_class().router_aux_loss_coef
    del content["output_router_logits"]
    assert read(tmp_path, content).experts.balance == 0


def test_older_files_name_two_ropes_otherwise(tmp_path):
    older = {"rope_theta": 5000.0, "rope_local_base_freq": 300.0, "sliding_window": 9}
    older |= {"rope_scaling": {"rope_type": "linear", "factor": 8.0}, "sliding_window_pattern": 2}
    config = read(tmp_path, SMALL | older | {"model_type": "gemma3_text", "rope_parameters": None})
    assert (config.rope_theta, config.window_rope_theta) == (5000.0, 300.0)
    assert config.rope_scaling == {"rope_type": "linear", "factor": 8.0}
    assert config.window_layers == [0, 2]


def test_stretched_positions_of_gemma_4_open_in_transformers(tmp_path):
    family = family_tests("gemma4_text")
    config = read(tmp_path, family().content() | {"rope_parameters": None})
    stretched, _ = extended(config, RopeConfig("auto"), 128)
    opened = family.config_class.from_dict(write_config(stretched, 128))
    rotated = {"rope_type": "proportional", "partial_rotary_factor": 0.25, "factor": 2.0}
    assert opened.rope_parameters[FULL] == rotated | {"rope_theta": 1000000.0}


def test_norms_of_16_bits_are_those_of_transformers(tmp_path):
    """Gemma's 1 + w is not rounded, also of weights that fully_shard gathers in bf16."""
    theirs = reference(family_tests("gemma3_text")().config(0)).bfloat16()
    theirs.save_pretrained(tmp_path / "in")
    write_tokenizer(tmp_path / "in")
    model = pretrained(tmp_path / "in")
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    x = torch.randn(5, theirs.config.hidden_size).bfloat16()
    assert torch.equal(model.norm(x), theirs.model.norm(x))
    export(model, tmp_path / "in", tmp_path / "out")
    before, after = (load_file(tmp_path / x / "model.safetensors") for x in ("in", "out"))
    torch.testing.assert_close(after, before, rtol=0, atol=0)


def test_mxfp4_is_dequantized_as_in_transformers(tmp_path):
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 32, "head_dim": 16}
    config = GptOssConfig(**deepcopy(SMALL) | sizes, num_local_experts=6)
    for name in ("plain", "packed"):
        reference(config).bfloat16().save_pretrained(tmp_path / name)
    plain = load_file(tmp_path / "plain" / "model.safetensors")
    packed = dict(plain)
    for name in [name for name in plain if name.endswith(("up_proj", "down_proj"))]:
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
    expected, found = (pretrained(tmp_path / x).state_dict() for x in ("plain", "packed"))
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_experts_in_one_tensor_are_those_of_many(tmp_path):
    theirs = reference(family_tests("qwen3_5_moe_text")().config(0))
    theirs.save_pretrained(tmp_path)
    expected, joined = pretrained(tmp_path).state_dict(), theirs.state_dict()
    save_file(joined, tmp_path / "model.safetensors")
    torch.testing.assert_close(pretrained(tmp_path).state_dict(), expected, rtol=0, atol=0)
    name = "model.layers.0.mlp.experts.down_proj"
    save_file(joined | {name: joined[name][:-1].clone()}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"experts\.down_proj is \[\d, .*, by config\.json it is"):
        pretrained(tmp_path)


def test_layers_that_predict_further_are_left_out(tmp_path):
    config = family_tests("glm4_moe")().config(0, num_hidden_layers=3, first_k_dense_replace=1)
    reference(config).bfloat16().save_pretrained(tmp_path)
    plain = pretrained(tmp_path).state_dict()
    file = tmp_path / "model.safetensors"
    save_file(load_file(file) | {"model.layers.3.eh_proj.weight": torch.zeros(2, 4)}, file)
    found = pretrained(tmp_path)
    torch.testing.assert_close(found.state_dict(), plain, rtol=0, atol=0)
    correction = found.blocks[1].mlp.correction.weight
    assert correction.dtype == torch.float32 and not correction.requires_grad
    found.config.experts.balance = 0.1  # of training alone, so a run with it is exported
    assert write_config(found.config, 64)["model_type"] == "glm4_moe"
    save_file(load_file(file) | {"model.norm.bias": torch.zeros(2, 4)}, file)
    with pytest.raises(ValueError, match=r"model\.norm\.bias has no place"):
        pretrained(tmp_path)


@torch.no_grad()
@pytest.mark.parametrize(
    ("kind", "targets"),
    [
        ("mixtral", ["qkv", "gate_up", "down"]),
        ("gpt_oss", ["out", "gate_up", "down"]),
        ("gpt_oss", ["qkv", "down"]),
        ("glm4_moe", ["gate_up"]),  # with a dense layer, and experts for every token
        ("granitemoeshared", ["qkv", "gate_up", "down"]),
        *((x, ["qkv", "out", "gate_up", "down"]) for x in ("deepseek_v3", "mistral4")),
        ("kimi_linear", ["out", "gate_up", "decay_in", "kv_up"]),
        ("nemotron_h", ["rates", "gate_up", "down"]),  # peft refuses `out` of Mamba-2 there
        *((kind, [*LORA_TARGETS]) for kind in ("gpt_neox", "starcoder2", "cohere2", "gemma4_text")),
    ],
)
def test_adapters_compute_the_same_in_peft(kind, targets, tmp_path):
    theirs = reference(family_tests(kind)().config(0))
    theirs.save_pretrained(tmp_path / "in")
    config = LoraConfig(8, scaling=0.7, targets=targets)
    model = lora.add(pretrained(tmp_path / "in"), config)
    tokens = torch.randint(301, (1, 50))
    before = model(tokens)
    for layer in lora.layers(model):
        torch.nn.init.normal_(layer.lora_b, std=0.1)
    added = sum(layer.lora_a.numel() + layer.lora_b.numel() for layer in lora.layers(model))
    assert added == config.parameters(model.config)
    expected = model(tokens)
    assert (expected - before).abs().max() > 0.01 * before.abs().max()
    export_adapter(model, config, str(tmp_path / "in"), tmp_path / "adapter")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "in")
    found = PeftModel.from_pretrained(base, tmp_path / "adapter")
    assert (found(tokens).logits - expected).abs().max() < 1e-5 * expected.abs().max()
