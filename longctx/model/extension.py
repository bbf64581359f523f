"""Longer contexts for trained weights: which RoPE scaling `rope=NAME` means for a model and a length. Free of torch.

The outcome is the model's `rope_theta` and `rope_scaling`, in the words of transformers' rope_parameters; what they
compute stands in `rope.py`, and the exported config.json repeats them, so that other tools extend the same way.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from longctx.model.config import GPTConfig

WAYS = ("keep", "auto", "abf", "ntk", "linear", "dynamic", "yarn", "llama3", "longrope")
# rope_type → the keys that it needs, and those that it may have; "original" is short for the length of pretraining.
ORIGINAL = "original_max_position_embeddings"
KEYS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "default": ((), ()),
    "linear": (("factor",), ()),
    "dynamic": (("factor",), ()),
    "yarn": (
        (ORIGINAL,),
        ("factor", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
    ),
    "llama3": (("factor", "low_freq_factor", "high_freq_factor", ORIGINAL), ()),
    "longrope": (("short_factor", "long_factor", ORIGINAL), ("factor", "attention_factor")),
}


@dataclass
class RopeConfig:
    """How the positions of init's weights are stretched to seq_len; set by rope=NAME."""

    type: str = "keep"  # set by rope=NAME
    factor: float | None = None  # how many times the original length; null: seq_len / original
    original: int | None = None  # tokens that the weights were trained for; null: what their config.json says
    theta: float | None = None  # rope=abf: the new base of the frequencies
    options: dict[str, Any] = field(default_factory=dict)  # the type's own: rope.options.beta_fast=32 of yarn

    def validate(self) -> None:
        """Raise ValueError naming the first key that cannot be right."""
        if self.type not in WAYS:
            raise ValueError(f"rope={self.type}: one of {', '.join(WAYS)}")
        if self.factor is not None and not 1 <= self.factor <= 2**24:
            raise ValueError(f"rope.factor={self.factor}: a number from 1 up")
        if self.original is not None and self.original < 2:
            raise ValueError(f"rope.original={self.original}: a number of tokens from 2 up")
        if self.theta is not None and not 1 < self.theta < float("inf"):
            raise ValueError(f"rope.theta={self.theta}: a number above 1")
        if self.type == "abf" and self.theta is None:
            raise ValueError("rope=abf: needs the new base of the frequencies, such as rope.theta=5000000")
        if self.type != "abf" and self.theta is not None:
            raise ValueError(f"rope={self.type} rope.theta={self.theta}: rope.theta goes with rope=abf")
        for key in ("factor", "original"):
            if getattr(self, key) is not None and self.type in ("keep", "abf", "auto"):
                raise ValueError(f"rope.{key}={getattr(self, key)}: not used by rope={self.type}")
        allowed = sum(KEYS.get(self.type, ((), ())), ())
        for key, value in self.options.items():
            if key not in allowed or key in ("factor", ORIGINAL):
                have = ", ".join(x for x in allowed if x not in ("factor", ORIGINAL)) or "none"
                raise ValueError(f"rope.options.{key}={value}: not an option of rope={self.type}; it has: {have}")


def check_scaling(place: str, scaling: Mapping[str, Any], head_dim: int, context: int | None) -> None:
    """Raise ValueError naming `place`.<key> for the first key of rope_parameters that is missing, unknown or wrong."""
    kind = scaling.get("rope_type", "default")
    if kind not in KEYS:
        raise ValueError(f"{place}.rope_type={kind} is not covered; there are {', '.join(KEYS)}")
    needed, more = KEYS[kind]
    for key, value in scaling.items():
        if key not in (*needed, *more, "rope_type"):
            raise ValueError(f"{place}.{key}={value!r} is not covered for rope_type={kind}")
    for key in needed:
        if scaling.get(key) is None:
            raise ValueError(f"{place}.{key} is missing, which rope_type={kind} needs")
    for key in ("factor", "attention_factor", "beta_fast", "beta_slow", "low_freq_factor", "high_freq_factor"):
        value = scaling.get(key)
        if value is not None and not (_is_number(value) and value > 0):
            raise ValueError(f"{place}.{key}={value!r} must be a number above 0")
    for key in ("mscale", "mscale_all_dim"):
        if scaling.get(key) is not None and not _is_number(scaling[key]):
            raise ValueError(f"{place}.{key}={scaling[key]!r} must be a number")
    if not isinstance(scaling.get("truncate", True), bool):
        raise ValueError(f"{place}.truncate={scaling['truncate']!r} must be true or false")
    old = scaling.get(ORIGINAL, 2)
    if not isinstance(old, int) or isinstance(old, bool) or old < 2:
        raise ValueError(f"{place}.{ORIGINAL}={old!r} must be a whole number from 2 up")
    _check_type(place, kind, scaling, head_dim, context)


