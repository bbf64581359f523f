"""Words of a command line → a checked dataclass: the only parser of the project.

A word is key=value. A file of keys becomes words before those of the command line, a sweep becomes
lists of words, one for each job. A value is read as YAML, except that text is taken as it is typed.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import re
import typing
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import yaml

from longctx import hub_snapshot, untrusted
from longctx.config import presets
from longctx.config.command_config import DescribeConfig
from longctx.config.eval_config import EvalConfig
from longctx.config.fields import Key, build, check, closest, keys, unknown
from longctx.config.presets import Request
from longctx.config.train_config import TrainConfig
from longctx.data.sources import check_overrides
from longctx.runs import run_folder

Options = TypeVar("Options")
SCHEMAS: dict[str, type] = {"train": TrainConfig, "eval": EvalConfig, "data": DescribeConfig}
TOKEN = re.compile(r"""("(?:\\.|[^"\\])*"|'[^']*'|.)""", re.DOTALL)


class Loader(yaml.SafeLoader):
    """YAML in which only null, true, false and numbers are not text, and 1e-3 is a number too."""

    yaml_implicit_resolvers: dict[Any, Any] = {}


NUMBER = r"([0-9]+\.[0-9]*|\.[0-9]+)(e[-+]?[0-9]+)?|[0-9]+e[-+]?[0-9]+|\.?inf|\.?nan"
for tag, pattern in (
    ("null", "null|~|"),
    ("bool", "true|false"),
    ("int", "[-+]?(0|[1-9][0-9_]*)"),
    ("float", f"[-+]?({NUMBER})"),
):
    expression = re.compile(f"({pattern})$", re.IGNORECASE)
    Loader.add_implicit_resolver(f"tag:yaml.org,2002:{tag}", expression, None)


def compose(command: str, words: Iterable[str]) -> Request[Any]:
    """Return the configuration of train, eval or data: defaults, then presets, then `words`.

    With model=auto, `config.model` has the values of tiny; `with_model` replaces them. ValueError,
    one line, names the key that is wrong.
    """
    schema = SCHEMAS[command]
    given = overrides(schema, words)
    choices = {name: given.get(name, usual) for name, usual in presets.groups(schema).items()}
    values = {name: presets.read(name, choice) for name, choice in choices.items()}
    assign(values, schema, {name: text for name, text in given.items() if name not in choices})
    config = build(schema, values)
    config.validate()
    check_needed(config, given)
    check_overrides(config.data, given)
    return Request(config, choices, given)


def from_file(path: Path, words: Iterable[str]) -> Request[TrainConfig]:
    """Return the configuration of a run, saved at `path`, changed by `words`."""
    given = {
        short_key(TrainConfig, name): text for name, text in overrides(TrainConfig, words).items()
    }
    values = untrusted.load_yaml(path)
    values = {} if values is None else values
    if not isinstance(values, dict):
        raise ValueError(f"{path}: not the configuration of a run; it should hold key: value lines")
    if given.get("max_tokens", "null") != "null":
        values["max_steps"] = None
    if "memory.policy" in given:  # all values of the run's policy give way to the new one's
        values["memory"] = {}
    try:
        # With the values of the file alone first, so that a mistake in it names the file.
        build(TrainConfig, values)
        assign(values, TrainConfig, given)
        config: TrainConfig = build(TrainConfig, values)
        config.validate()
    except ValueError as error:
        by_word = any(re.match(f"{re.escape(name)}[=: ]", str(error)) for name in given)
        raise (error if by_word else ValueError(f"{path}: {error}")) from None
    check_needed(config, given)
    return Request(config, {}, given)


def with_model(request: Request[TrainConfig], gpu: bool) -> Request[TrainConfig]:
    """Replace model=auto by the preset for a machine with a `gpu` or without one."""
    if request.choices.get("model") != "auto":
        return request
    device, config = "cuda" if gpu else "cpu", request.config
    model = presets.auto_model(config.model, request.overrides, device)
    choices = request.choices | {"model": presets.AUTO_MODEL[device]}
    return request._replace(config=dataclasses.replace(config, model=model), choices=choices)


