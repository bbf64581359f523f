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
    word: str | None = None,
    positional: bool = False,
    short: bool = False,
    literal: bool = False,
) -> Any:
    """A field with its `default` and help text, checked by `check`.

    between: smallest and largest number allowed, of each item where the field is a list.
    choices: the words allowed, the first of which the help names first.
    word: the one word that may stand where a number is meant, as in seq_len=max.
    positional: the command line gives it without `key=`, as in `watch runs/NAME`.
    short: the name of its group stands for it, as passkey=true for passkey.enabled=true.
    literal: the command line's text is the value, whatever characters it has.
    A value of None is for the dataclass's own `validate` to judge.
    """
    metadata = {
        "help": meaning,
        "between": between,
        "choices": tuple(choices),
        "word": word,
        "positional": positional,
        "short": short,
        "literal": literal,
    }
    if isinstance(default, list | dict):
        return dataclasses.field(default_factory=lambda: copy(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def group(schema: type) -> Any:
    """A field that holds the keys of another dataclass, such as `model` with `model.layers`."""
    return dataclasses.field(default_factory=schema)


def check(config: Any, prefix: str = "") -> None:
    """Raise ValueError for the first key of `config` outside its declared range or choices, or
    with a list in a flat list, which OmegaConf lets through.
    """
    for item in dataclasses.fields(config):
        name, value = f"{prefix}{item.name}", getattr(config, item.name)
        between, choices = item.metadata.get("between"), item.metadata.get("choices")
        word = item.metadata.get("word")
        if value is None or (word is not None and value == word):
            continue
        if word is not None and isinstance(value, str):
            raise ValueError(f"{name}={value}: must be a whole number, or {word}")
        values = value if isinstance(value, list | tuple) else [value]
        is_flat = str(item.type).startswith(("list[", "tuple[")) and "list[list" not in item.type
        if is_flat and any(isinstance(one, list | tuple | dict) for one in values):
            raise ValueError(f"{name}={value}: a list without lists in it, as in [1,2]")
        for one in values:
            if between is not None and not isinstance(one, str):
                in_range(name, one, *between)
            if choices and one not in choices:
                raise ValueError(f"{name}={one}: one of {', '.join(choices)}")


def in_range(name: str, value: float, least: float, most: float) -> None:
    """Raise ValueError unless `least` <= `value` <= `most`; NaN is in no range."""
    if not least <= value <= most:
        bounds = f"from {least:,} to {most:,}" if most < float("inf") else f"from {least:,} up"
        raise ValueError(f"{name}={value}: a number {bounds}")
