"""Small models of transformers' families, for tests of what transformers computes for us."""

import inspect
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

SIZES: dict[str, Any] = {
    "vocab_size": 301,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "initializer_range": 0.1,
    "sliding_window": 7,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
# Queries and values of different widths
LATENT: dict[str, Any] = {
    "q_lora_rank": 32,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
    "num_key_value_heads": 4,
}
MIXED = ["sliding_attention", "full_attention", "sliding_attention"]
RECURRENT = ["linear_attention", "full_attention", "linear_attention"]
OWN: dict[str, dict[str, Any]] = {
    "deepseek_v2": LATENT,
    "deepseek_v3": LATENT,
    "gemma2": {"query_pre_attn_scalar": 16},
    "gemma4_text": {"vocab_size_per_layer_input": 301, "hidden_size_per_layer_input": 8},
    "glm4_moe_lite": LATENT,
    **{kind: {"layer_types": RECURRENT} for kind in ("qwen3_next", "qwen3_5_text")},
    **{kind: {"layer_types": MIXED} for kind in ("gemma3_text", "cohere2", "olmo3", "exaone4")},
}
NAMES = """
    afmoe apertus arcee cohere cohere2 deepseek_v2 deepseek_v3 ernie4_5 ernie4_5_moe exaone4
    exaone_moe flex_olmo gemma gemma2 gemma3_text gemma4_text glm glm4 glm4_moe glm4_moe_lite
    gpt2 gpt_neox gpt_oss granite granite_swa granitemoe helium hunyuan_v1_dense hy_v3 jais2
    laguna llama mellum minimax_m2 ministral3 mistral mixtral nanochat nemotron olmo olmo2 olmo3
    olmoe phi3 qwen2 qwen2_moe qwen3 qwen3_moe seed_oss smollm3 solar_open stablelm starcoder2
    vaultgemma
"""
AGREE = NAMES.split()
# Recurrent or convolutional layers
LEAK = ("lfm3", "minimax", "nemotron_h", "qwen3_5_text", "qwen3_next")
FAST = ("cohere2", "deepseek_v3", "gemma2", "gemma4_text", "gpt2", "gpt_oss", "llama", "qwen3_moe")


def settings_of(kind: str) -> dict[str, Any]:
    """The settings of a small model with this model_type."""
    config_class: Any = CONFIG_MAPPING[kind]
    known = set(getattr(config_class, "__dataclass_fields__", {}))
    known |= set(inspect.signature(config_class.__init__).parameters)
    known |= set(config_class.attribute_map)
    keys = {"model_type": kind, **SIZES, **EXPERTS, **OWN.get(kind, {})}
    return {key: value for key, value in keys.items() if key in known or key == "model_type"}


def reference(kind: str) -> Any:
    """A model of transformers with random weights and its own attention, without dropout."""
    torch.manual_seed(0)
    config = CONFIG_MAPPING[kind].from_dict(settings_of(kind))
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    for weight in model.parameters():
        if weight.ndim == 1:  # ones and zeros would hide mistakes
            torch.nn.init.normal_(weight, mean=0.2, std=0.1)
    return model
