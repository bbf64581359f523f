"""HunYuan's dense models: heads of q and k are normalized after they rotate.

Its "dynamic" rope with an alpha is a larger base for every length, and is read as that.
"""

from __future__ import annotations

from longctx.config.model_config import GPTConfig
from longctx.model.families.config_json import ConfigJson
from longctx.model.families.family import Family, register


@register
class HunYuanDenseV1(Family):
    """Biases in all of attention or nowhere, none in the MLP; no windows."""

    model_type = "hunyuan_v1_dense"
    class_name = "HunYuanDenseV1"
    rank = 5
    defaults = {"max_position_embeddings": 2048, "rms_norm_eps": 1e-5}
    fixed = {"qk_norm": "head", "qk_norm_after_rope": True}
    flags = {"attention_bias": ("qkv_bias", "out_bias")}
    # Of its published folders; its class in transformers has no such keys
    harmless = (
        *("mlp_bias", "eod_token_id", "use_qk_norm", "attention_head_dim", "org_vocab_size"),
        *("use_cla", "cla_share_factor", "norm_type", "mask_init_id", "pad_id"),
    )
    names = {"q_norm": "query_layernorm", "k_norm": "key_layernorm"}

    def suits(self, config: GPTConfig) -> bool:
        return config.qk_norm == "head" and config.qk_norm_after_rope

    def read(self, source: ConfigJson) -> GPTConfig:
        theta, scaling = source.rope()
        if scaling.get("rope_type") == "dynamic" and scaling.get("alpha") is not None:
            size = source.size("head_dim")
            theta *= ConfigJson(source.file, scaling).number("alpha", 1) ** (size / (size - 2))
            source = source.with_keys(rope_parameters={"rope_theta": theta}, rope_scaling=None)
        return super().read(source)
