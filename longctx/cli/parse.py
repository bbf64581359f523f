"""Arguments of a command line → a checked dataclass: the only parser of the project.

An argument is key=value, or the name of one file of keys. The command line wins over its file.
Text is taken as it is typed; lists and dictionaries are YAML. A sweep becomes a list of arguments
per job.
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

from longctx import hub_snapshot, plugins, untrusted
from longctx.config import fields, other_names, presets
from longctx.config.doors import SCHEDULES
from longctx.config.eval_config import EvalConfig
from longctx.config.fields import Key, build, declared_as, keys, shown, typed
from longctx.config.presets import Request
from longctx.config.train_config import TrainConfig
from longctx.data.sources.registry import check as check_data
from longctx.runs import run_folder

SCHEMAS: dict[str, type] = {"train": TrainConfig, "eval": EvalConfig}
LENGTHS = {"max_tokens", "max_steps"}  # a file has none of them if the command line has one
TOKEN = re.compile(r"""("(?:\\.|[^"\\])*"|'[^']*'|.)""", re.DOTALL)
# Values that are neither text nor a number
CONSTANTS = {"": None, "null": None, "true": True, "false": False}


# Configurations


def compose(command: str | type, arguments: Iterable[str]) -> Request[Any]:
    """Return the checked configuration of train, eval, or of another dataclass of keys:
    defaults, then presets, then `arguments`. Of a resumed run it is its own, changed by them.

    With model=auto, `config.model` has the values of tiny; `presets.with_model` replaces them.
    ValueError, one line, names the key that is wrong.
    """
    schema = SCHEMAS[command] if isinstance(command, str) else command
    given = given_values(schema, arguments)
    if schema is TrainConfig and given.get("resume") is not None:
        folder = run_folder.find(given["resume"])
        saved = run_folder.read_config(folder)
        run_folder.check_resumable(folder, saved | {"resume": given["resume"]}, given)
        return from_file(folder / "config.yaml", given | {"resume": str(folder)})
    missing = [name for name in positional(schema) if not given.get(name)]
    fields.refuse_first(f"{x.upper()} is missing: {keys(schema)[x].meaning}" for x in missing)
    if issubclass(schema, EvalConfig) and "data.path" in given:
        given.setdefault("data.source", "text")
    if "/" in (data := str(given.get("data.source"))):
        raise ValueError(f"data={data}: not a source; give data=text data.path={data}")
    choices = presets.chosen(schema, given)
    # A model is no key with choices of its own
    if (model := choices.get("model", "auto")) not in (names := presets.names("model")):
        advice = fields.closest(str(model), names) or "; weights bring theirs: give init=OWNER/NAME"
        raise ValueError(f"model={shown(model)}: not one of {', '.join(names)}{advice}")
    values: dict[str, Any] = {group: presets.read(group, name) for group, name in choices.items()}
    assign(values, {name: value for name, value in given.items() if name not in choices})
    request = filled(schema, values, given)
    if "data" in choices:
        check_data(request.config.data_as_read if schema is TrainConfig else request.config.data)
    return request._replace(choices=choices)


def filled(schema: type, values: Mapping[str, Any], given: Mapping[str, Any]) -> Request[Any]:
    """Return the checked configuration of the nested `values`, of which some keys are `given`."""
    config = build(schema, values)
    config.validate()
    overrides = {presets.GROUP_OF.get(name, name): shown(value) for name, value in given.items()}
    return Request(config, {}, overrides)


def from_file(path: Path, given: Mapping[str, Any]) -> Request[TrainConfig]:
    """Return the configuration that a run saved at `path`, with the `given` keys."""
    values = run_folder.read_keys(path)
    mistakes = plugins.check_named(values.pop("plugins", None), given.get("plugins"), path)
    with untrusted.named(path, mistakes):
        filled(TrainConfig, values, {})
    known = keys(TrainConfig)
    values |= {name: {} if known[name].is_group else None for name in replaced(given, values)}
    assign(values, given)
    return filled(TrainConfig, values, given)