def jobs(words: Iterable[str]) -> list[list[str]]:
    """Return the words of each job of a sweep: every combination of the values that `words` list,
    the last varying fastest.
    """
    choices = [
        [f"{name}={text}" for text in alternatives(keys(TrainConfig).get(name), text)]
        for name, text in overrides(TrainConfig, words, sweep=True).items()
    ]
    return [list(job) for job in itertools.product(*choices)]


def options(schema: type[Options], argv: Iterable[str]) -> Options:
    """Fill the dataclass `schema` from arguments; ValueError names the one that is wrong.

    Lists may be written a,b as well as [a,b]. Paths are taken as they are. A number without a
    declared range must be above 0.
    """
    known = keys(typing.cast(Any, schema))
    words, paths = split_paths(known, argv)
    for number, word in enumerate(words):
        name, equals, text = word.partition("=")
        is_bare = equals and name in known and known[name].is_list and not text.startswith("[")
        words[number] = f"{name}=[{text}]" if is_bare and text != "null" else word
    values: dict[str, Any] = {}
    assign(values, schema, overrides(schema, words))
    filled: Any = build(schema, values | positional(known, paths))
    check(filled)
    for name, declared in known.items():
        value = getattr(filled, name)
        if declared.is_list and not value:
            raise ValueError(f"{name}=: give at least one")
        for each in value if declared.is_list else [value]:
            is_number = isinstance(each, int | float) and not isinstance(each, bool)
            if is_number and declared.metadata.get("between") is None and not each > 0:
                raise ValueError(f"{name}={each}: must be above 0")
    if hasattr(filled, "validate"):
        filled.validate()
    result: Options = filled
    return result


def split_paths(known: Mapping[str, Key], argv: Iterable[str]) -> tuple[list[str], list[str]]:
    """Separate key=value from the paths that some commands take without a key.

    An argument with "=" is a path if it names no key and either exists or has a "/", as runs/lr=1.
    """
    fields = {name for name, declared in known.items() if declared.metadata.get("positional")}
    words: list[str] = []
    paths: list[str] = []
    for argument in argv:
        name, equals, _ = argument.partition("=")
        if equals and name in fields:
            raise ValueError(f"{argument}: give it without {name}=")
        is_path = name not in known and ("/" in name or os.path.lexists(argument))
        is_word = argument.startswith("-") or (equals and not is_path) or not fields
        (words if is_word else paths).append(argument)
    return words, paths


def positional(known: Mapping[str, Key], paths: list[str]) -> dict[str, Any]:
    """Return key → path, or paths, of the keys that are given without their name."""
    fields = [name for name, declared in known.items() if declared.metadata.get("positional")]
    unread, values = list(paths), dict[str, Any]()
    for name in fields:
        if not unread:
            raise ValueError(f"{name.upper()} is missing: {known[name].metadata['help']}")
        values[name] = unread if known[name].is_list else unread[0]
        unread = [] if known[name].is_list else unread[1:]
    if unread:
        needed = " ".join(fields).upper()
        raise ValueError(f"{unread[0]}: one too many; give {needed}, and nothing else without =")
    return values


def split_own(schema: type, argv: list[str]) -> tuple[list[str], list[str]]:
    """Separate the words of `schema` from those of train."""
    own = [word for word in argv if word.partition("=")[0] in keys(schema)]
    training = [word for word in argv if word not in own]
    overrides(TrainConfig, training)
    return own, training


