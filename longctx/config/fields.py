"""How a key of a configuration is declared: default, meaning, range and choices beside the field.

Every dataclass of this package is made of these. None imports torch, so that `--help` and every
mistake in a command line are answered in about a second.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from copy import copy
from typing import Any


def key(
    default: Any,
    meaning: str,
    *,
    between: tuple[float, float] | None = None,
    choices: Sequence[str] = (),
) -> Any:
    """A field with its `default` and help text, checked by `check`.

    between: smallest and largest number allowed. choices: the words allowed, the first of which
    the help names first. A value of None is for the dataclass's own `validate` to judge.
    """
    metadata = {"help": meaning, "between": between, "choices": tuple(choices)}
    if isinstance(default, list | dict):
        return dataclasses.field(default_factory=lambda: copy(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def group(schema: type) -> Any:
    """A field that holds the keys of another dataclass, such as `model` with `model.layers`."""
    return dataclasses.field(default_factory=schema)


def check(config: Any, prefix: str = "") -> None:
    """Raise ValueError for the first key of `config` outside its declared range or choices."""
    for item in dataclasses.fields(config):
        value = getattr(config, item.name)
        between, choices = item.metadata.get("between"), item.metadata.get("choices")
        if value is None:
            continue
        if between is not None and not isinstance(value, str):
            in_range(f"{prefix}{item.name}", value, *between)
        if choices and value not in choices:
            raise ValueError(f"{prefix}{item.name}={value}: one of {', '.join(choices)}")


def in_range(name: str, value: float, least: float, most: float) -> None:
    """Raise ValueError unless `least` <= `value` <= `most`; NaN is in no range."""
    if not least <= value <= most:
        bounds = f"from {least:,} to {most:,}" if most < float("inf") else f"from {least:,} up"
        raise ValueError(f"{name}={value}: a number {bounds}")