# Arguments


def is_path(schema: type, argument: str) -> bool:
    """Return True for a path that `schema` takes without a key; it may hold a "=", as runs/lr=1."""
    name, equals, _ = argument.partition("=")
    is_key = equals and (name in keys(schema) or not ("/" in name or os.path.lexists(argument)))
    return bool(positional(schema)) and not is_key and not argument.startswith("-")


def not_a_key(schema: type, argument: str) -> str:
    """Return a message for an `argument` that is not of the form key=value."""
    name, _, text = argument.partition("=")
    if not argument.startswith("-"):
        ways = " or ".join(f"{key}={argument}" for key in ("resume", "init", "data=text data.path"))
        remedy = f"give {ways}" if schema is TrainConfig else "see --help"
        return f"{argument}: not of the form key=value; {remedy}"
    if argument in ("-m", "--multirun"):
        return f"{argument}: only train sweeps; call this command once for each"
    option = name.strip("-").replace("-", "_")
    ours = other_names.key_of(option, keys(schema)) or option
    return f"{argument}: not an option; keys are given as key=value, write {ours}={text or 'VALUE'}"


def positional(schema: type) -> list[str]:
    """Return the keys of `schema` that a path without a key is given to, in order."""
    return [name for name, declared in keys(schema).items() if declared.positional]


