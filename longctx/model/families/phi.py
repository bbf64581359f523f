"""Phi-3, Phi-3.5 and Phi-4: Llama with fused projections, which is the layout here too."""

from __future__ import annotations

from typing import Any

from longctx.config.model_config import GPTConfig
from longctx.config.rope_config import ORIGINAL
from longctx.model.families.config_json import ConfigJson
from longctx.model.families.family import Family, register


@register
class Phi3(Family):
    """One window; a share of each head rotates, by plain RoPE or longrope.

    If all of it rotates, Llama or Mistral writes the model, with the same tensors unfused.
    """

    model_type = "phi3"
    class_name = "Phi3"
    rank = 5
    defaults = {
        "max_position_embeddings": 4096,
        ORIGINAL: 4096,
        "rms_norm_eps": 1e-5,
    }
    keys = ("partial_rotary_factor",)
    # auto_map: code of Microsoft's folders, the same computation as transformers' own class
    harmless = (
        *("attention_bias", "auto_map", "embd_pdrop", "full_attn_mod", "interpolate_factor"),
        *("lm_head_bias", "mlp_bias", "resid_pdrop", "use_sliding_window"),
    )
    names = {
        **dict.fromkeys(("q_proj", "k_proj", "v_proj"), "qkv_proj"),
        **dict.fromkeys(("gate_proj", "up_proj"), "gate_up_proj"),
    }
    features = ("window", "rotary_share")
    states_head_dim = False

    def suits(self, config: GPTConfig) -> bool:
        is_plain = config.norms == "pre" and config.qk_norm == "none"
        return is_plain and config.rotary_share != 1

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

    def check_features(self, config: GPTConfig) -> None:
        if config.rope_scaling.get("rope_type", "default") not in ("default", "longrope"):
            raise self.cannot(config, "rope_scaling")

    def write_features(self, config: GPTConfig) -> dict[str, Any]:
        original = config.rope_scaling.get(ORIGINAL)
        return {ORIGINAL: original} if original else {}
