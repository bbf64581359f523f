"""Llama 1 to 3 and what is near them.

SmolLM3 has layers without rotary positions. Phi-3, Phi-3.5 and Phi-4 fuse their projections, which
is the layout here too. HunYuan's dense models normalize heads of q and k after they rotate.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from longctx.config.rope_config import ORIGINAL
from longctx.hf.families.config_json import ConfigJson
from longctx.hf.families.family import Family, register
from longctx.spec.model_config import GPTConfig

BIASES = {"attention_bias": ("qkv_bias", "out_bias"), "mlp_bias": ("mlp_bias",)}


@register
class Llama(Family):
    """No windows; biases in attention (all four) or the MLP (all three) or neither."""

    model_type = "llama"
    class_name = "Llama"
    defaults = {"max_position_embeddings": 2048}
    flags = BIASES


@register
class SmolLM3(Family):
    """Layers without rotation; windows in any layers; biases as in Llama."""

    model_type = "smollm3"
    class_name = "SmolLM3"
    defaults = {
        "num_key_value_heads": 4,
        "max_position_embeddings": 32768,
        "rope_theta": 2000000.0,
        "tie_word_embeddings": True,
    }
    flags = BIASES
    keys = ("no_rope_layers", "no_rope_layer_interval", "use_sliding_window", "sliding_window")

    def read_features(self, source: ConfigJson, layers: int) -> dict[str, Any]:
        return {"nope_layers": self.default_windowed(source, layers)}

    def default_windowed(self, source: ConfigJson, layers: int) -> Sequence[int]:
        """Return the layers without rotation: 0 in no_rope_layers, by default every fourth."""
        flags = source.get("no_rope_layers")
        if flags is None:
            name = "no_rope_layer_interval"
            every = source.with_defaults({name: 4}).size(name)
            return list(range(every - 1, layers, every))
        return [n for n in range(layers) if not flags[n]]


@register
class Phi3(Family):
    """One window; a share of each head rotates, by plain RoPE or longrope."""

    model_type = "phi3"
    class_name = "Phi3"
    defaults = {
        "max_position_embeddings": 4096,
        ORIGINAL: 4096,
        "rms_norm_eps": 1e-5,
    }
    keys = ("partial_rotary_factor", "sliding_window")
    # auto_map: code of Microsoft's folders, the same computation as transformers' own class
    harmless = (
        *("attention_bias", "auto_map", "embd_pdrop", "full_attn_mod", "interpolate_factor"),
        *("lm_head_bias", "mlp_bias", "resid_pdrop", "use_sliding_window"),
    )
    names = {
        **dict.fromkeys(("q_proj", "k_proj", "v_proj"), "qkv_proj"),
        **dict.fromkeys(("gate_proj", "up_proj"), "gate_up_proj"),
    }

    def read(self, source: ConfigJson) -> GPTConfig:
        rope = source.get(source.rope_key)
        # what the first folders called longrope
        if isinstance(rope, dict) and rope.get("type", rope.get("rope_type")) in ("su", "yarn"):
            rope = {key: rope[key] for key in rope if key != "type"} | {"rope_type": "longrope"}
            source = source.with_keys(**{source.rope_key: rope})
        return super().read(source)

    def read_features(self, source: ConfigJson, layers: int) -> dict[str, Any]:
        kind = source.rope()[1].get("rope_type", "default")
        source.refuse_unless(f"{source.rope_key}.rope_type", kind, ("longrope", "default"))
        return {}


@register
class HunYuanDenseV1(Family):
    """Biases in all of attention or nowhere, none in the MLP; no windows."""

    model_type = "hunyuan_v1_dense"
    class_name = "HunYuanDenseV1"
    defaults = {"max_position_embeddings": 2048, "rms_norm_eps": 1e-5}
    fixed = {"qk_norm": "head", "qk_norm_after_rope": True}
    flags = {"attention_bias": ("qkv_bias", "out_bias")}
    # Of its published folders; its class in transformers has no such keys
    harmless = (
        *("mlp_bias", "eod_token_id", "use_qk_norm", "attention_head_dim", "org_vocab_size"),
        *("use_cla", "cla_share_factor", "norm_type", "mask_init_id", "pad_id"),
    )
    names = {"q_norm": "query_layernorm", "k_norm": "key_layernorm"}

    def read(self, source: ConfigJson) -> GPTConfig:
        # "dynamic" with an alpha is a larger base for every length
        theta, scaling = source.rope()
        if scaling.get("rope_type") == "dynamic" and scaling.get("alpha") is not None:
            size = source.size("head_dim")
            theta *= ConfigJson(source.file, scaling).number("alpha", 1) ** (size / (size - 2))
            source = source.with_keys(rope_parameters={"rope_theta": theta}, rope_scaling=None)
        return super().read(source)
