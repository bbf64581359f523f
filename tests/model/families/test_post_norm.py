"""Families whose blocks normalize what a branch adds: OLMo 2 and 3, EXAONE 4, Gemma 3."""

import json
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import Exaone4Config, Gemma3TextConfig, Olmo2Config, Olmo3Config

from longctx.model.export import export
from longctx.model.huggingface import pretrained, read_config
from tests.model.families.parity import OLD, SIZES, SPECIAL, FamilyTests, reference, write_tokenizer

SMALL: dict[str, Any] = {**SIZES, **SPECIAL, "num_key_value_heads": 2, "num_hidden_layers": 4}
PLAIN = {"rope_type": "default", "rope_theta": 300.0}
YARN = {"rope_type": "yarn", "rope_theta": 5000.0, "factor": 4.0, OLD: 32}
TWO_ROPES = {"rope_parameters": {"full_attention": YARN, "sliding_attention": PLAIN}}
ONE_ROPE = {"rope_parameters": {"full_attention": YARN, "sliding_attention": YARN}}
BIASES = {"attention_bias": [False, True]}
FULL, WINDOWED = ["full_attention"] * 4, ["sliding_attention"] * 4
WINDOWS = {"sliding_window": [1, 7, 30], "num_hidden_layers": [4]}


class TestOlmo2(FamilyTests):
    config_class = Olmo2Config
    drawn = BIASES | {"head_dim": [4, 10, 16]}
    special = SPECIAL


class TestOlmo3(FamilyTests):
    config_class = Olmo3Config
    drawn = BIASES | WINDOWS | {"layer_types": [None, FULL, WINDOWED]}
    cases = {"one rope": Olmo3Config(**SMALL | ONE_ROPE, sliding_window=9)}
    stretched = {"sliding_window": 40, "layer_types": None}
    special = SPECIAL
    windowed_rope = PLAIN
    # without windows it goes out as the OLMo 2 that it is
    other_types = ("olmo2",)


class TestExaone4(FamilyTests):
    config_class = Exaone4Config
    rewritten = ("sliding_window",)  # without windows
    drawn = WINDOWS | {
        **{"head_dim": [4, 10, 16], "sliding_window_pattern": [2, 3], "layer_types": [None, FULL]}
    }
    cases = {"no window": Exaone4Config(**SMALL, sliding_window=None, layer_types=FULL)}
    stretched = {"sliding_window": 40, "layer_types": None}
    special = SPECIAL


class TestGemma3(FamilyTests):
    config_class = Gemma3TextConfig
    drawn = {
        **BIASES | WINDOWS,
        "head_dim": [4, 10, 16],
        "query_pre_attn_scalar": [4, 13],
        "final_logit_softcapping": [None, 3.0],
        "hidden_activation": ["gelu_pytorch_tanh", "silu"],
        "sliding_window_pattern": [2, 3],
        "layer_types": [None, FULL],
    }
    stretched = {"sliding_window": 40, "layer_types": None}
    special = SPECIAL
    windowed_rope = PLAIN
    # what windows have that no layer has is gone
    rewritten = ("rope_parameters", "sliding_window")


@pytest.mark.parametrize("scaled", [{**YARN, "factor": 2.0}, {**YARN, "rope_theta": 300.0}])
def test_windows_with_a_scaling_of_their_own_are_refused(scaled, tmp_path):
    ropes = {"rope_parameters": {"full_attention": YARN, "sliding_attention": scaled}}
    content = {**SMALL, **ropes, "model_type": "olmo3", "sliding_window": 9}
    (tmp_path / "config.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"config\.json: rope_parameters\.sliding_attention="):
        read_config(tmp_path)


def test_older_files_name_two_ropes_otherwise(tmp_path):
    older = {"rope_theta": 5000.0, "rope_local_base_freq": 300.0, "sliding_window": 9}
    older |= {"rope_scaling": {"rope_type": "linear", "factor": 8.0}, "sliding_window_pattern": 2}
    content = {**SMALL, **older, "model_type": "gemma3_text"}
    del content["rope_parameters"]
    (tmp_path / "config.json").write_text(json.dumps(content))
    config = read_config(tmp_path)
    assert (config.rope_theta, config.window_rope_theta) == (5000.0, 300.0)
    assert config.rope_scaling == {"rope_type": "linear", "factor": 8.0}
    assert config.window_layers == [0, 2]


def test_norms_of_16_bits_come_back_and_changes_are_saved(tmp_path):
    """A norm's weight is 1 + w, in 32 bits here."""
    config = Gemma3TextConfig(**SMALL | TWO_ROPES, head_dim=8)
    reference(config).bfloat16().save_pretrained(tmp_path / "in")
    write_tokenizer(tmp_path / "in")
    model = pretrained(tmp_path / "in")
    with torch.no_grad():
        model.norm.weight += 0.25
    export(model, tmp_path / "in", tmp_path / "out")
    before, after = (load_file(tmp_path / x / "model.safetensors") for x in ("in", "out"))
    before["model.norm.weight"] = (before["model.norm.weight"].float() + 0.25).bfloat16()
    torch.testing.assert_close(after, before, rtol=0, atol=2**-24)
