"""Phi-3 and Phi-4 compute as in transformers, with fused projections and a share that rotates."""

import json

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, Glm4Config, Phi3Config

from longctx.config.model_config import LoraConfig
from longctx.model import lora
from longctx.model.export import export_adapter
from longctx.model.families import read_model
from longctx.model.huggingface import pretrained, read_config
from tests.model.families.parity import OLD, ROPES, SIZES, FamilyTests, reference

IDS = {"pad_token_id": None, "bos_token_id": 1, "eos_token_id": 0}
PLAIN_ROPE = {"rope_type": "default", "rope_theta": 5000.0}
GROUPED = {**SIZES, **IDS, "rope_parameters": PLAIN_ROPE, "num_key_value_heads": 2}
PARTIAL = {"rope_type": "default", "rope_theta": 5000.0, "partial_rotary_factor": 0.75}
HALF_LONGROPE = {
    **ROPES["longrope"],
    **{"rope_theta": 5000.0, "partial_rotary_factor": 0.5},
    **{"short_factor": [1.0, 1.5], "long_factor": [1.0, 4.0]},
}


class TestPhi3(FamilyTests):
    config_class = Phi3Config
    special = IDS
    drawn = {
        **{"sliding_window": [None, 9], "rope_parameters": [PLAIN_ROPE, PARTIAL, HALF_LONGROPE]},
        OLD: [32],
    }
    widths = (8,)
    ropes = ("longrope",)
    fast_ropes = ("longrope",)
    # as the Llama and the Mistral that they are
    other_types = ("llama", "mistral")
    rewritten = (OLD,)


def test_the_first_folders_say_su_for_longrope(tmp_path):
    old = {"type": "su", **{key: HALF_LONGROPE[key] for key in ("short_factor", "long_factor")}}
    keys = {k: v for k, v in GROUPED.items() if k != "rope_parameters"}
    content = {**keys, "model_type": "phi3", "rope_scaling": old, OLD: 32}
    content |= {"partial_rotary_factor": 0.5, "auto_map": {"AutoConfig": "a.B"}}
    (tmp_path / "config.json").write_text(json.dumps(content))
    config = read_config(tmp_path)
    assert config.rope_scaling["rope_type"] == "longrope"
    assert config.rope_scaling[OLD] == 32
    assert config.rotary_share == 0.5


@pytest.mark.parametrize("config", [Phi3Config(**GROUPED), Glm4Config(**GROUPED)], ids=type)
def test_an_adapter_has_the_layers_of_its_family(config, tmp_path):
    base, rank = tmp_path / "base", LoraConfig(2, targets=["qkv", "gate_up"])
    reference(config).save_pretrained(base)
    model = lora.add(pretrained(base), rank)
    for layer in lora.layers(model):
        torch.nn.init.normal_(layer.lora_b, std=0.1)
    family = read_model(base)[0]
    export_adapter(model, rank, str(base), tmp_path / "adapter", family=family)
    opened = AutoModelForCausalLM.from_pretrained(base, attn_implementation="eager")
    adapted = PeftModel.from_pretrained(opened, tmp_path / "adapter").eval()
    tokens = torch.randint(301, (1, 40))
    torch.testing.assert_close(model(tokens), adapted(tokens).logits, rtol=1e-4, atol=1e-4)


def test_other_scalings_are_not_claimed_for_phi3(tmp_path):
    content = {**GROUPED, "model_type": "phi3"}
    content["rope_parameters"] = PARTIAL | {"rope_type": "linear", "factor": 2.0}
    (tmp_path / "config.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"rope_type=linear is not covered"):
        read_config(tmp_path)
