"""A file of one's own: `python train.py my.yaml key=value`. It holds keys as `--help` lists them,
nested or dotted; the config.yaml of a run is such a file.

Its keys become arguments before those of the command line, so that they are checked as these are.
"""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

from longctx import hub_snapshot, untrusted
from longctx.cli.overrides import groups, in_full, is_literal, key_and_value, quoted
from longctx.config import presets
from longctx.config.train_config import TrainConfig
from longctx.runs import run_folder

NAMED_BY = {  # group → its key that names the preset which the others differ from
    "attention": "backend",
    "data": "source",
    "memory": "policy",
    "optimizer": "name",
    "rope": "type",
    "strategy": "name",
}
OTHERWISE = re.compile(r"|null|true|false|nan|inf|[+-]?[\d_.]*\d(e[+-]?\d+)?", re.IGNORECASE)
OF_RUN = ("name", "resume")  # of the run whose config.yaml it is, not of another


def with_file(argv: list[str]) -> list[str]:
    """`argv` with the keys of the file that it names in place of that, without those that it gives
    itself; ValueError for a file that cannot be read.
    """
    files = [word for word in argv if "=" not in word and word.endswith((".yaml", ".yml"))]
    if not files:
        return argv
    if len(files) > 1:
        raise ValueError(f"{files[1]}: {files[0]} is given too; give one file")
    words = [word for word in argv if word not in files]
    named = {_named(*key_and_value(word)) for word in words}
    if named & {"max_tokens", "max_steps"}:  # each ends the run
        named |= {"max_tokens", "max_steps"}
    keys = arguments(Path(files[0]))
    return [f"{key}={value}" for key, value in keys.items() if not _is_named(key, named)] + words


def arguments(path: Path) -> dict[str, str]:
    """Key → value of the file at `path`, as the command line writes them."""
    try:
        values = untrusted.load_yaml(path)
    except FileNotFoundError:
        raise FileNotFoundError(f"{path}: no such file; give one with key: value lines") from None
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise ValueError(f"{path}: no configuration; it should hold key: value lines")
    if path.name == "config.yaml":
        values = {key: value for key, value in values.items() if key not in OF_RUN}
        if values.get("init") is not None:  # its model is that of the weights
            values.pop("model", None)
            data = values.get("data")
            if isinstance(data, dict) and hub_snapshot.is_snapshot(
                data.get("tokenizer"), values["init"]
            ):  # in the cache of the machine that it was trained on
                values["data"] = data | {"tokenizer": None}
    return {
        key: str(value) if value is not None and is_literal(TrainConfig, key) else written(value)
        for key, value in _keys(values).items()
    }


def _keys(values: dict[str, Any]) -> dict[str, Any]:
    """Dotted key → value, without those that have their default anyway, which another preset may
    not take; of a model all stand, since presets of models differ in every key.
    """
    choices, result = groups("train"), dict[str, Any]()
    for key, value in values.items():
        if not isinstance(value, dict):
            result[key] = value
            continue
        if key in NAMED_BY and NAMED_BY[key] in value:
            result[key] = value[NAMED_BY[key]]
            value = {name: x for name, x in value.items() if name != NAMED_BY[key]}
        default = run_folder.flat({key: _default(key)}) | _preset(key, result.get(key))
        for name, inner in run_folder.flat({key: value}).items():
            is_default = name in default and default[name] == inner
            if not is_default or (key == "model" and key in choices and inner not in ({}, [])):
                result[name] = inner
    return result


def _preset(key: str, name: Any) -> dict[str, Any]:
    """What the preset `name` of a group sets, by dotted key."""
    if key not in groups("train") or name not in presets.names(key):
        return {}
    return run_folder.flat({key: presets.read(key, name)})


def _default(key: str) -> Any:
    """The default of a key of train, as plain values."""
    fields = {item.name: item for item in dataclasses.fields(TrainConfig)}
    if key not in fields:
        return None
    item = fields[key]
    default = item.default_factory() if callable(item.default_factory) else item.default
    return dataclasses.asdict(default) if dataclasses.is_dataclass(default) else default  # type: ignore[arg-type]


def written(value: Any) -> str:
    """A value as Hydra reads it on the command line."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, list):
        return "[" + ",".join(map(written, value)) + "]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{written(x)}" for key, x in value.items()) + "}"
    if isinstance(value, str) and not _is_plain(value):
        return quoted(value)
    return str(value)


def _is_plain(text: str) -> bool:
    """Whether `text` needs no quotes, without which a number or null would be another value."""
    return (
        not OTHERWISE.fullmatch(text)
        and all(one.isalnum() or one in "_-./@" for one in text)
        and text.isascii()
    )


def _named(key: str, value: str) -> str:
    """What `key` stands for on the command line: a group whose other keys follow its preset, and
    mean nothing where the group is switched off, or else one key.
    """
    is_group = key in groups("train") or value.lower() == "false"
    return key if is_group else in_full(key, TrainConfig)


def _is_named(key: str, named: set[str]) -> bool:
    """Whether the command line has `key`, or a choice of the group that it belongs to."""
    return bool({key, in_full(key, TrainConfig), key.split(".")[0]} & named)
