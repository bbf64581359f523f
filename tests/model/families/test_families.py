"""Every family computes as in transformers, and its folders go out and come back."""

import json
from collections.abc import Mapping
from typing import Any

import pytest
from transformers import (
    AutoModelForCausalLM,
    CwmConfig,
    Glm4Config,
    GraniteConfig,
    GraniteSWAConfig,
    HunYuanDenseV1Config,
    LlamaConfig,
    Ministral3Config,
    MinistralConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
    SeedOssConfig,
    SmolLM3Config,
)

from longctx.model.huggingface import read_config
from tests.model.families.parity import (
    OLD,
    ROPES,
    SIZES,
    SPECIAL,
    FamilyTests,
    check_computation,
    reference,
)

GROUPED = {**SIZES, "num_key_value_heads": 2}
BIASES = {"attention_bias": [False, True], "mlp_bias": [False, True]}
FULL, WINDOWED = "full_attention", "sliding_attention"


class TestLlama(FamilyTests):
    config_class = LlamaConfig
    drawn = BIASES | {"head_dim": [None, 10]}
    fast_ropes = tuple(ROPES)


class TestSmolLM3(FamilyTests):
    config_class = SmolLM3Config
    rewritten = ("sliding_window",)  # without windows
    drawn = BIASES | {
        **{"no_rope_layer_interval": [2, 3], "use_sliding_window": [False, True]},
        **{"sliding_window": [7], "num_hidden_layers": [4]},
    }
    special = SPECIAL


class TestMistral(FamilyTests):
    config_class = MistralConfig
    drawn = {"sliding_window": [None, 9], "head_dim": [8, 16]}
    # without windows it goes out as the Llama that it is
    other_types = ("llama",)


@pytest.mark.parametrize(
    ("layer_types", "window", "window_layers"),
    [
        (["sliding_attention", "full_attention"], 9, [0]),
        (["sliding_attention"] * 2, 9, None),
        (["full_attention"] * 2, None, None),
    ],
)
def test_windows_follow_layer_types(layer_types, window, window_layers, tmp_path):
    # transformers opens a mistral folder with layer_types as Ministral
    ministral = MinistralConfig(**SIZES, num_key_value_heads=2, head_dim=8, sliding_window=9)
    reference(ministral).save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    content = json.loads(file.read_text())
    content |= {"model_type": "mistral", "layer_types": layer_types}
    file.write_text(json.dumps(content))
    config = read_config(tmp_path)
    assert (config.window, config.window_layers) == (window, window_layers)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").eval()
    check_computation(theirs, tmp_path)


def test_sliding_layer_types_without_a_window_are_refused(tmp_path):
    config = {**SIZES, "model_type": "mistral", "num_key_value_heads": 2, "sliding_window": None}
    config["layer_types"] = ["full_attention", "sliding_attention"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"layer_types\[1\]=sliding_attention is not"):
        read_config(tmp_path)


class TestMinistral(FamilyTests):
    config_class = MinistralConfig
    drawn = {
        **{"head_dim": [4, 10], "sliding_window": [1, 7, 30], "num_hidden_layers": [2]},
        "layer_types": [None, [WINDOWED, FULL]],
    }
    # all windowed, as the Mistral that it is
    other_types = ("mistral",)


class TestCwm(FamilyTests):
    config_class = CwmConfig
    drawn = {
        **{"head_dim": [8, 16], "sliding_window": [9], "num_hidden_layers": [6]},
        "layer_types": [None, [WINDOWED, FULL] * 3],
        "rope_parameters": [None, SIZES["rope_parameters"]],
    }
    # as the Ministral that it is
    other_types = ("ministral",)
    special = SPECIAL | {"bos_token_id": 1}


class TestQwen2(FamilyTests):
    config_class = Qwen2Config
    rewritten = ("sliding_window", "use_sliding_window")  # without windows
    drawn = {"use_sliding_window": [False, True], "sliding_window": [11], "max_window_layers": [1]}