def _check_type(place: str, kind: str, scaling: Mapping[str, Any], head_dim: int, context: int | None) -> None:
    for key in ("short_factor", "long_factor") if kind == "longrope" else ():
        found = scaling[key]
        if not isinstance(found, list | tuple) or len(found) != head_dim // 2 or not all(_is_number(x) for x in found):
            raise ValueError(f"{place}.{key} must be a list of {head_dim // 2} numbers, half the head size")
    if kind == "llama3" and not scaling["low_freq_factor"] < scaling["high_freq_factor"]:
        raise ValueError(f"{place}.low_freq_factor={scaling['low_freq_factor']} must be below high_freq_factor")
    if context is None and (kind in ("dynamic", "longrope") or (kind == "yarn" and scaling.get("factor") is None)):
        raise ValueError(f"{place}.rope_type={kind}: needs model.context, the tokens that the model was made for")
    if kind == "dynamic" and head_dim <= 2:
        raise ValueError(f"{place}.rope_type=dynamic: needs heads of more than 2 channels")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < float("inf")


def extended(model: GPTConfig, asked: RopeConfig, seq_len: int) -> tuple[GPTConfig, str]:
    """`model` with its positions stretched to `seq_len` as `asked` says, and a line that says how, empty for keep.

    `model.context` and `model.rope_scaling` say what the weights were trained for. Raises ValueError where `asked`
    cannot be done with them or does not reach `seq_len`.
    """
    asked.validate()
    if model.context is None:
        raise ValueError(f"rope={asked.type}: the length that the weights were trained for is not known")
    kind = chosen(model, seq_len) if asked.type == "auto" else asked.type
    if kind == "keep":
        if asked.type == "keep":
            return model, ""
        if model.rope_scaling.get("rope_type") == "dynamic" and seq_len > model.context:
            return model, "auto: kept, rope_type=dynamic of the weights stretches itself to any length"
        return model, f"auto: kept, the weights' own {model.context:,} tokens hold {seq_len:,}"
    if kind == "abf":
        assert asked.theta is not None
        made = replace(model, rope_theta=asked.theta, rope_scaling={}, context=max(model.context, seq_len))
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
    model: GPTConfig, kind: str, factor: float, original: int, options: Mapping[str, Any], seq_len: int
) -> GPTConfig:
    assert model.context is not None
    context = max(model.context, seq_len)
    if kind == "ntk":
        D = model.head_size
        if D <= 2:
            raise ValueError("rope=ntk: needs heads of more than 2 channels")
        return replace(model, rope_theta=model.rope_theta * factor ** (D / (D - 2)), rope_scaling={}, context=context)
    scaling: dict[str, Any] = {"rope_type": kind, "factor": factor}
    if ORIGINAL in KEYS[kind][0]:
        scaling[ORIGINAL] = original
    if kind == "llama3":
        scaling |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    if kind == "dynamic":
        context = original  # from which its base starts to grow; transformers has no other key for it
    if model.rope_scaling.get("rope_type") == kind:
        scaling = dict(model.rope_scaling) | {key: scaling[key] for key in ("factor", ORIGINAL) if key in scaling}
    return replace(model, rope_scaling=scaling | dict(options), context=context)
