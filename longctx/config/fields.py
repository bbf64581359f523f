"""How a key is declared, and how plain values become a configuration.

Default, meaning, type, range and choices are in the class of the field. `build` gives every value
its type, whether it comes from a command line, a file or a run; `Group` holds it to its range. No
torch here: the command line answers `--help` and mistakes before torch is imported.
"""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import re
import types
import typing
from collections.abc import Collection, Iterable, Iterator, Mapping
from copy import copy
from math import inf
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from longctx.config import other_names

PLUGINS = "Python files of yours that register backends, sources, …: [my.py]; see docs/extend.md"
MODEL = "runs/NAME (newest checkpoint), one .ckpt, HF folder, or the Hub's OWNER/NAME[@REVISION]"
DEVICE = "auto: a GPU if there is one | cpu | cuda"
PRECISION = "auto: bf16 on a GPU, fp32 on a CPU | bf16 | fp32"
SEEDS = (0, 2**63 - 1)
COUNT = re.compile(r"([0-9]+(?:\.[0-9]+)?)([kmb])", re.IGNORECASE)
TYPES: dict[Any, str] = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
    Path: "a path",
    list[int]: "a list of whole numbers, as in [1,2]",
    list[float]: "a list of numbers, as in [1,2]",
    list[str]: "a list of text, as in [a,b]",
    list[list[int]]: "a list of lists, as in [[1,2]]",
    tuple[float, float]: "2 numbers, as in [0.9,0.95]",
    dict[str, Any]: "keys with values, such as {key: value}",
}


class Key(NamedTuple):
    """A key: its meaning, the values that its declaration allows, and its type.

    between: smallest and largest number allowed, of each item if the field is a list. A number
        without any bound must be above 0.
    above: the number is beyond this bound, which itself is not allowed.
    choices: the names allowed, of each item if the field is a list. A registry may grow later.
    suffix: the ending of a path, such as ".html".
    distinct: the list is not empty, and has no value twice.
    needs: the key of the same group without which this one does nothing, or its value, as in
        "lr_schedule=wsd"; `enabled` if the group has it.
    unit: k stands for so many, m for its square, as in 4k; whole numbers without it take no letter.
    word: may stand for the number, as in seq_len=max.
    literal: the command line's text is the value, whatever characters it has.
    positional: the command line takes it without `key=` too, as in `resume runs/NAME`.
    short: the name of its group is enough, as passkey=true for passkey.enabled=true; its own name
        in a mapping, as attention={full: flash}, if it is a word.
    resume: resume= may change it.
    names: a value that was given is part of a new run's name; None: unless `resume`.
    compared: it may change results, so comparisons show it.
    type, optional: its type without None, and True if None is allowed; `keys` sets them.
    """

    meaning: str = ""
    between: tuple[float, float] | None = None
    above: float | None = None
    choices: Collection[str] = ()
    suffix: str = ""
    distinct: bool = False
    needs: str | None = None
    unit: int | None = None
    word: str | None = None
    literal: bool = False
    positional: bool = False
    short: bool | str = False
    resume: bool = False
    names: bool | None = None
    compared: bool = True
    default: Any = None
    type: Any = Any
    optional: bool = False

    @property
    def is_group(self) -> bool:
        """Return True if the key has keys of its own."""
        return dataclasses.is_dataclass(self.type)

    @property
    def is_open(self) -> bool:
        """Return True if any key may follow, as in attention.options.kernel."""
        return typing.get_origin(self.type) is dict

    @property
    def is_list(self) -> bool:
        """Return True if the value is a list."""
        return typing.get_origin(self.type) in (list, tuple)

    def expected(self) -> str:
        """Describe the values allowed, for a message."""
        if self.choices and not self.is_list:
            return f"one of {', '.join(self.choices)}"
        kind = TYPES.get(self.type, "another value")
        return kind if self.word is None else f"{kind}, or {self.word}"


