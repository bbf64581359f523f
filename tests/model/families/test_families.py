"""Every family computes as in transformers, and its folders go out and come back."""

import json
from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from transformers import (
    AutoModelForCausalLM,
    CwmConfig,
    Glm4Config,
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


class TestLlama(FamilyTests):
    config_class = LlamaConfig
    cases = {
        "llama 2": LlamaConfig(**SIZES, num_key_value_heads=6),
        "llama 3": LlamaConfig(**SIZES, num_key_value_heads=2, head_dim=10),
        "biases": LlamaConfig(**SIZES, num_key_value_heads=2, attention_bias=True, mlp_bias=True),
    }
    stretched = {"num_key_value_heads": 2}
    fast_ropes = tuple(ROPES)


class TestSmolLM3(FamilyTests):
    config_class = SmolLM3Config
    cases = {
        "plain": SmolLM3Config(**SIZES, num_key_value_heads=3, no_rope_layer_interval=2, **SPECIAL),
        "windows": SmolLM3Config(
            **{**GROUPED, **SPECIAL, "num_hidden_layers": 3, "no_rope_layers": [1, 0, 1]},
            **{"use_sliding_window": True, "sliding_window": 7, "tie_word_embeddings": False},
            **{"attention_bias": True, "mlp_bias": True},
        ),
    }
    stretched = {"num_key_value_heads": 2, "no_rope_layers": [1, 0]}
    special = SPECIAL


class TestMistral(FamilyTests):
    config_class = MistralConfig
    cases = {
        "no window": MistralConfig(**GROUPED, sliding_window=None, head_dim=16),
        "window": MistralConfig(**GROUPED, sliding_window=9, head_dim=16),
    }
    stretched = {"num_key_value_heads": 2, "sliding_window": 40}
    # without windows it goes out as the Llama that it is
    other_class = ("no window",)


@pytest.mark.parametrize(
    ("layer_types", "window", "window_layers"),
    [
        (["sliding_attention", "full_attention"], 9, [0]),
        (["sliding_attention"] * 2, 9, None),
        (["full_attention"] * 2, None, None),
    ],
)
def test_windows_follow_layer_types(
    layer_types: list[str], window: int | None, window_layers: list[int] | None, tmp_path: Path
) -> None:
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


def test_sliding_layer_types_without_a_window_are_refused(tmp_path: Path) -> None:
    config = {**SIZES, "model_type": "mistral", "num_key_value_heads": 2, "sliding_window": None}
    config["layer_types"] = ["full_attention", "sliding_attention"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"layer_types\[1\]=sliding_attention is not"):
        read_config(tmp_path)


class TestMinistral(FamilyTests):
    config_class = MinistralConfig
    drawn = {"head_dim": [4, 10], "sliding_window": [1, 7, 30]}
    cases = {
        "layer types": MinistralConfig(
            **{**GROUPED, "head_dim": 16, "sliding_window": 9},
            layer_types=["sliding_attention", "full_attention"],
        ),
        "all windowed": MinistralConfig(**GROUPED, head_dim=8, sliding_window=9),
    }
    stretched = {
        **{"num_key_value_heads": 2, "head_dim": 8, "sliding_window": 40},
        "layer_types": ["full_attention", "sliding_attention"],
    }
    # as the Mistral that it is
    other_class = ("all windowed",)


CWM_IDS = SPECIAL | {"bos_token_id": 1}
CWM_SMALL: dict[str, Any] = {**SIZES, **CWM_IDS, "num_key_value_heads": 2, "sliding_window": 9}


class TestCwm(FamilyTests):
    config_class = CwmConfig
    cases = {
        "own pattern": CwmConfig(**CWM_SMALL | {"num_hidden_layers": 6}, head_dim=16),
        "own rope": CwmConfig(**CWM_SMALL | {"rope_parameters": None}, head_dim=16),
        "layer types": CwmConfig(
            **CWM_SMALL, head_dim=8, layer_types=["sliding_attention", "full_attention"]
        ),
    }
    # as the Ministral that it is
    other_class = (*cases, "stretched")
    special = CWM_IDS
    stretched = {"num_key_value_heads": 2, "head_dim": 8, "sliding_window": 40}


class TestQwen2(FamilyTests):
    config_class = Qwen2Config
    cases = {
        "plain": Qwen2Config(**SIZES, num_key_value_heads=2),
        "half windowed": Qwen2Config(
            **GROUPED, use_sliding_window=True, sliding_window=11, max_window_layers=1
        ),
    }
    stretched = {"num_key_value_heads": 2}


class TestQwen3(FamilyTests):
    config_class = Qwen3Config
    cases = {
        "plain": Qwen3Config(**SIZES, num_key_value_heads=2, head_dim=16),
        "layer types": Qwen3Config(
            **{**GROUPED, "num_hidden_layers": 3, "head_dim": 16, "attention_bias": True},
            **{"use_sliding_window": True, "sliding_window": 5},
            layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        ),
    }
    stretched = {"num_key_value_heads": 2, "head_dim": 8}


WITHOUT_DROPOUT = {"attention_dropout": 0.0, "residual_dropout": 0.0}  # as exports are
SEED_GROUPED = {**SIZES, **SPECIAL, **WITHOUT_DROPOUT, "num_key_value_heads": 2}


class TestSeedOss(FamilyTests):
    config_class = SeedOssConfig
    cases = {
        "plain": SeedOssConfig(**SEED_GROUPED, head_dim=16),
        "bias in the MLP": SeedOssConfig(**SEED_GROUPED, head_dim=10, mlp_bias=True),
        "all biased": SeedOssConfig(**SEED_GROUPED, head_dim=16, attention_out_bias=True),
        "heads of channels / heads": SeedOssConfig(**SEED_GROUPED, head_dim=8),
    }
    special = SPECIAL
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    stretched = WITHOUT_DROPOUT | sizes
    # as the Llama and the Qwen2 that they are
    other_class = ("all biased", "heads of channels / heads")


SPECIAL_GROUPED = {**GROUPED, **SPECIAL}
ALPHA = {"rope_type": "dynamic", "rope_theta": 300.0, "alpha": 50.0, "factor": 1.0}


class TestHunYuanDenseV1(FamilyTests):
    config_class = HunYuanDenseV1Config
    drawn = {"attention_bias": [False, True], "head_dim": [4, 10, 16]}
    cases = {
        "plain": HunYuanDenseV1Config(**SPECIAL_GROUPED, head_dim=16),
        "alpha": HunYuanDenseV1Config(**SPECIAL_GROUPED | {"rope_parameters": ALPHA}, head_dim=16),
    }
    special = SPECIAL
    stretched = {"num_key_value_heads": 2, "head_dim": 8}
    # its rope is written as the larger base that it is
    other_class = ("alpha",)


def glm4(share: float, **changes: Any) -> Glm4Config:
    keys = deepcopy(SIZES) | SPECIAL | {"num_key_value_heads": 2, "head_dim": 8} | changes
    return Glm4Config(**keys, partial_rotary_factor=share)


class TestGlm4(FamilyTests):
    config_class = Glm4Config
    cases = {
        "half rotates": glm4(0.5),
        "all rotates": glm4(1.0),
        "without biases": glm4(0.5, attention_bias=False, tie_word_embeddings=True),
        "own head size": glm4(0.25, head_dim=16),
    }
    special = SPECIAL
    stretched = {"num_key_value_heads": 2, "head_dim": 16, "partial_rotary_factor": 0.5}
    drawn = {
        **{"head_dim": [8, 16], "partial_rotary_factor": [0.25, 0.5, 1.0]},
        "attention_bias": [False, True],
    }


GROWTH = {"llama_4_scaling_beta": 0.3, OLD: 32}
GROWN_ROPE = {"rope_theta": 5000.0, **ROPES["yarn"], **GROWTH}


def ministral3(**changes: Any) -> Ministral3Config:
    keys = SIZES | SPECIAL | {"num_key_value_heads": 2, "head_dim": 8}
    return Ministral3Config(**keys | {"rope_parameters": dict(GROWN_ROPE)} | changes)


class TestMinistral3(FamilyTests):
    config_class = Ministral3Config
    cases = {
        "plain": ministral3(),
        "window": ministral3(sliding_window=40, head_dim=16),
    }
    special = SPECIAL
    stretched = {"num_key_value_heads": 2, "head_dim": 8}
    drawn = {"head_dim": [4, 8, 18], "sliding_window": [None, 5, 20]}

    def rope_keys(self, rope: Mapping[str, Any]) -> dict[str, Any]:
        return super().rope_keys({**rope, **GROWTH})


def test_without_growth_it_is_refused(tmp_path: Path) -> None:
    content = {**SIZES, "model_type": "ministral3", "num_key_value_heads": 2}
    (tmp_path / "config.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"llama_4_scaling_beta=0\.0 must be a number above 0"):
        read_config(tmp_path)
