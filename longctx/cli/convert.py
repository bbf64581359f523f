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

from longctx.config import fields, presets
from longctx.config.other_names import ADVICE, NOTES, TABLES, VALUES, answer, key_of
from longctx.config.train_config import TrainConfig
from longctx.runs import run_folder

Values = dict[str, Any]
FILES = (".json", ".jsonl", ".csv", ".tsv", ".parquet", ".txt", ".md")


def _documents(value: Any, theirs: Mapping[str, Any]) -> Values | None:
    """Return the keys of data for one data set; several are a mix, with weights of yours."""
    if not isinstance(value, list) or len(value) != 1 or "path" not in value[0]:
        return None
    given = dict(value[0])
    path, files = str(given.pop("path")), given.pop("data_files", None)
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


def _converted(name: str, value: Any, theirs: Mapping[str, Any]) -> Values | None:
    """Return our keys for one of theirs that means something else; None: not carried over."""
    if name == "datasets":
        return _documents(value, theirs)
    if name == "lora_alpha" and theirs.get("lora_r"):
        return {"lora.scaling": value / theirs["lora_r"]}
    if name == "lora_target_modules":
        names = [value] if isinstance(value, str) else value
        return {"lora.targets": list(dict.fromkeys(VALUES.get(x, x) for x in names))}
    ours: Values | None = TABLES["converted"][name].get(fields.shown(value))
    return ours


def convert(file: Path) -> None:
    """Print our keys for those of `file`, as YAML; name the keys on stderr that have none."""
    theirs = run_folder.read_keys(file)
    ours: Values = {}
    for name, value in theirs.items():
        if value is not None and value not in ([], {}):
            ours |= _found(name, value, theirs)
    header = f"# From {file.name}. Try it: python train.py THIS_FILE dry_run=true\n"
    sys.stdout.write(header + yaml.safe_dump(ours, sort_keys=False, allow_unicode=True))


def _found(name: str, value: Any, theirs: Mapping[str, Any]) -> Values:
    """Return our keys for one of theirs; none after a line that says why there is none."""
    known = fields.keys(TrainConfig)
    ours = name if name in known else key_of(name, known)
    reason = answer(name, known) or f"{name}: nothing here has this name"
    reason = reason.replace(name, f"{name}={fields.shown(value)[:60]}", 1)
    converted: Values | None = None
    if name in TABLES["converted"]:
        converted = _converted(name, value, theirs)
    elif ours is not None and name not in ADVICE:
        value = VALUES.get(value, value) if isinstance(value, str) else value
        if known[ours].is_group:
            converted = {ours: value} if value in presets.names(ours) else None
        # With a note our key means something else, but for these names
        elif ours not in NOTES or name in {ours, *TABLES["same"]["names"].split()}:
            try:
                value = fields.typed(ours, value, known[ours])
                if not (rule := fields.allowed(value, known[ours])):
                    return {ours: value}
                reason = f"{name}: {ours}={value}: {rule}"
            except ValueError as error:
                reason = f"{name}: {error}"
    if converted is None:
        print(reason, file=sys.stderr)
    return converted or {}
