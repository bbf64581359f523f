"""`longctx convert`: the recipe of another project as ours, by the names in other_names.toml.

A key of theirs is carried over if it means the same here, or the table `converted` has its meaning,
and if ours may have its value. All others are named on stderr, with what other_names.py says.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from longctx import untrusted
from longctx.config import fields, presets
from longctx.config.other_names import ADVICE, NOTES, TABLES, VALUES, answer, key_of
from longctx.config.train_config import TrainConfig
from longctx.runs import run_folder

Values = dict[str, Any]
FILES = (".json", ".jsonl", ".csv", ".tsv", ".parquet", ".txt", ".md")


def _documents(value: Any, theirs: Mapping[str, Any]) -> Values | None:
    """Return the keys of data for one data set; several are a mix, with weights of yours."""
    match value:
        case [{"path": path, **given}]:
            path, files = str(path), given.pop("data_files", None)
        case _:
            return None
    is_file = files is not None or Path(path).exists() or path.endswith(FILES)
    ours: Values = {"data": "text" if is_file else "hub", "data.path": files or path}
    if given.pop("type", "completion") != "completion" and "rl" not in theirs:
        ours["data.chat"] = True
    renamed = {"field": "data.text_column"}
    if not is_file:
        renamed |= {name: f"data.{name}" for name in ("split", "name", "revision")}
    # Such as the names of its fields
    for name in given.keys() - renamed.keys() - {"ds_type", "split"}:
        print(f"datasets.{name}: not carried over; see docs/data.md", file=sys.stderr)
    return ours | {renamed[name]: x for name, x in given.items() if name in renamed}


def convert(file: Path) -> None:
    """Print our keys for those of `file`, as YAML; name the keys on stderr that have none."""
    theirs = run_folder.read_keys(file)
    ours: Values = {}
    for name, value in theirs.items():
        try:
            ours |= {} if value in (None, [], {}) else _converted(name, value, theirs)
        except ValueError as error:
            print(error, file=sys.stderr)
    print(f"# From {file.name}. Try it: python train.py THIS_FILE dry_run=true")
    yaml.safe_dump(ours, sys.stdout, sort_keys=False, allow_unicode=True)


def _converted(name: str, value: Any, theirs: Mapping[str, Any]) -> Values:
    """Return our keys for one of theirs; ValueError says why there is none."""
    known = fields.keys(TrainConfig)
    ours = name if name in known else key_of(name, known)
    converted: Values | None = None
    if name == "datasets":
        converted = _documents(value, theirs)
    elif name == "lora_alpha" and theirs.get("lora_r"):
        alpha, rank = (fields.typed(x, theirs[x], fields.Key(type=float)) for x in (name, "lora_r"))
        converted = {"lora.scaling": alpha / rank}
    elif name == "lora_target_modules":
        names = fields.typed(name, value, fields.Key(type=list[str]))
        converted = {"lora.targets": list(dict.fromkeys(VALUES.get(x, x) for x in names))}
    elif name in TABLES["converted"]:
        converted = TABLES["converted"][name].get(fields.shown(value))
    elif ours is not None and name not in ADVICE:
        value = VALUES.get(value, value) if isinstance(value, str) else value
        if known[ours].is_group:
            converted = {ours: value} if value in presets.names(ours) else None
        # With a note our key means something else, but for these names
        elif ours not in NOTES or name in {ours, *TABLES["same"]["names"].split()}:
            with untrusted.named(name):
                value = fields.typed(ours, value, known[ours])
                rule = fields.allowed(value, known[ours])
                fields.refuse((rule, f"{ours}={value}: {rule}"))
            converted = {ours: value}
    if converted is None:
        reason = answer(name, known) or f"{name}: nothing here has this name"
        raise ValueError(reason.replace(name, f"{name}={fields.shown(value)[:60]}", 1))
    return converted
