"""Arguments of a command line, sorted and checked against the schema before Hydra sees them.

A misspelt key deserves the closest right one and no traceback. Imports neither Hydra nor torch.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import os
import re
import types
import typing
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from longctx.config import presets
from longctx.config.command_config import DescribeConfig
from longctx.config.eval_config import EvalConfig
from longctx.config.presets import CONFIGS
from longctx.config.train_config import TrainConfig

SCHEMAS: dict[str, type] = {  # command with configs/<command>.yaml → its keys
    "train": TrainConfig,
    "eval": EvalConfig,
    "data": DescribeConfig,
}
SWEEPING = ("train",)  # commands that take -m
QUANTITIES = {int: "whole numbers", float: "numbers", bool: "true or false", str: "text"}
QUANTITY = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}


class Arguments(NamedTuple):
    """A command line, sorted: whether it is a sweep, and its checked key=value overrides."""

    sweep: bool
    overrides: list[str]


class Key(NamedTuple):
    """What the schema says of a key: its type, and the metadata of `longctx.config.fields.key`."""

    hint: Any
    metadata: Mapping[str, Any]

    def is_open(self) -> bool:
        """Tell whether keys of any name may follow this one, as in attention.options.kernel."""
        return typing.get_origin(self.hint) is dict

    def is_list(self) -> bool:
        """Tell whether the value is a list."""
        return typing.get_origin(_without_none(self.hint)) in (list, tuple)

    def expected(self) -> str:
        """Describe the values allowed, in plain words: what a message tells to give."""
        hint = _without_none(self.hint)
        if choices := self.metadata.get("choices"):
            return f"one of {', '.join(choices)}"
        if word := self.metadata.get("word"):
            return f"a whole number, or {word}"
        if self.is_open():
            return "keys with values, such as {key: value}"
        if self.is_list():
            item = typing.get_args(hint)[0]
            if typing.get_origin(item) is list:
                return f"a list of lists of {QUANTITIES[typing.get_args(item)[0]]}, as in [[1,2]]"
            return f"a list of {QUANTITIES[item]}, as in {'[a,b]' if item is str else '[1,2]'}"
        return QUANTITY.get(hint, "another value")


def read(command: str, argv: list[str]) -> Arguments:
    """Sort the arguments of `command`, one of SCHEMAS; ValueError for an argument or a key that
    does not exist.
    """
    flags = [argument for argument in argv if argument in ("-m", "--multirun")]
    if flags and command not in SWEEPING:
        raise ValueError(f"{flags[0]}: only train sweeps; call {command} once for each")
    schema, choices = SCHEMAS[command], {name: presets.names(name) for name in groups(command)}
    words = [argument for argument in argv if argument not in flags]
    overrides = [check_override(word, schema, choices) for word in words]
    given: dict[str, tuple[str, str]] = {}
    for word, override in zip(words, overrides, strict=True):  # short and whole names of one key
        name, _, value = override.lstrip("+").partition("=")
        other, first = given.setdefault(name, (value, word))
        if other != value:
            raise ValueError(f"{word}: {first} is given too; leave one of them out")
    return Arguments(bool(flags), overrides)


def check_override(
    override: str, schema: type, choices: Mapping[str, set[str]] | None = None
) -> str:
    """Check an override against `schema` and the presets of each group in `choices`; returns it as
    Hydra takes it.
    """
    key, equals, value = override.partition("=")
    name, choices = key.lstrip("+"), choices or {}
    if override.startswith("-"):
        advice = f"write {_as_override(override)}" if override.strip("-") else "see --help"
        raise ValueError(f"{override}: not an option; keys are given as key=value, {advice}")
    if name.lstrip("~").split(".")[0].split("/")[0] == "hydra":
        raise ValueError(f"{override}: settings of Hydra cannot be changed here")
    if "${" in value:
        raise ValueError(f"{override}: ${{...}} is not filled in here; give the value itself")
    if name.startswith("~") or not equals or not name:
        raise ValueError(f"{override}: not of the form key=value; see --help")
    known = keys(schema)
    if is_literal(schema, name) and value != "null":
        return f"{name}={quoted(value)}"
    if is_open(schema, name):
        return f"++{name}={value}"
    if name not in known:
        close = _closest(name, known)
        raise ValueError(f"{name} is not a key{f'{close} All' if close else '; all'} keys: --help")
    if name in choices:
        for preset in value.split(","):
            if preset.strip() not in choices[name]:
                names = ", ".join(sorted(choices[name]))
                raise ValueError(
                    f"{name}={preset}: not one of {names}{_closest(preset, choices[name])}"
                )
    elif dataclasses.is_dataclass(known[name].hint):
        full = in_full(f"{name}={value}", schema).partition("=")[0]
        if full != name:
            if known[full].hint is bool and value.lower() not in ("true", "false"):
                raise ValueError(f"{override}: must be true or false")
            return f"{full}={value}"
        inner = [key for key in known if key.startswith(name + ".")]
        more = ", …" if inner[6:] else ""
        raise ValueError(f"{override}: {name} has keys of its own: {', '.join(inner[:6])}{more}")
    return f"{name}={value}"


def is_literal(schema: type, name: str) -> bool:
    """Whether the text of the command line is the key's value, whatever characters it has."""
    known = keys(schema).get(name)
    return known is not None and bool(known.metadata.get("literal"))


