"""Every family computes as in transformers, and its folders go out and come back."""

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

import transformers

from tests.hf.families.parity import OLD, ROPES, SIZES, SPECIAL, FamilyTests

SMALL: dict[str, Any] = {**SIZES, **SPECIAL, "num_key_value_heads": 2, "num_hidden_layers": 4}
BIAS = {"attention_bias": [False, True]}
BIASES = BIAS | {"mlp_bias": [False, True]}
# A copy: the classes of transformers write into the one they are given
PLAIN_ROPE = dict(SIZES["rope_parameters"])
FULL, WINDOWED = "full_attention", "sliding_attention"


class TestLlama(FamilyTests):
    config_class = transformers.LlamaConfig
    drawn = BIASES | {"head_dim": [None, 10]}
    fast_ropes = tuple(ROPES)


class TestSmolLM3(FamilyTests):
    config_class = transformers.SmolLM3Config
    drawn = BIASES | {
        **{"no_rope_layer_interval": [2, 3], "use_sliding_window": [False, True]},
        **{"sliding_window": [7], "num_hidden_layers": [4]},
    }


class TestMistral(FamilyTests):
    config_class = transformers.MistralConfig
    drawn = {"sliding_window": [None, 9], "head_dim": [8, 16]}


class TestMinistral(FamilyTests):
    config_class = transformers.MinistralConfig
    drawn = {
        **{"head_dim": [4, 10], "sliding_window": [1, 7, 30], "num_hidden_layers": [2]},
        "layer_types": [None, [WINDOWED, FULL]],
    }


class TestQwen2(FamilyTests):
    config_class = transformers.Qwen2Config
    drawn = {"use_sliding_window": [False, True], "sliding_window": [11], "max_window_layers": [1]}


class TestQwen3(FamilyTests):
    config_class = transformers.Qwen3Config
    drawn = BIAS | {
        **{"head_dim": [8, 16], "num_hidden_layers": [3]},
        **{"use_sliding_window": [True], "sliding_window": [5]},
        "layer_types": [[WINDOWED, FULL, WINDOWED], [FULL] * 3],
    }


class TestSeedOss(FamilyTests):
    config_class = transformers.SeedOssConfig
    drawn = {"mlp_bias": [False, True], "attention_out_bias": [False, True], "head_dim": [10, 16]}
    # without dropout, as exports are
    special = {"attention_dropout": 0.0, "residual_dropout": 0.0}
    cases = {
        "heads of channels / heads": transformers.SeedOssConfig(
            **deepcopy(SMALL) | special, head_dim=8
        )
    }
    stretched = {"num_attention_heads": 4}


ALPHA = {"rope_type": "dynamic", "rope_theta": 300.0, "alpha": 50.0, "factor": 1.0}


class TestHunYuanDenseV1(FamilyTests):
    config_class = transformers.HunYuanDenseV1Config
    drawn = BIAS | {"head_dim": [4, 10, 16], "rope_parameters": [PLAIN_ROPE, ALPHA]}


class TestGlm4(FamilyTests):
    config_class = transformers.Glm4Config
    drawn = BIAS | {"head_dim": [8, 16], "partial_rotary_factor": [0.25, 0.5, 1.0]}
    stretched = {"head_dim": 16, "partial_rotary_factor": 0.5}


GROWTH = {"llama_4_scaling_beta": 0.3, OLD: 32}


class TestMinistral3(FamilyTests):
    config_class = transformers.Ministral3Config
    drawn = {"head_dim": [4, 8, 18], "sliding_window": [None, 5, 20]}

    def rope_keys(self, rope: Mapping[str, Any]) -> dict[str, Any]:
        return super().rope_keys({**rope, **GROWTH})


FACTORS = BIASES | {
    **{"embedding_multiplier": [1.0, 12], "residual_multiplier": [1.0, 0.22]},
    **{"attention_multiplier": [0.2, 0.4], "logits_scaling": [3.0, 7]},
}


class TestGranite(FamilyTests):
    config_class = transformers.GraniteConfig
    drawn = {**FACTORS, "head_dim": [8, 10]}


# Phi: fused projections and a share that rotates

PARTIAL = PLAIN_ROPE | {"partial_rotary_factor": 0.75}
HALF_LONGROPE = {
    **ROPES["longrope"],
    **{"rope_theta": 5000.0, "partial_rotary_factor": 0.5},
    **{"short_factor": [1.0, 1.5], "long_factor": [1.0, 4.0]},
}


class TestPhi3(FamilyTests):
    config_class = transformers.Phi3Config
    special = {"bos_token_id": 1}
    drawn = {
        **{"sliding_window": [None, 9], "rope_parameters": [PLAIN_ROPE, PARTIAL, HALF_LONGROPE]},
        OLD: [32],
    }
    widths = (8,)
    ropes = ("longrope",)
    fast_ropes = ("longrope",)


# Blocks that normalize what a branch adds

PLAIN = {"rope_type": "default", "rope_theta": 300.0}
YARN = {"rope_type": "yarn", "rope_theta": 5000.0, "factor": 4.0, OLD: 32}
ONE_ROPE = {"rope_parameters": {FULL: YARN, WINDOWED: YARN}}
WINDOWS = {"sliding_window": [1, 7, 30], "num_hidden_layers": [4]}