def overrides(schema: type, words: Iterable[str], sweep: bool = False) -> dict[str, str]:
    """Return key → value as typed, each key in full; ValueError for one that does not exist."""
    known, result = keys(schema), dict[str, str]()
    for word in words:
        name, equals, text = word.partition("=")
        if word.startswith("-"):
            option = word.strip("-").replace("-", "_")
            advice = f"write {option}{'' if equals else '=VALUE'}" if option else "see --help"
            raise ValueError(f"{word}: not an option; keys are given as key=value, {advice}")
        if not equals or not name:
            raise ValueError(f"{word}: not of the form key=value; see --help")
        full = name if presets.names(name) else short_key(schema, name)
        if full not in known and not any(known[above].is_open for above in parents(full, known)):
            raise ValueError(unknown(name, known))
        choices = alternatives(known.get(full), text)
        if len(choices) > 1 and not sweep:
            advice = "add -m for a sweep" if schema is TrainConfig else "give one"
            raise ValueError(f"{word}: several values; {advice}, or write a list as [a,b]")
        if full in known and known[full].is_group:
            _check_group(schema, full, choices)
        if result.setdefault(full, text) != text:
            raise ValueError(f"{word}: {full}={result[full]} is given too; leave one of them out")
    return result


def _check_group(schema: type, name: str, choices: list[str]) -> None:
    """Raise ValueError unless each of `choices` is a preset of the group `name`."""
    names = presets.names(name)
    if not names:
        inner = [key for key in keys(schema) if key.startswith(f"{name}.")]
        more = ", …" if inner[6:] else ""
        raise ValueError(f"{name}: {name} has keys of its own: {', '.join(inner[:6])}{more}")
    for choice in choices:
        if choice not in names:
            known = ", ".join(sorted(names))
            raise ValueError(f"{name}={choice}: not one of {known}{closest(choice, names)}")


def short_key(schema: type, name: str) -> str:
    """Return the key that the name of a group stands for, as passkey.enabled; else the name."""
    inner = (key for key in keys(schema) if key.rpartition(".")[0] == name)
    return next((key for key in inner if keys(schema)[key].metadata.get("short")), name)


def parents(name: str, known: Mapping[str, Key]) -> Iterator[str]:
    """Yield the keys of `known` above a dotted name."""
    parts = name.split(".")
    above = (".".join(parts[:count]) for count in range(1, len(parts)))
    return (key for key in above if key in known)


def alternatives(declared: Key | None, text: str) -> list[str]:
    """Split a value at its commas, other than those in quotes or brackets."""
    if declared is not None and declared.metadata.get("literal"):
        return [text]
    parts, depth = [""], 0
    for token in TOKEN.findall(text):
        depth += (token in "[({") - (token in "])}")
        if token == "," and depth <= 0:
            parts.append("")
        else:
            parts[-1] += token
    return parts


def assign(values: dict[str, Any], schema: type, given: Mapping[str, str]) -> None:
    """Set the keys of the nested `values` to what is `given`, key → value as typed."""
    for name, text in given.items():
        declared = keys(schema).get(name)
        *groups, last = name.split(".")
        inner = values
        for group in groups:
            if not isinstance(inner.setdefault(group, {}), dict):
                raise ValueError(f"{name}={text}: {group}={inner[group]} has no keys")
            inner = inner[group]
        value = value_of(text, declared)
        is_merged = isinstance(value, dict) and isinstance(inner.get(last), dict)
        inner[last] = inner[last] | value if is_merged else value


def value_of(text: str, declared: Key | None) -> Any:
    """Return the value that is typed as `text`: null, YAML, or itself if the key is a text."""
    is_quoted = len(text) > 1 and text[0] == text[-1] and text[0] in "'\""
    is_literal = declared is not None and declared.metadata.get("literal")
    if is_literal or (declared is not None and declared.type is str and not is_quoted):
        return None if text.lower() == "null" else text
    try:
        return yaml.load(text, Loader)
    except (yaml.YAMLError, *untrusted.WRONG_VALUE):
        return text