class TestQwen3(FamilyTests):
    config_class = Qwen3Config
    rewritten = ("sliding_window", "use_sliding_window")  # without windows
    drawn = {
        **{"head_dim": [8, 16], "attention_bias": [False, True], "num_hidden_layers": [3]},
        **{"use_sliding_window": [True], "sliding_window": [5]},
        "layer_types": [[WINDOWED, FULL, WINDOWED], [FULL] * 3],
    }


class TestSeedOss(FamilyTests):
    config_class = SeedOssConfig
    drawn = {"mlp_bias": [False, True], "attention_out_bias": [False, True], "head_dim": [10, 16]}
    # without dropout, as exports are
    special = SPECIAL | {"attention_dropout": 0.0, "residual_dropout": 0.0}
    cases = {"heads of channels / heads": SeedOssConfig(**GROUPED | special, head_dim=8)}
    stretched = {"num_attention_heads": 4}
    # as the Llama and the Qwen2 that they are
    other_types = ("llama", "qwen2")


ALPHA = {"rope_type": "dynamic", "rope_theta": 300.0, "alpha": 50.0, "factor": 1.0}


class TestHunYuanDenseV1(FamilyTests):
    config_class = HunYuanDenseV1Config
    drawn = {
        **{"attention_bias": [False, True], "head_dim": [4, 10, 16]},
        "rope_parameters": [SIZES["rope_parameters"], ALPHA],
    }
    special = SPECIAL
    # that of alpha is written as the larger base that it is
    rewritten = ("rope_parameters",)


class TestGlm4(FamilyTests):
    config_class = Glm4Config
    drawn = {
        **{"head_dim": [8, 16], "partial_rotary_factor": [0.25, 0.5, 1.0]},
        "attention_bias": [False, True],
    }
    special = SPECIAL
    stretched = {"head_dim": 16, "partial_rotary_factor": 0.5}


GROWTH = {"llama_4_scaling_beta": 0.3, OLD: 32}


class TestMinistral3(FamilyTests):
    config_class = Ministral3Config
    special = SPECIAL
    drawn = {"head_dim": [4, 8, 18], "sliding_window": [None, 5, 20]}

    def rope_keys(self, rope: Mapping[str, Any]) -> dict[str, Any]:
        return super().rope_keys({**rope, **GROWTH})


def test_without_growth_it_is_refused(tmp_path):
    content = {**SIZES, "model_type": "ministral3", "num_key_value_heads": 2}
    (tmp_path / "config.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"llama_4_scaling_beta=0\.0 must be a number above 0"):
        read_config(tmp_path)


FACTORS = {
    **{"embedding_multiplier": [1.0, 12], "residual_multiplier": [1.0, 0.22]},
    **{"attention_multiplier": [0.2, 0.4], "logits_scaling": [3.0, 7]},
    **{"attention_bias": [False, True], "mlp_bias": [False, True]},
}
# Layers 0 and 4 have no window; 0 stands for no positions
BASES = [[0, 300.0, 300.0, 300.0, 0], [300.0, 0, 0, 0, 300.0], [5e5, 300.0, 300.0, 300.0, 5e5]]


class TestGranite(FamilyTests):
    config_class = GraniteConfig
    special = SPECIAL
    drawn = {**FACTORS, "head_dim": [8, 10]}


class TestGraniteSWA(FamilyTests):
    config_class = GraniteSWAConfig
    rewritten = ("rope_parameters",)  # a base that no layer has
    special = SPECIAL
    drawn = {
        **{**FACTORS, "sliding_window": [3, 8, 20], "num_hidden_layers": [5]},
        **{"layer_rope_theta": BASES},
    }
    stretched = {"sliding_window": 40, "layer_rope_theta": None}


def test_two_bases_of_one_kind_are_refused(tmp_path):
    thetas = [100.0, 300.0, 300.0, 500.0]
    changes = {"num_hidden_layers": 4, "layer_rope_theta": thetas}
    TestGraniteSWA().config(0, **changes).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"layer_rope_theta=\[100.* is not covered yet"):
        read_config(tmp_path)