class TestOlmo2(FamilyTests):
    config_class = transformers.Olmo2Config
    drawn = BIAS | {"head_dim": [4, 10, 16]}


class TestOlmo3(FamilyTests):
    config_class = transformers.Olmo3Config
    drawn = BIAS | WINDOWS | {"layer_types": [None, [FULL] * 4, [WINDOWED] * 4]}
    cases = {"one rope": transformers.Olmo3Config(**deepcopy(SMALL) | ONE_ROPE, sliding_window=9)}
    stretched = {"sliding_window": 40, "layer_types": None}
    windowed_rope = PLAIN


class TestExaone4(FamilyTests):
    config_class = transformers.Exaone4Config
    drawn = WINDOWS | {
        **{
            "head_dim": [4, 10, 16],
            "sliding_window_pattern": [2, 3],
            "layer_types": [None, [FULL] * 4],
        }
    }
    cases = {
        "no window": transformers.Exaone4Config(
            **deepcopy(SMALL), sliding_window=None, layer_types=[FULL] * 4
        )
    }
    stretched = {"sliding_window": 40, "layer_types": None}


class TestGemma3(FamilyTests):
    config_class = transformers.Gemma3TextConfig
    drawn = (
        BIAS
        | WINDOWS
        | {
            **{"head_dim": [4, 10, 16], "query_pre_attn_scalar": [4, 13]},
            **{"final_logit_softcapping": [None, 3.0], "sliding_window_pattern": [2, 3]},
            **{
                "hidden_activation": ["gelu_pytorch_tanh", "silu"],
                "layer_types": [None, [FULL] * 4],
            },
        }
    )
    stretched = {"sliding_window": 40, "layer_types": None}
    windowed_rope = PLAIN


# Experts


# torch's grouped product takes rows of a multiple of 16 bytes; LoRA leaves experts alone
class ExpertsTests(FamilyTests):
    widths = (8, 16)
    lora_targets = ("qkv", "out")
    # Without output_router_logits it has no effect, and an export has 0
    rewritten = ("router_aux_loss_coef",)


BALANCED = {"router_aux_loss_coef": [0.02], "output_router_logits": [True, False]}


class TestMixtral(ExpertsTests):
    config_class = transformers.MixtralConfig
    drawn = {
        **{"intermediate_size": [24, 40], "num_local_experts": [3, 8], "sliding_window": [None, 7]},
        **{"num_experts_per_tok": [2, 3], "head_dim": [8, 16], **BALANCED},
    }


class TestQwen3Moe(ExpertsTests):
    config_class = transformers.Qwen3MoeConfig
    drawn = BIAS | {
        **{"intermediate_size": [24, 40], "moe_intermediate_size": [8, 24], "head_dim": [8, 16]},
        **{"num_experts": [3, 8], "num_experts_per_tok": [1, 3], "norm_topk_prob": [True, False]},
        **{"num_hidden_layers": [3], "mlp_only_layers": [[], [0, 1]], "sliding_window": [9]},
        **{"use_sliding_window": [False, True], **BALANCED},
    }


class TestGptOss(ExpertsTests):
    config_class = transformers.GptOssConfig
    drawn = BIAS | {
        **{"intermediate_size": [24, 40], "num_local_experts": [3, 8], "sliding_window": [7, 30]},
        **{"head_dim": [8, 14], "num_experts_per_tok": [1, 3], "swiglu_limit": [0.3, 7.0]},
        **{"rope_parameters": [None, PLAIN_ROPE], **BALANCED},
    }


class TestGlm4Moe(ExpertsTests):
    config_class = transformers.Glm4MoeConfig
    drawn = BIAS | {
        **{"moe_intermediate_size": [8, 24], "head_dim": [8, 16], "num_nextn_predict_layers": [0]},
        **{"n_routed_experts": [8], "num_experts_per_tok": [1, 2]},
        **{"n_shared_experts": [1, 2], "routed_scaling_factor": [1.0, 2.5]},
        **{"norm_topk_prob": [True, False], "use_qk_norm": [True, False]},
        **{"first_k_dense_replace": [0, 1]},
    }
    special = {"head_dim": 16}
    stretched = {"head_dim": 16}


class TestAfmoe(ExpertsTests):
    config_class = transformers.AfmoeConfig
    drawn = BIAS | {
        **{"moe_intermediate_size": [8, 24], "head_dim": [8, 10], "sliding_window": [7, 30]},
        **{"num_experts": [3, 8], "num_experts_per_tok": [1, 3], "num_shared_experts": [1, 2]},
        **{"global_attn_every_n_layers": [2, 3], "mup_enabled": [True, False]},
        **{"route_scale": [1.0, 2.5], "num_dense_layers": [0, 2], "num_hidden_layers": [4]},
        **{"layer_types": [None, [FULL, *[WINDOWED] * 3]]},
    }
    lora_targets = ("qkv", "out", "gate")
    stretched = {"sliding_window": 40}
