"""Longer contexts for trained weights: what `rope=NAME` means for a model and a length.

The outcome is the model's `rope_theta` and `rope_scaling`, named as transformers' rope_parameters.
`rope.py` computes them, and the exported config.json repeats them. Free of torch.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from longctx.config.fields import refuse
from longctx.config.rope_config import KEYS, ORIGINAL, RopeConfig
from longctx.spec.model_config import GPTConfig


def extended(model: GPTConfig, rope: RopeConfig, seq_len: int) -> tuple[GPTConfig, str]:
    """Return `model` with positions stretched to `seq_len` by `rope`, and a line about it.

    The line is empty if they stay. `model.context` and `model.rope_scaling` describe the length
    that the weights were trained for. Raises ValueError if `rope` cannot be done with them or does
    not reach `seq_len`.
    """
    rope.validate()
    if model.context is None:
        raise ValueError(f"rope={rope.type}: the length that it was trained for is not known")
    kind = rope.type
    if kind == "auto":
        # A run of several lengths, or the first of several runs, stretches to the last one at once
        reached = int((rope.factor or 1) * (rope.original or model.context))
        kind = automatic(model, max(seq_len, reached))
    if len(model.nope_layers) == model.layers and kind != "keep":
        raise ValueError(f"rope={rope.type}: no layer has positions to stretch; leave rope out")
    if kind == "keep":
        unused = f"rope.original={rope.original}: nothing is stretched to seq_len={seq_len}"
        refuse((rope.original, f"{unused}; leave it out"))
        is_short = rope.type == "keep" or seq_len <= model.context
        # Positions of rope_type=dynamic stretch themselves, and some models have none
        return model, "" if is_short else "auto: kept, its layers take any length"
    is_lost = model.rope_scaling.get("rope_type") == "proportional" != kind
    refuse((is_lost, f"rope={kind}: a share of each head rotates; give rope=auto, or rope=keep"))
    # A larger base stretches without a factor (arXiv 2309.16039), so no length is refused
    if kind == "abf":
        assert rope.theta is not None
        context = max(model.context, seq_len)
        raised = replace(model, rope_theta=rope.theta, rope_scaling={}, context=context)
        return raised, f"abf: base {model.rope_theta:g} → {rope.theta:g}"

    # From the length that frequencies without scaling were trained for. By default the factor
    # reaches seq_len exactly; a given one must reach it too
    own, trained = model.rope_scaling, model.rope_scaling.get(ORIGINAL) or model.context
    # Llama 3.2 reads 131,072 tokens by a factor of 32: its 8,192 only divide the frequencies
    of_own = own.get("rope_type")
    if of_own in ("linear", "proportional") or of_own == kind == "llama3":
        trained = max(2, round(model.context / own.get("factor", 1.0)))
    original = rope.original or int(trained)
    factor = rope.factor or seq_len / original
    reached = int(factor * original + 1e-6)  # 1.001 · 1,000 is less than 1,001 in fp64
    short = f"rope.factor={factor:g}: stretches {original:,} tokens to {reached:,}, less than "
    short += f"seq_len={seq_len}; give rope.factor={seq_len / original} or leave it out"
    held = f"rope={rope.type}: the weights' {original:,} tokens hold seq_len={seq_len} already"
    refuse((reached < seq_len, short), (factor < 1, f"{held}; leave rope out"))

    # Options become keys of rope_scaling, so its errors are reworded to name the option
    scaling: dict[str, Any] = {"rope_type": kind, "factor": factor}
    if ORIGINAL in KEYS[kind][0]:
        scaling[ORIGINAL] = rope.original or own.get(ORIGINAL) or original
    if own.get("rope_type") == kind:
        # Other keys of the model's own stay
        scaling = dict(own) | scaling
    elif kind == "llama3":
        scaling |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling |= rope.options
    # dynamic's base begins to grow at this length; transformers has no other key for it
    context = original if kind == "dynamic" else max(model.context, seq_len, reached)
    stretched = replace(model, rope_scaling=scaling, context=context)
    try:
        stretched.validate()
    except ValueError as error:
        raise ValueError(str(error).replace("model.rope_scaling.", "rope.options.")) from error
    line = f"{kind}: {original:,} tokens × {factor:g} = {reached:,}"
    return stretched, f"auto: {line}" if rope.type == "auto" else line


def automatic(model: GPTConfig, seq_len: int) -> str:
    """Return the name that rope=auto stands for."""
    # keep if the model's own length holds `seq_len`, else the scaling of its weights. Weights
    # without scaling get YaRN, which needs the least training to adapt (arXiv 2309.00071).
    assert model.context is not None
    kind = model.rope_scaling.get("rope_type", "default")
    if seq_len <= model.context or kind == "dynamic" or len(model.nope_layers) == model.layers:
        return "keep"
    searched = f"rope=auto: longrope's factors were searched for {model.context:,} tokens, and "
    searched += f"seq_len={seq_len} is more; say rope=keep, yarn, or longrope with factors for it"
    refuse((kind == "longrope", searched))
    return "yarn" if kind == "default" else kind