def split_own(schema: type, arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Separate the arguments of `schema` from those of train."""
    own = [x for x in arguments if x.partition("=")[0] in keys(schema) or is_path(schema, x)]
    return own, [x for x in arguments if x not in own]


def jobs(arguments: Iterable[str]) -> list[list[str]]:
    """Return the arguments of each job of a sweep: all combinations of values, last key fastest.

    ValueError names a list in which a value is missing.
    """
    # Texts as typed, since each job parses them again
    choices = []
    for argument in arguments:
        name, equals, text = argument.partition("=")
        values = alternatives(declared_as(TrainConfig, name), text)
        problem = f"{argument}: a value between commas is missing"
        fields.refuse((values[1:] and "" in values, problem))
        choices.append([f"{name}{equals}{value}" for value in values])
    return [list(job) for job in itertools.product(*choices)]


def given_values(schema: type, arguments: Iterable[str]) -> dict[str, Any]:
    """Return key → value that `arguments` and their file give, and load plugins.

    A list may be written a,b or [a,b]; of train only [a,b]: there a,b is a sweep. ValueError names
    an argument of another form than key=value, a path or a file, or a key unknown or given twice.
    """
    arguments = list(arguments)
    of_plugins = [argument for argument in arguments if argument.startswith("plugins=")]
    # Some of the other keys may be a plugin's
    if of_plugins and of_plugins != arguments:
        given_values(schema, of_plugins)
    files, paths, texts = sorted_out(schema, arguments)
    known, given = keys(schema), dict[str, Any]()
    full_names = full_keys(schema, [name for name, _ in texts])
    for name, text in texts:
        full = full_names[name]
        declared = declared_as(schema, full)
        value, several = value_of(text, declared), alternatives(declared, text)
        if schema is not TrainConfig and declared.is_list:
            # Brackets may be left out
            value = value if value is None or text[0] == "[" else value_of(f"[{text}]", declared)
        elif len(several) > 1:
            advice = "give one, or all to train -m" if schema is TrainConfig else "give one"
            raise ValueError(f"{name}={text}: several values; {advice}, or write a list as [a,b]")
        # A short name means one key; the same key twice is a mistake
        if (first := given.setdefault(full, value)) is not value and first != value:  # nan
            raise ValueError(f"{name}={text}: {full}={shown(first)} is given too; leave one out")
    for name in positional(schema):
        if paths and name not in given:
            given[name], paths = (paths, []) if known[name].is_list else (paths[0], paths[1:])
    if paths:
        needed = " ".join(positional(schema)).upper()
        raise ValueError(f"{paths[0]}: one too many; give {needed}, and nothing else without =")
    if given.get("plugins") is not None:
        given["plugins"] = plugins.load(typed("plugins", given["plugins"], known["plugins"]))
    fields.refuse_first(f"{x}: {files[0]} is given too; give one file" for x in files[1:])
    for file in files:
        given = values_of_file(schema, Path(file), given) | given
    return given


def sorted_out(
    schema: type, arguments: Iterable[str]
) -> tuple[list[str], list[str], list[tuple[str, str]]]:
    """Return the files, the paths without a key, and each key with its text."""
    known = keys(schema)
    files, paths, texts = list[str](), list[str](), list[tuple[str, str]]()
    for argument in arguments:
        name, equals, text = argument.partition("=")
        is_file = not equals and argument.endswith((".yaml", ".yml"))
        # A path needs no key in commands that name no other file
        if is_file and (issubclass(schema, EvalConfig) or not positional(schema)):
            files.append(argument)
        elif is_path(schema, argument):
            paths.append(argument)
        elif argument.startswith("-") or not equals or not name:
            raise ValueError(not_a_key(schema, argument))
        else:
            inner = value_of(text, Key()) if name in known and known[name].is_group else text
            inner = inner if isinstance(inner, dict) else {}
            texts += [(f"{name}.{x}", shown(y)) for x, y in inner.items()] or [(name, text)]
    return files, paths, texts


def full_keys(schema: type, names: Iterable[str]) -> dict[str, str]:
    """Return name → its dotted key, as attention.backend; ValueError has a line for each other."""
    known = keys(schema)
    short = {key.rpartition(".")[0]: key for key, declared in known.items() if declared.short}
    words = {f"{group}.{known[key].short}": key for group, key in short.items()}
    short |= {word: key for word, key in words.items() if known[key].short is not True}
    full_names = {name: short.get(name, name) for name in names}
    fields.refuse_all(
        fields.unknown(name, known)
        for name, full in full_names.items()
        if full not in known and not declared_as(schema, full).is_open
    )
    return full_names


def alternatives(declared: Key, text: str) -> list[str]:
    """Split a value at its commas, other than those in quotes or brackets."""
    if declared.literal:
        return [text]
    parts, depth = [""], 0
    for token in TOKEN.findall(text):
        depth += (token in "[({") - (token in "])}")
        if token == "," and depth <= 0:
            parts.append("")
        else:
            parts[-1] += token
    return parts


def value_of(text: str, declared: Key) -> Any:
    """Return the value typed as `text`: null, true, false, a number, list, dictionary, or text."""
    is_quoted = len(text) > 1 and text[0] == text[-1] and text[0] in "'\""
    takes_text = declared.type in (str, Path) and not is_quoted
    if takes_text or declared.is_group or declared.literal:
        return None if text.lower() == "null" else text
    if text.lower() in CONSTANTS:
        return CONSTANTS[text.lower()]
    for number in (int, float):
        with suppress(ValueError):
            return number(text)
    if is_quoted or text[0] in "[{":
        # Declared items get their type later: BaseLoader makes text of all, such as of no and 1e-3
        loader: Any = untrusted.Loader if declared.is_open else yaml.BaseLoader
        with suppress(yaml.YAMLError, *untrusted.WRONG_VALUE):
            return yaml.load(text, loader)
    return text


def assign(values: dict[str, Any], given: Mapping[str, Any]) -> None:
    """Set the keys of the nested `values` to what is `given`, dotted key → value."""
    for name, value in given.items():
        *groups, last = name.split(".")
        inner = values
        for group in groups:
            if not isinstance(inner.setdefault(group, {}), dict):
                raise ValueError(f"{name}={shown(value)}: {group}={inner[group]} has no keys")
            inner = inner[group]
        is_merged = isinstance(value, dict) and isinstance(inner.get(last), dict)
        inner[last] = inner[last] | value if is_merged else value


# A file of keys: python train.py my.yaml key=value


def values_of_file(schema: type, path: Path, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return key → value of the file at `path`: nested or dotted keys, or config.yaml of a run.

    The keys `given` on the command line are left out, and all keys of a group that it chooses.
    ValueError for a key that the file has in two spellings, as memory and memory.policy.
    """
    values = run_folder.read_keys(path)
    mistakes = plugins.check_named(values.pop("plugins", None), given.get("plugins"), path)
    with untrusted.named(path, mistakes):
        values = differing(schema, as_new_run(values) if path.name == "config.yaml" else values)
        full_names = full_keys(schema, values)
    result, spelled = dict[str, Any](), dict[str, str]()
    for name, full in full_names.items():
        if spelled.setdefault(full, name) != name:
            raise ValueError(f"{path}: {name}: {spelled[full]} is given too; leave one out")
        result[full] = values[name]
    # A group, or a key with keys of its own as data.mix={...}, replaces all that is below it
    without = replaced(given, result) | (given.keys() - presets.GROUPS.keys())
    prefixes = tuple(f"{name}." for name in without)
    return {x: result[x] for x in result if x not in without and not x.startswith(prefixes)}


def differing(schema: type, saved: dict[str, Any]) -> dict[str, Any]:
    """Return key → value for the `saved` keys that differ from their presets and the defaults."""
    values, chosen, names = run_folder.flat(saved), dict[str, Any](), dict[str, Any]()
    # The command line may choose another preset, which refuses the other keys. A model has all its
    # keys, since config.yaml does not record its preset.
    nested = {group for group in saved if isinstance(saved[group], dict)} - {"model"}
    for group, key in presets.GROUPS.items():
        if group in nested and values.get(key) in presets.names(group):
            chosen[group] = presets.read(group, values[key])
            names[key] = keys(schema)[key].default
    usual = run_folder.flat(run_folder.plain(build(schema, chosen))) | names
    # Dotted keys and names of groups are what somebody wrote, also if they are the defaults
    usual = {x: usual[x] for x in usual if "." not in x or x.partition(".")[0] in nested}
    return {name: value for name, value in values.items() if usual.get(name, ...) != value}


def replaced(given: Mapping[str, Any], saved: Mapping[str, Any]) -> set[str]:
    """Return the keys and groups of a file, with `saved`, that the `given` keys replace."""
    # Another preset replaces all values of the file's, and passkey=false those of its group
    saved = run_folder.flat(dict(saved))
    before, after = (presets.chosen(TrainConfig, x) for x in (saved, {**saved, **given}))
    names = {group for group in after if after[group] != before[group]}
    names |= {name[:-8] for name in given if name.endswith(".enabled") and given[name] is False}
    # Another schedule has no use for the keys of the one before
    if (schedule := str(given.get("lr_schedule"))) in SCHEDULES:
        every = {key for traits in SCHEDULES.values() for key in traits.keys}
        names |= every - SCHEDULES[schedule].keys.keys()
    return names | (LENGTHS if any(given.get(name) is not None for name in LENGTHS) else set())


def as_new_run(saved: dict[str, Any]) -> dict[str, Any]:
    """Return the configuration of a run without its name and other keys of that run alone."""
    values = {name: value for name, value in saved.items() if name not in ("name", "resume")}
    init, data = values.get("init"), values.get("data")
    if init is not None:
        # The weights bring their model, but not how its experts are balanced
        experts = (values.pop("model", None) or {}).get("experts") or {}
        if experts.get("count"):
            values["model"] = {"experts": {"balance": experts.get("balance", 0.0)}}
        # The tokenizer is in the cache of the machine that the run was trained on
        if isinstance(data, dict) and hub_snapshot.is_snapshot(data.get("tokenizer"), init):
            values["data"] = data | {"tokenizer": None}
    return values