def check_needed(config: Any, given: Mapping[str, str]) -> None:
    """Raise ValueError for a key that does nothing, because another one is not set."""
    declared = keys(typing.cast(Any, type(config)))
    for name, text in given.items():
        group, _, own = name.rpartition(".")
        needed = declared[name].metadata.get("needs") if name in declared else None
        if f"{group}.enabled" in declared and own != "enabled":
            needed = "enabled"
        if needed is None:
            continue
        values = getattr(config, group) if group else config
        switch, _, wanted = needed.partition("=")
        is_set = getattr(values, switch) == wanted if wanted else getattr(values, switch)
        # The config.yaml of a run holds every key, most with their default.
        if not is_set and getattr(values, own) != getattr(type(values)(), own):
            needed = f"{group}=true" if switch == "enabled" else needed
            raise ValueError(f"{name}={text}: does nothing without {needed}; give it too")


# A file of keys: python train.py my.yaml key=value


def with_file(argv: Iterable[str]) -> list[str]:
    """Return `argv` with the keys of its .yaml file as words; keys of `argv` itself win."""
    words = list(argv)
    files = [word for word in words if "=" not in word and word.endswith((".yaml", ".yml"))]
    if not files:
        return words
    if len(files) > 1:
        raise ValueError(f"{files[1]}: {files[0]} is given too; give one file")
    words.remove(files[0])
    given = {_full(name): text for name, _, text in (word.partition("=") for word in words)}
    # Keys of the file belong to its preset, or to its switch: another choice leaves them out.
    given |= {name.partition(".")[0]: "" for name in given if given[name].lower() == "false"}
    if {"max_tokens", "max_steps"} & given.keys():  # each ends the run
        given |= {"max_tokens": "", "max_steps": ""}
    of_file = words_of_file(Path(files[0]))
    kept = [word for name, word in of_file.items() if not {name, name.split(".")[0]} & given.keys()]
    return kept + words


def words_of_file(path: Path) -> dict[str, str]:
    """Return key → word of the file at `path`: nested or dotted keys, or the config.yaml of a run.

    Keys that have their default are left out, since another preset may refuse them. Those of a
    model stay: its preset is not recorded.
    """
    try:
        values = untrusted.load_yaml(path)
    except FileNotFoundError:
        raise FileNotFoundError(f"{path}: no such file; give one with key: value lines") from None
    if not isinstance(values, dict) or not all(isinstance(name, str) for name in values):
        raise ValueError(f"{path}: no configuration; it should hold key: value lines")
    if path.name == "config.yaml":
        values = _of_new_run(values)
    defaults, result = run_folder.plain(TrainConfig()), dict[str, Any]()
    for group, value in values.items():
        if not isinstance(value, dict):
            result[group] = value
            continue
        usual = dict(defaults[group]) if isinstance(defaults.get(group), dict) else {}
        preset = value.get(next(iter(usual), None))
        if isinstance(preset, str) and preset in presets.names(group):
            result[group] = preset
            usual |= presets.read(group, preset)
        usual = run_folder.flat({group: usual})
        for name, inner in run_folder.flat({group: value}).items():
            if (group == "model" and inner != []) or name not in usual or usual[name] != inner:
                result[name] = inner
    return {_full(name): f"{name}={as_typed(name, value)}" for name, value in result.items()}


def _of_new_run(saved: dict[str, Any]) -> dict[str, Any]:
    """Return a run's configuration without its name and other keys of that run alone."""
    values = {name: value for name, value in saved.items() if name not in ("name", "resume")}
    init, data = values.get("init"), values.get("data")
    if init is not None:
        values.pop("model", None)  # it is that of the weights
        # The tokenizer is in the cache of the machine that the run was trained on.
        if isinstance(data, dict) and hub_snapshot.is_snapshot(data.get("tokenizer"), init):
            values["data"] = data | {"tokenizer": None}
    return values


def as_typed(name: str, value: Any) -> str:
    """Return a value as the command line takes it: JSON, which is YAML, or a plain text."""
    declared = keys(TrainConfig).get(name)
    is_plain = isinstance(value, str) and value_of(value, declared) == value
    if is_plain and alternatives(declared, value) == [value]:
        return str(value)
    return json.dumps(value, ensure_ascii=False, default=str)


def _full(name: str) -> str:
    """Return a key of train in full; the name of a group stands for itself if it has presets."""
    return name if presets.names(name) else short_key(TrainConfig, name)
