"""Models as transformers describes them: those of benchmarks, and small ones of every family, for
the table of models and for tests.
"""

from __future__ import annotations

import inspect
from typing import Any

GEMMA_LAYERS = [*["sliding_attention"] * 5, "full_attention"]
SHAPES: dict[str, dict[str, Any]] = {
    "gemma-3-1b": {
        **{"model_type": "gemma3_text", "vocab_size": 262144, "hidden_size": 1152},
        **{"intermediate_size": 6912, "num_hidden_layers": 26, "num_attention_heads": 4},
        **{"num_key_value_heads": 1, "head_dim": 256, "query_pre_attn_scalar": 256},
        **{"sliding_window": 512, "layer_types": (GEMMA_LAYERS * 5)[:26]},
        **{"max_position_embeddings": 32768, "tie_word_embeddings": True},
    },
    "gpt-oss-20b": {
        **{"model_type": "gpt_oss", "vocab_size": 201088, "hidden_size": 2880},
        **{"intermediate_size": 2880, "num_local_experts": 32, "num_experts_per_tok": 4},
        **{"num_hidden_layers": 24, "num_attention_heads": 64, "num_key_value_heads": 8},
        **{"head_dim": 64, "sliding_window": 128, "max_position_embeddings": 131072},
        "layer_types": ["sliding_attention", "full_attention"] * 12,
        "tie_word_embeddings": False,
    },
    "llama-3.2-1b": {
        **{"model_type": "llama", "vocab_size": 128256, "hidden_size": 2048},
        **{"intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32},
        **{"num_key_value_heads": 8, "head_dim": 64, "rms_norm_eps": 1e-5},
        **{"max_position_embeddings": 131072, "tie_word_embeddings": True},
    },
    "qwen3-30b-a3b-4": {  # 4 of 48 layers
        **{"model_type": "qwen3_moe", "vocab_size": 151936, "hidden_size": 2048},
        **{"intermediate_size": 6144, "moe_intermediate_size": 768, "num_experts": 128},
        **{"num_experts_per_tok": 8, "norm_topk_prob": True, "num_hidden_layers": 4},
        **{"num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128},
        **{"max_position_embeddings": 40960, "tie_word_embeddings": False},
    },
    "qwen3-8b": {
        **{"model_type": "qwen3", "vocab_size": 151936, "hidden_size": 4096},
        **{"intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32},
        **{"num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 131072},
        "tie_word_embeddings": False,
    },
}
SIZES: dict[str, Any] = {
    **{"vocab_size": 301, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16},
    **dict.fromkeys(("decoder_layers", "encoder_layers"), 3),
    **dict.fromkeys(("decoder_attention_heads", "encoder_attention_heads"), 4),
    **dict.fromkeys(("decoder_ffn_dim", "encoder_ffn_dim"), 96),
    **{"max_position_embeddings": 256, "initializer_range": 0.1, "sliding_window": 7},
    **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id")),
}
EXPERTS: dict[str, Any] = {
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    **{"moe_num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    **{"shared_expert_intermediate_size": 32, "shared_intermediate_size": 32},
    **{"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1},
}
# Layers that remember, and layers that choose few keys
STATES: dict[str, Any] = {
    **{"mamba_n_heads": 8, "mamba_d_state": 16, "mamba_d_head": 16, "mamba_chunk_size": 16},
    **{"use_mamba_kernels": False, "linear_num_heads": 4, "linear_head_dim": 16},
    **{"index_topk": 8, "index_n_heads": 2, "index_head_dim": 16},
    **{"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 16},
    **{"indexer_budget": 8, "indexer_compress_ratio": 2},
}
# Queries and values of different widths
LATENT: dict[str, Any] = {
    **{"q_lora_rank": 32, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16},
    **{"v_head_dim": 12, "num_key_value_heads": 4},
}
MIXED = ["sliding_attention", "full_attention", "sliding_attention"]
RECURRENT = ["linear_attention", "full_attention", "linear_attention"]
PER_LAYER = {"vocab_size_per_layer_input": 301, "hidden_size_per_layer_input": 8}
ROPES = {kind: {"rope_type": "default", "rope_theta": 10000.0} for kind in MIXED}
OWN: dict[str, dict[str, Any]] = {
    "bailing_hybrid": {**LATENT, "layer_types": RECURRENT},
    "bamba": {"attn_layer_indices": [1]},
    "cohere_compass_text": {"layer_types": MIXED, "rope_parameters": ROPES},
    "cwm": {"bos_token_id": 0, "eos_token_id": [1]},
    "dbrx": {
        **{"d_model": 64, "n_heads": 4, "n_layers": 3, "max_seq_len": 256},
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
        "ffn_config": {"hidden_size": 64, "ffn_hidden_size": 32, "moe_top_k": 2},
    },
    "dots1": {"n_shared_experts": 1},
    "falcon_h1": {"mamba_d_ssm": 128},
    "gemma2": {"query_pre_attn_scalar": 16},
    "gemma3n_text": {
        **PER_LAYER,
        **{"layer_types": MIXED, "num_kv_shared_layers": 0, "laurel_rank": 8},
    },
    "gemma4_text": PER_LAYER,
    "gpt_neo": {"attention_types": [[["global", "local", "global"], 1]]},
    "granitemoehybrid": {"layer_types": RECURRENT},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "kimi_linear": {**LATENT, "q_lora_rank": None, "layer_types": RECURRENT},
    "longcat_flash": {
        **LATENT,
        **{"qk_rope_head_dim": 16, "num_layers": 2, "ffn_hidden_size": 96, "moe_topk": 2},
        **{"expert_ffn_hidden_size": 32, "zero_expert_num": 2},
    },
    "mamba2": {"num_heads": 8},
    "mimo_v2_flash": {"v_head_dim": 16},
    "minimax_m3_vl_text": {
        "layer_types": ["full_attention", "minimax_m3_sparse", "full_attention"]
    },
    "modernbert-decoder": dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), 0),
    "nemotron_h": {"layers_block_type": ["mamba", "attention", "moe"]},
    "zamba2": {
        **{"layers_block_type": ["mamba", "hybrid", "mamba"], "n_mamba_heads": 8},
        **{"mamba_d_state": 16, "mamba_headdim": 16},
    },
    "zaya": {"num_experts_per_tok": 1, "router_hidden_size": 16},
}
# The same for several
ALIKE: tuple[tuple[str, dict[str, Any]], ...] = (
    ("axk1 axk2 deepseek_v2 deepseek_v3 deepseek_v32 dots3_note_text", LATENT),
    ("glm4_moe_lite glm_moe_dsa hy_v4 minicpm3 youtu", LATENT),
    ("qwen3_next qwen3_5_text qwen3_5_moe_text qwen4_exp_text", {"layer_types": RECURRENT}),
    ("lfm2 lfm2_moe", {"layer_types": ["conv", "full_attention", "conv"]}),
    ("gemma3_text cohere2 olmo3 exaone4", {"layer_types": MIXED}),
)
OWN |= {kind: settings for kinds, settings in ALIKE for kind in kinds.split()}


def settings_of(kind: str) -> dict[str, Any]:
    """Return the settings of a small model with this model_type."""
    from transformers import CONFIG_MAPPING

    if kind not in CONFIG_MAPPING:
        return {"model_type": kind}
    config_class: Any = CONFIG_MAPPING[kind]
    known = set(getattr(config_class, "__dataclass_fields__", {}))
    known |= set(inspect.signature(config_class.__init__).parameters)
    known |= {alias for alias, name in config_class.attribute_map.items() if name not in EXPERTS}
    keys = {key: value for key, value in (SIZES | EXPERTS | STATES).items() if key in known}
    return {"model_type": kind, **keys, **OWN.get(kind, {})}


def reference(kind: str) -> Any:
    """Return a model of transformers with random weights and its own attention, without dropout."""
    import torch
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    torch.manual_seed(0)
    config = CONFIG_MAPPING[kind].from_dict(settings_of(kind))
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    for weight in model.parameters():
        if weight.ndim == 1:  # ones and zeros would hide mistakes
            torch.nn.init.normal_(weight, mean=0.2, std=0.1)
    return model
