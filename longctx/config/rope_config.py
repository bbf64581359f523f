"""The keys of rope=, and the checks of transformers' rope_parameters."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from longctx.config.fields import Group, key, refuse

WAYS = ("keep", "auto", "abf", "ntk", "linear", "dynamic", "yarn", "llama3", "longrope")
# The length that the weights were trained for before any scaling.
ORIGINAL = "original_max_position_embeddings"
# rope_type → the keys that it needs, and its optional keys.
KEYS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "default": ((), ()),
    "linear": (("factor",), ()),
    "dynamic": (("factor",), ()),
    "yarn": (
        (ORIGINAL,),
        (
            "factor",
            "attention_factor",
            "beta_fast",
            "beta_slow",
            "mscale",
            "mscale_all_dim",
            "truncate",
        ),
    ),
    "llama3": (("factor", "low_freq_factor", "high_freq_factor", ORIGINAL), ()),
    "longrope": (("short_factor", "long_factor", ORIGINAL), ("factor", "attention_factor")),
}


@dataclass
class RopeConfig(Group):
    """How the positions of init's weights are stretched to seq_len; set by rope=NAME."""

    prefix = "rope."
    type: str = key("keep", "set by rope=NAME", choices=WAYS)
    factor: float | None = key(
        None, "how many times the original length; null: seq_len / original", between=(1, 2**24)
    )
    original: int | None = key(
        None,
        "tokens that the weights were trained for; null: as in their config.json",
        between=(2, 2**31 - 1),
    )
    theta: float | None = key(None, "rope=abf: the new base of the frequencies", above=1)
    options: dict[str, Any] = key({}, "the type's own: rope.options.beta_fast=32 of yarn")

    def check_together(self) -> None:
        """Raise ValueError for keys that contradict each other."""
        unused = self.type in ("keep", "abf", "auto")
        refuse(
            (
                self.type == "abf" and self.theta is None,
                "rope=abf: needs the new base of the frequencies, such as rope.theta=5000000",
            ),
            (
                self.type != "abf" and self.theta is not None,
                f"rope={self.type} rope.theta={self.theta}: rope.theta goes with rope=abf",
            ),
            *(
                (unused and value is not None, f"rope.{name}={value}: not used by rope={self.type}")
                for name, value in (("factor", self.factor), ("original", self.original))
            ),
        )
        allowed = sum(KEYS.get(self.type, ((), ())), ())
        for name, value in self.options.items():
            if name not in allowed or name in ("factor", ORIGINAL):
                options = ", ".join(x for x in allowed if x not in ("factor", ORIGINAL)) or "none"
                raise ValueError(
                    f"rope.options.{name}={value}: not an option of rope={self.type}; "
                    f"it has: {options}"
                )


def check_scaling(
    place: str, scaling: Mapping[str, Any], head_dim: int, context: int | None
) -> None:
    """Raise ValueError for the first wrong key of rope_parameters, which are called `place`."""
    kind = scaling.get("rope_type", "default")
    if not isinstance(kind, str) or kind not in KEYS:
        raise ValueError(f"{place}.rope_type={kind} is not covered; there are {', '.join(KEYS)}")
    needed, more = KEYS[kind]
    for name, value in scaling.items():
        if name not in (*needed, *more, "rope_type"):
            raise ValueError(f"{place}.{name}={value!r} is not covered for rope_type={kind}")
    for name in needed:
        if scaling.get(name) is None:
            raise ValueError(f"{place}.{name} is missing, which rope_type={kind} needs")
    for name in (
        "factor",
        "attention_factor",
        "beta_fast",
        "beta_slow",
        "low_freq_factor",
        "high_freq_factor",
    ):
        value = scaling.get(name)
        if value is not None and not (is_number(value) and value > 0):
            raise ValueError(f"{place}.{name}={value!r} must be a number above 0")
    for name in ("mscale", "mscale_all_dim"):
        if scaling.get(name) is not None and not is_number(scaling[name]):
            raise ValueError(f"{place}.{name}={scaling[name]!r} must be a number")
    if not isinstance(scaling.get("truncate", True), bool):
        raise ValueError(f"{place}.truncate={scaling['truncate']!r} must be true or false")
    original = scaling.get(ORIGINAL, 2)
    is_whole = isinstance(original, int) and not isinstance(original, bool)
    if not is_whole or not 2 <= original < 2**31:
        raise ValueError(
            f"{place}.{ORIGINAL}={original!r} must be a whole number from 2 to 2**31 - 1"
        )
    _check_type(place, kind, scaling, head_dim, context)


def _check_type(
    place: str, kind: str, scaling: Mapping[str, Any], head_dim: int, context: int | None
) -> None:
    for name in ("short_factor", "long_factor") if kind == "longrope" else ():
        factors = scaling[name]
        if (
            not isinstance(factors, list | tuple)
            or len(factors) != head_dim // 2
            or not all(is_number(x) for x in factors)
        ):
            raise ValueError(
                f"{place}.{name} must be a list of {head_dim // 2} numbers, half the head size"
            )
    if kind == "llama3" and not scaling["low_freq_factor"] < scaling["high_freq_factor"]:
        raise ValueError(
            f"{place}.low_freq_factor={scaling['low_freq_factor']} must be below high_freq_factor"
        )
    if context is None and (
        kind in ("dynamic", "longrope") or (kind == "yarn" and scaling.get("factor") is None)
    ):
        raise ValueError(
            f"{place}.rope_type={kind}: needs model.context, the tokens that the model was made for"
        )
    if kind == "dynamic" and head_dim <= 2:
        raise ValueError(f"{place}.rope_type=dynamic: needs heads of more than 2 channels")


def is_number(value: Any) -> bool:
    """Return True for a number that a float can hold: JSON's may have hundreds of digits."""
    has_type = isinstance(value, int | float) and not isinstance(value, bool)
    return has_type and abs(value) <= sys.float_info.max
