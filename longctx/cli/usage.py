"""`--help`: every key with its default, meaning, range and choices, from the dataclasses alone."""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Iterator
from typing import Any

from longctx.cli.overrides import groups
from longctx.config import presets

WIDTH = 80
COLUMN = 28  # at which the meanings begin
EVERYTHING = 10**6  # a range that ends above this is shown as open


def choices_lines(command: str) -> list[str]:
    """The presets of each group of `command`."""
    lines = []
    for group in groups(command):
        names = textwrap.wrap(" | ".join(sorted(presets.names(group))), WIDTH - 14)
        lines.append(f"  {group + '=':<12}{names[0]}")
        lines += [" " * 14 + line for line in names[1:]]
    return lines


def key_lines(schema: Any, prefix: str = "") -> Iterator[str]:
    """The keys of `schema`; after them each group of keys under a heading of its own."""
    nested = []
    for item in dataclasses.fields(schema):
        default = item.default_factory() if callable(item.default_factory) else item.default
        if dataclasses.is_dataclass(default):
            nested.append((item.name, type(default)))
        elif item.metadata.get("positional"):
            yield from _columns(item.name.upper(), item.metadata["help"])
        else:
            yield from _columns(f"{prefix}{item.name}={as_override(default)}", _meaning(item))
    for name, inner in nested:
        yield ""
        yield from textwrap.wrap(f"{prefix}{name}: {_summary(inner)}", WIDTH)
        yield from key_lines(inner, f"{prefix}{name}.")


def as_override(value: Any) -> str:
    """A value as the command line writes it."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, (list, tuple)):
        return "[" + ",".join(as_override(item) for item in value) + "]"
    return str(value)


def _columns(head: str, body: str) -> Iterator[str]:
    lines = textwrap.wrap(body, WIDTH - COLUMN, break_on_hyphens=False)
    if len(head) + 4 > COLUMN:
        yield f"  {head}"
    else:
        yield f"  {head:<{COLUMN - 2}}{lines.pop(0) if lines else ''}".rstrip()
    yield from (" " * COLUMN + line for line in lines)


def _meaning(item: Any) -> str:
    """The help text of a field, with its choices and range where the text does not say them."""
    meaning = item.metadata.get("help", "")
    choices, between = item.metadata.get("choices"), item.metadata.get("between")
    if choices and not all(choice in meaning for choice in choices):
        meaning += f" ({' | '.join(choices)})"
    if between is not None:
        least, most = between
        meaning += f" ({least:g} to {most:,g})" if most < EVERYTHING else f" (≥ {least:,g})"
    return meaning


def _summary(schema: type) -> str:
    return (schema.__doc__ or "").strip().split("\n\n")[0].replace("\n", " ").rstrip(".")