def key(default: Any, meaning: str = "", **rules: Any) -> Any:
    """Declare a field with its `default`, meaning and rules, those of `Key`. A meaning that is too
    long for the line is in the docstring of the class, as `name: meaning`.
    """
    metadata = {"key": Key(meaning, **rules)}
    # A dataclass refuses mutable defaults: instances would share them
    if isinstance(default, list | dict):
        return dataclasses.field(default_factory=lambda: copy(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def positive(default: Any, meaning: str = "", limit: float = 10**9, **rules: Any) -> Any:
    """Declare a field that counts something: a whole number from 1 to `limit`."""
    return key(default, meaning, between=(1, limit), **rules)


def group(schema: type, **rules: Any) -> Any:
    """Declare a field that holds the keys of another dataclass, as `model` holds `model.layers`.
    The `rules` replace those of each of its keys.
    """
    usual = getattr(schema, "of", schema)
    return dataclasses.field(default_factory=usual, metadata={"key": Key(**rules), "all": rules})


KEYS: dict[Any, dict[str, Key]] = {}  # of each dataclass that was asked, until a name registers


def keys(schema: Any) -> dict[str, Key]:
    """Return every key of `schema` by its dotted name, the groups themselves too."""
    if schema in KEYS:
        return KEYS[schema]
    hints, result = typing.get_type_hints(schema), dict[str, Key]()
    docs = "\n".join(inspect.cleandoc(base.__doc__ or "") for base in schema.__mro__[::-1])
    meanings = dict(re.findall(r"^(\w+): (.*(?:\n    .*)*)", docs, re.MULTILINE))
    for item in dataclasses.fields(schema):
        hint, rules = hints[item.name], item.metadata.get("key", Key())
        types_allowed = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
        declared = [allowed for allowed in types_allowed if allowed is not type(None)]
        # All keys of passkey= and ruler= do nothing while these are off
        if "enabled" in hints and item.name != "enabled":
            rules = rules._replace(needs="enabled")
        result[item.name] = rules._replace(
            meaning=rules.meaning or " ".join(meanings.get(item.name, "").split()),
            names=not rules.resume if rules.names is None else rules.names,
            default=item.default_factory() if callable(item.default_factory) else item.default,
            type=declared[0],
            optional=len(declared) < len(types_allowed) or hint is Any,
        )
        if dataclasses.is_dataclass(hint):
            # If the kinds of a group have keys of their own: those of all kinds
            inner_keys = hint.all_keys() if hasattr(hint, "all_keys") else keys(hint)
            for name, inner in inner_keys.items():
                result[f"{item.name}.{name}"] = inner._replace(**item.metadata.get("all", {}))
    KEYS[schema] = result
    return result


def declared_as(schema: Any, name: str) -> Key:
    """Return the key `name` of `schema`, or else the open one that it belongs to, as
    attention.options to attention.options.kernel; a key without rules if there is none.
    """
    known = keys(schema)
    while name not in known and "." in name:
        name = name.rpartition(".")[0]
    return known.get(name, Key(names=True))


# Plain values become a configuration


class Mistakes(ValueError):
    """Several mistakes, one a line."""


def refuse_all(messages: Iterable[str]) -> None:
    """Raise ValueError with the `messages`, if there are any."""
    messages = list(messages)
    if messages:
        raise Mistakes("\n".join(messages)) if messages[1:] else ValueError(messages[0])


def refuse_first(messages: Iterable[str]) -> None:
    """Raise ValueError with the first of the `messages`, if there are any."""
    for message in messages:
        raise ValueError(message)


def refuse(*mistakes: tuple[object, str]) -> None:
    """Raise ValueError with the message of the first condition that is true."""
    refuse_first(message for is_wrong, message in mistakes if is_wrong)


def build(schema: Any, values: Mapping[str, Any], prefix: str = "") -> Any:
    """Make the dataclass `schema` of nested plain `values`, each with its declared type.

    ValueError has a line for each key that does not exist, or has a value of another type.
    """
    # A group may have kinds with keys of their own
    schema = schema.kind(values) if hasattr(schema, "kind") else schema
    known, filled, messages = keys(schema), dict[str, Any](), list[str]()
    for name, value in values.items():
        try:
            if name not in known or "." in name:  # the keys of a group are nested
                raise ValueError(f"{prefix}{unknown(name, known)}")
            if not known[name].is_group:
                filled[name] = typed(f"{prefix}{name}", value, known[name])
            elif isinstance(value, Mapping):
                filled[name] = build(known[name].type, value, f"{prefix}{name}.")
            else:
                inner = f"{prefix}{name}.{next(iter(keys(known[name].type)))}"
                problem = f"has keys of its own, such as {inner}"
                raise ValueError(f"{prefix}{name}={shown(value)[:60]}: {problem}")
        except ValueError as error:
            messages += str(error).splitlines()
    refuse_all(messages)
    return schema(**filled)


def typed(name: str, value: Any, declared: Key) -> Any:
    """Return `value` with the type of the key `name`; ValueError tells what to give instead."""
    if declared.optional if value is None else value == declared.word:
        return value
    try:
        result = _converted(value, declared.type, declared)
    except (TypeError, ValueError, OverflowError):
        verb = "not allowed; give" if value is None else "must be"
        raise ValueError(f"{name}={shown(value)}: {verb} {declared.expected()}") from None
    # Nothing is ever filled in from the environment, so a user who expects it must hear of it
    if "${" in str(result) and not declared.literal:
        raise ValueError(f"{name}={shown(value)}: ${{...}} is not filled in; give the value itself")
    # true and false may have any capitals, also if the key has other choices besides
    return result.lower() if "true" in declared.choices else result


def _converted(value: Any, target: Any, declared: Key) -> Any:
    """Return `value` as the type `target`; raise TypeError or ValueError if it is no such value."""
    origin, items = typing.get_origin(target), typing.get_args(target)
    if target is Any:
        return value
    # YAML reads {a:1}, without a space, as a key "a:1" that has no value
    if origin is dict and isinstance(value, Mapping) and ":" not in "".join(map(str, value)):
        return value
    if target == list[str] and isinstance(value, str):
        return [_converted(value, str, declared)]
    is_list = origin in (list, tuple) and isinstance(value, list | tuple)
    if is_list and (origin is list or ... in items or len(value) == len(items)):
        return origin(_converted(item, items[0], declared) for item in value)
    if target is bool and str(value).lower() in ("true", "false"):
        return str(value).lower() == "true"
    if target in (str, Path) and isinstance(value, str | int | float):
        # pathlib drops the ./ of ./~x and then takes it for a home
        is_here = shown(value).startswith("./~") and not declared.literal
        text = str(Path.cwd() / shown(value)) if is_here else shown(value)
        # A shell leaves the ~ of key=~/x as it is
        return text if target is str else Path(text).expanduser()
    if target is int and (unit := declared.unit) and (match := COUNT.fullmatch(str(value))):
        value = float(match[1]) * unit ** ("kmb".index(match[2].lower()) + 1)
    # YAML takes 1e9, which has no point, for text; Python counts True as 1, and rounds 4.5 to 4
    if target in (int, float) and type(value) in (str, int, float):
        number = float(value) if isinstance(value, str) and "e" in value.lower() else value
        if target is float or not isinstance(number, float) or number.is_integer():
            return target(number)
    raise TypeError


def shown(value: Any) -> str:
    """Return a value as the command line takes it."""
    if isinstance(value, list | tuple):
        return f"[{','.join(map(shown, value))}]"
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


# Checks


class Group:
    """A dataclass of keys that are checked alone, by their declarations, and then together."""

    prefix: ClassVar[str] = ""  # of its keys on the command line, such as "model."

    def validate(self) -> None:
        """Raise ValueError with a line for each key outside its declared range or choices, else for
        the first keys that contradict each other. None is always in range.
        """
        refuse_all(_outside(self, self.prefix))
        refuse_first(_contradictions(self))

    def problems(self) -> Iterator[str]:
        """Yield a message for keys that contradict each other; the first one is raised."""
        return iter(())


def _contradictions(config: Any) -> Iterator[str]:
    # Inner groups first: the outer ones may rely on them
    for value in filter(dataclasses.is_dataclass, vars(config).values()):
        yield from _contradictions(value)
    if isinstance(config, Group):
        yield from config.problems()


def _outside(config: Any, prefix: str) -> Iterator[str]:
    """Yield a message for each key of `config` that is wrong by itself."""
    known = keys(type(config))
    for item in dataclasses.fields(config):
        value, declared, name = getattr(config, item.name), known[item.name], prefix + item.name
        if declared.is_group:
            yield from _outside(value, f"{name}.")
            continue
        items = value if isinstance(value, list | tuple) else [value]
        wrong = ((item, allowed(item, declared)) for item in items if item is not None)
        if found := next(((item, rule) for item, rule in wrong if rule), None):
            yield f"{prefix[:-1] if declared.short else name}={found[0]}: {found[1]}"
        elif declared.distinct and (value == [] or len(set(map(str, items))) < len(items)):
            yield f"{name}={value}: an empty list, or a value twice; give each once"
        # config.yaml of a run holds every key of the model, most with their default
        elif declared.needs is not None and value != declared.default:
            switch, _, wanted = declared.needs.partition("=")
            now = getattr(config, switch)
            if shown(now) != wanted if wanted else now in (None, False, 0, [], "", "none"):
                remedy = wanted or ("true" if now is False else "another")
                message = f"{prefix}{switch}={shown(now)}; give {prefix}{switch}={remedy}"
                yield f"{name}={shown(value)}: does nothing with {message}"


def allowed(value: Any, declared: Key) -> str:
    """Return the values allowed if `value` is not, such as NaN for any number, else nothing."""
    # The config.json of a model comes here without `build`, which knows the item's type
    if declared.is_list and isinstance(value, list | tuple | dict):
        return "" if list[int] in typing.get_args(declared.type) else "not a list in a list"
    if (names := declared.choices) and value not in names:
        others = "" if isinstance(names, tuple) else "; others need plugins=[FILE.py]"
        return f"one of {', '.join(names)}{closest(str(value), names) or others}"
    if not str(value).endswith(declared.suffix):
        return f"a file that ends in {declared.suffix}"
    if not isinstance(value, int | float) or isinstance(value, bool):
        return ""
    minimum, maximum = declared.between or (-inf, inf)
    above = 0 if declared.between is None and declared.above is None else declared.above
    if minimum <= value <= maximum and (above is None or above < value < inf):
        return ""
    lowest = f"from {minimum:,}" if above is None else f"above {above:,}"
    open_end = "up" if above is None else ""
    return f"a number {lowest} {open_end if maximum == inf else f'to {maximum:,}'}".rstrip()


def foreign_keys(values: Mapping[str, Any], own: Collection[str], setting: str) -> Iterator[str]:
    """Yield a message for each of `values` that is set though a `setting`, such as optimizer=adamw,
    has no key of its name among its `own`.
    """
    for name, value in values.items():
        if value is not None and name.rpartition(".")[2] not in own:
            has = ", ".join(own) or "none"
            yield f"{name}={shown(value)}: not a key of {setting}; it has: {has}"


def unknown(name: str, known: Collection[str]) -> str:
    """Return a message that `name` is no key, with ours of the same meaning or the closest one."""
    close = closest(name, known)
    ours = other_names.answer(name, known)
    return ours or f"{name} is not a key{f'{close} All' if close else '; all'} keys: --help"


def closest(name: str, names: Iterable[str]) -> str:
    """Return a question for the closest of `names`; empty if none is close."""
    names = list(names)
    if advice := other_names.ADVICE.get(name):
        return f"; {advice}"
    if other_names.VALUES.get(name) in names:
        return f"; here it is {other_names.VALUES[name]}"
    close = [full for full in names if full.endswith(f".{name}")]
    close = close or difflib.get_close_matches(name.lower(), names, n=1, cutoff=0.6)
    return f"; did you mean {close[0]}?" if close else ""
