"""The keys of rope=, and the checks of transformers' rope_parameters."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from longctx.config.fields import Group, foreign_keys, key

WAYS = ("keep", "auto", "abf", "linear", "dynamic", "yarn", "llama3", "longrope")
# The length that the weights were trained for before any scaling.
ORIGINAL = "original_max_position_embeddings"
SHARE = "partial_rotary_factor"
OF_YARN = "factor attention_factor beta_fast beta_slow mscale mscale_all_dim truncate"
# rope_type → the keys that it needs, and its optional keys.
KEYS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "default": ((), ()),
    "linear": (("factor",), ()),
    "dynamic": (("factor",), ()),
    "yarn": ((ORIGINAL,), tuple(OF_YARN.split())),
    # The first channels rotate, with the frequencies of a whole head, as in Gemma 4
    "proportional": ((SHARE,), ("factor",)),
    "llama3": (("factor", "low_freq_factor", "high_freq_factor", ORIGINAL), ()),
    "longrope": (("short_factor", "long_factor", ORIGINAL), ("factor", "attention_factor")),
}


@dataclass
class RopeConfig(Group):
    """How the positions of init's weights are stretched to seq_len; set by rope=NAME."""

    prefix = "rope."
    type: str = key("auto", "set by rope=NAME", choices=WAYS, short=True)
    factor: float | None = key(None, "stretch by; null: seq_len / original", between=(1, 2**24))
    original: int | None = key(None, "trained length; null: config.json's", between=(2, 2**31 - 1))
    theta: float | None = key(None, "abf: new base of frequencies", above=1, needs="type=abf")
    options: dict[str, Any] = key({}, "the type's own: rope.options.beta_fast=32 of yarn")

    def problems(self) -> Iterator[str]:
        """Yield a message for keys that contradict each other."""
        needed, optional = KEYS.get(self.type, ((), ()))
        own = [option for option in (*needed, *optional) if option not in ("factor", ORIGINAL)]
        own += [] if self.type in ("keep", "abf") else ["factor", "original"]
        values = {"rope.factor": self.factor, "rope.original": self.original}
        values |= {f"rope.options.{option}": value for option, value in self.options.items()}
        yield from foreign_keys(values, own, f"rope={self.type}")
        if self.type == "abf" and self.theta is None:
            yield "rope=abf: needs the new base of the frequencies, such as rope.theta=5000000"


def check_scaling(
    prefix: str, scaling: Mapping[str, Any], head_dim: int, context: int | None
) -> None:
    """Raise ValueError for the first wrong key of rope_parameters; `prefix` begins its name."""
    rope_type = scaling.get("rope_type", "default")
    if not isinstance(rope_type, str) or rope_type not in KEYS:
        known = ", ".join(KEYS)
        raise ValueError(f"{prefix}.rope_type={rope_type} is not covered; there are {known}")
    needed, optional = KEYS[rope_type]
    for name in needed:
        if scaling.get(name) is None:
            raise ValueError(f"{prefix}.{name} is missing, which rope_type={rope_type} needs")
    # A key that nothing reads would be another formula than its writer's
    for name, value in scaling.items():
        if name == "rope_type":
            continue
        if name not in (*needed, *optional):
            raise ValueError(f"{prefix}.{name}={value!r} is not covered for rope_type={rope_type}")
        if name in ("short_factor", "long_factor"):
            is_right = isinstance(value, list | tuple) and len(value) == head_dim // 2
            is_right = is_right and all(map(is_number, value))
            expected = f"a list of {head_dim // 2} numbers, half the head size"
        elif name == "truncate":
            is_right = isinstance(value, bool)
            expected = "true or false"
        else:
            bound = "" if name.startswith("mscale") else " above 0"
            is_right = is_number(value) and (not bound or value > 0)
            is_right = is_right and (name != SHARE or value <= 1)
            expected = f"a number{bound}"
        if value is not None and not is_right:
            raise ValueError(f"{prefix}.{name}={str(value)[:60]} must be {expected}")
    if rope_type == "llama3" and not scaling["low_freq_factor"] < scaling["high_freq_factor"]:
        low = f"{prefix}.low_freq_factor={scaling['low_freq_factor']}"
        raise ValueError(f"{low} must be below high_freq_factor")
    # These compare the length of a sequence with that of the model's training
    by_length = rope_type in ("dynamic", "longrope")
    if context is None and (by_length or (rope_type == "yarn" and not scaling.get("factor"))):
        needed_too = "model.context, the tokens that the model was made for"
        raise ValueError(f"{prefix}.rope_type={rope_type}: needs {needed_too}")
    # Its base grows by a power of head_dim / (head_dim - 2)
    if rope_type == "dynamic" and head_dim <= 2:
        raise ValueError(f"{prefix}.rope_type=dynamic: needs heads of more than 2 channels")


def is_number(value: Any) -> bool:
    """Return True for a number that a float can hold: JSON's may have hundreds of digits."""
    has_type = isinstance(value, int | float) and not isinstance(value, bool)
    return has_type and abs(value) <= sys.float_info.max
