"""Names of our keys and values in other projects: a key of theirs is answered with ours."""

from __future__ import annotations

import tomllib
from collections.abc import Collection
from pathlib import Path

TABLES = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
NAMES: dict[str, str] = TABLES["names"]
NOTES: dict[str, str] = TABLES["notes"]
ADVICE = {name: text for names, text in TABLES["not_here"].items() for name in names.split()}
VALUES = {name: ours for ours, names in TABLES["values"].items() for name in names.split()}
OF_OTHERS = [(name, ours) for ours, names in NAMES.items() for name in names.split()]


def key_of(name: str, known: Collection[str]) -> str | None:
    """Return the key among `known` that other projects call `name`, alone or in a group of keys."""
    last = name.rpartition(".")[2]
    found = (ours for theirs, ours in OF_OTHERS if theirs in (name, last) and ours in known)
    is_key = last in known and not any(key.startswith(f"{last}.") for key in known)
    return next(found, last if is_key else None)


def answer(name: str, known: Collection[str]) -> str | None:
    """Return a line about a key of another project, None if it is not known."""
    if advice := ADVICE.get(name.rpartition(".")[2]):
        return f"{name}: {advice}"
    ours = key_of(name, known)
    return None if ours is None else f"{name}: here it is {ours}{NOTES.get(ours, '')}"
