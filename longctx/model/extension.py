"""Longer contexts for trained weights: which RoPE scaling `rope=NAME` means for a model and a length. Free of torch.

The outcome is the model's `rope_theta` and `rope_scaling`, in the words of transformers' rope_parameters; what they
compute stands in `rope.py`, and the exported config.json repeats them, so that other tools extend the same way.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from longctx.config.model_config import GPTConfig
from longctx.config.rope_config import KEYS, ORIGINAL, RopeConfig


def extended(model: GPTConfig, asked: RopeConfig, seq_len: int) -> tuple[GPTConfig, str]:
    """`model` with its positions stretched to `seq_len` as `asked` says, and a line that says how, empty for keep.

    `model.context` and `model.rope_scaling` say what the weights were trained for. Raises ValueError where `asked`
    cannot be done with them or does not reach `seq_len`.
    """
    asked.validate()
    if model.context is None:
        raise ValueError(
            f"rope={asked.type}: the length that the weights were trained for is not known"
        )
    kind = chosen(model, seq_len) if asked.type == "auto" else asked.type
    if kind == "keep":
        if asked.type == "keep":
            return model, ""
        if model.rope_scaling.get("rope_type") == "dynamic" and seq_len > model.context:
            return (
                model,
                "auto: kept, rope_type=dynamic of the weights stretches itself to any length",
            )
        return model, f"auto: kept, the weights' own {model.context:,} tokens hold {seq_len:,}"
    if kind == "abf":
        assert asked.theta is not None
        made = replace(
            model, rope_theta=asked.theta, rope_scaling={}, context=max(model.context, seq_len)
        )
        return made, f"abf: base {model.rope_theta:g} → {asked.theta:g}"
    original = asked.original or _original(model, kind)
    factor = asked.factor or seq_len / original
    if factor * original < seq_len:
        raise ValueError(
            f"rope.factor={factor:g}: stretches {original:,} tokens to {int(factor * original):,}, less than "
            f"seq_len={seq_len}; give rope.factor={seq_len / original:g} or leave it out"
        )
    if factor < 1:
        raise ValueError(
            f"rope={asked.type}: the weights' {original:,} tokens hold seq_len={seq_len} already; leave rope out"
        )
    made = _stretched(model, kind, factor, original, asked.options, seq_len)
    try:
        made.validate()
    except ValueError as error:
        raise ValueError(str(error).replace("model.rope_scaling.", "rope.options.")) from error
    line = f"{kind}: {original:,} tokens × {factor:g} = {int(factor * original):,}"
    if kind == "ntk":
        line += f", base {model.rope_theta:g} → {made.rope_theta:g}"
    return made, f"auto: {line}" if asked.type == "auto" else line


def chosen(model: GPTConfig, seq_len: int) -> str:
    """What rope=auto means: nothing where the model's own length holds `seq_len`; else more of the scaling that its
    weights know, and YaRN, which needs the least training to adapt (arXiv 2309.00071), where they know none.
    """
    assert model.context is not None
    kind: str = model.rope_scaling.get("rope_type", "default")
    if seq_len <= model.context or kind == "dynamic":
        return "keep"
    if kind == "longrope":
        raise ValueError(
            f"rope=auto: longrope's factors were searched for {model.context:,} tokens, and seq_len={seq_len} is more; "
            "say rope=yarn, or rope=longrope with factors for it"
        )
    return "yarn" if kind == "default" else kind


def _original(model: GPTConfig, kind: str) -> int:
    """The length that the frequencies without scaling were trained for."""
    assert model.context is not None
    had = model.rope_scaling
    if had.get("rope_type") == "linear":
        return max(2, round(model.context / had["factor"]))
    return int(had.get(ORIGINAL) or model.context)


def _stretched(
    model: GPTConfig,
    kind: str,
    factor: float,
    original: int,
    options: Mapping[str, Any],
    seq_len: int,
) -> GPTConfig:
    assert model.context is not None
    context = max(model.context, seq_len)
    if kind == "ntk":
        D = model.head_size
        if D <= 2:
            raise ValueError("rope=ntk: needs heads of more than 2 channels")
        return replace(
            model,
            rope_theta=model.rope_theta * factor ** (D / (D - 2)),
            rope_scaling={},
            context=context,
        )
    scaling: dict[str, Any] = {"rope_type": kind, "factor": factor}
    if ORIGINAL in KEYS[kind][0]:
        scaling[ORIGINAL] = original
    if kind == "llama3":
        scaling |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    if kind == "dynamic":
        context = (
            original  # from which its base starts to grow; transformers has no other key for it
        )
    if model.rope_scaling.get("rope_type") == kind:
        scaling = dict(model.rope_scaling) | {
            key: scaling[key] for key in ("factor", ORIGINAL) if key in scaling
        }
    return replace(model, rope_scaling=scaling | dict(options), context=context)