def in_full(override: str, schema: type) -> str:
    """`override` with the key that the name of a group stands for, as passkey.enabled=true."""
    name, equals, value = override.partition("=")
    short = (
        key
        for key, known in keys(schema).items()
        if known.metadata.get("short") and key.rpartition(".")[0] == name
    )
    return f"{next(short, name)}{equals}{value}"


def split_positional(schema: type, argv: list[str]) -> tuple[list[str], dict[str, Any]]:
    """Sort `argv` into checked overrides and the values of the positional and literal fields of
    `schema`.

    ValueError where there are too few or too many. An argument with "=" is a path where it names no
    key and either exists or has a "/", as runs/lr=1.
    """
    known = keys(schema)
    fields = [name for name, key in known.items() if key.metadata.get("positional")]
    values: dict[str, Any] = {}
    overrides: list[str] = []
    paths: list[str] = []
    for argument in argv:
        key, equals, text = argument.partition("=")
        if equals and key in known and known[key].metadata.get("literal"):
            values[key] = text
            continue
        is_path = key not in known and ("/" in key or os.path.lexists(argument))
        is_override = argument.startswith("-") or (equals and not is_path)
        (overrides if is_override or not fields else paths).append(argument)
    for argument in overrides:
        if argument.partition("=")[0] in fields:
            raise ValueError(f"{argument}: give it without {argument.partition('=')[0]}=")
    overrides = [check_override(argument, schema) for argument in overrides]
    unread = list(paths)
    for name in fields:
        values[name] = unread if known[name].is_list() else unread[:1]
        if not values[name]:
            raise ValueError(f"{name.upper()} is missing: {known[name].metadata['help']}")
        unread = unread[len(values[name]) :]
        values[name] = values[name] if known[name].is_list() else values[name][0]
    if unread:
        needed = " ".join(name.upper() for name in fields)
        raise ValueError(f"{unread[0]}: one too many; give {needed}, and nothing else without =")
    return overrides, values


@functools.cache
def keys(schema: type) -> dict[str, Key]:
    """Dotted key → what `schema` says of it; of groups both the group and its keys."""
    hints = typing.get_type_hints(schema)
    result: dict[str, Key] = {}
    for item in dataclasses.fields(schema):
        hint = hints[item.name]
        if dataclasses.is_dataclass(hint):
            inner = keys(typing.cast(type, hint))
            result.update({f"{item.name}.{name}": key for name, key in inner.items()})
        result[item.name] = Key(hint, item.metadata)
    return result


def is_open(schema: type, name: str) -> bool:
    """Tell whether `name` may take any key below it, or is one, as attention.options.kernel."""
    known, parts = keys(schema), name.split(".")
    above = (".".join(parts[:count]) for count in range(1, len(parts) + 1))
    return any(one in known and known[one].is_open() for one in above)


def groups(command: str) -> list[str]:
    """The groups that configs/<command>.yaml chooses from."""
    defaults = (CONFIGS / f"{command}.yaml").read_text()
    listed = re.findall(r"^\s*- (?:override )?/?(\w+)(?:@\w+)?: ", defaults, re.MULTILINE)
    return [group for group in listed if (CONFIGS / group).is_dir()]


def key_and_value(override: str) -> tuple[str, str]:
    """An override's key, without Hydra's plus signs, and its value."""
    key, _, value = override.partition("=")
    return key.lstrip("+"), value


def quoted(value: str) -> str:
    """A value in quotes, such that Hydra takes every character as it is."""
    escaped = re.sub(
        r"(\\*)('|$)", lambda match: 2 * match[1] + match[2].replace("'", "\\'"), value
    )
    return f"'{escaped}'"


def unquoted(value: str) -> str:
    """A value without the quotes around it."""
    return value[1:-1] if len(value) > 1 and value[0] == value[-1] and value[0] in "'\"" else value


def _without_none(hint: Any) -> Any:
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        kinds = [one for one in typing.get_args(hint) if one is not type(None)]
        return kinds[0] if len(kinds) == 1 else hint
    return hint


def _as_override(option: str) -> str:
    """--dry-run as dry_run=VALUE: how what looks like an option would be written here."""
    name, _, value = option.strip("-").partition("=")
    return f"{name.replace('-', '_')}={value or 'VALUE'}"


def _closest(name: str, names: Iterable[str]) -> str:
    names = list(names)
    close = [full for full in names if full.endswith("." + name)]
    close = close or difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    return f"; did you mean {close[0]}?" if close else ""
