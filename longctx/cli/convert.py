"""`longctx convert`: the recipe of another project as ours, by the names in other_names.py.

A key of theirs is carried over if it means the same here, or CONVERTED has its meaning, and if ours
may have its value. All others are named on stderr, with what other_names.py says about them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import yaml

from longctx.config import fields, other_names, presets
from longctx.config.train_config import TrainConfig
from longctx.runs import run_folder

Values = dict[str, Any]
FILES = (".json", ".jsonl", ".csv", ".tsv", ".parquet", ".txt", ".md")
# Names of theirs that mean what our key means, though another name for it does not
SAME = {"gradient_accumulation_steps", "grad_accum_steps", "eval_steps", "eval_interval"}
SAME |= {"save_steps", "save_interval", "lora_r", "base_model", "model_name_or_path", "report_to"}


def _if_true(**ours: Any) -> Callable[[Any, Mapping[str, Any]], Values | None]:
    """Return a conversion of a switch: on means `ours`, off what we have by default."""
    given = {name.replace("__", "."): value for name, value in ours.items()}
    return lambda value, _: given if value in (True, "auto") else None if value else {}


def _targets(value: Any, theirs: Mapping[str, Any]) -> Values:
    names = [value] if isinstance(value, str) else value
    return {"lora.targets": list(dict.fromkeys(other_names.VALUES.get(x, x) for x in names))}


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


# A key of theirs, its value and all of theirs → ours; None: not carried over
CONVERTED: dict[str, Callable[[Any, Mapping[str, Any]], Values | None]] = {
    "adapter": lambda value, _: {"lora": {}, "qlora": {"lora.base": "nf4"}}.get(str(value)),
    "lora_alpha": lambda value, theirs: (
        {"lora.scaling": value / theirs["lora_r"]} if theirs.get("lora_r") else None
    ),
    "lora_target_modules": _targets,
    "lora_target_linear": _if_true(),
    "load_in_4bit": _if_true(lora__base="nf4"),
    "load_in_8bit": lambda value, _: None if value else {},
    "bf16": _if_true(precision="bf16"),
    "fp16": lambda value, _: None if value else {},
    "gradient_checkpointing": _if_true(memory__recompute="block"),
    "flash_attention": _if_true(attention="flash"),
    "datasets": _documents,
    "chat_template": _if_true(),
    "train_on_inputs": lambda value, _: None if value else {},
}


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
    ours = name if name in known else other_names.key_of(name, known)
    reason = other_names.answer(name, known) or f"{name}: nothing here has this name"
    reason = reason.replace(name, f"{name}={fields.shown(value)[:60]}", 1)
    if name in CONVERTED:
        if (converted := CONVERTED[name](value, theirs)) is not None:
            return converted
    elif ours is not None and name not in other_names.ADVICE:
        is_other = ours in other_names.NOTES and name not in {ours, *SAME}
        value = other_names.VALUES.get(value, value) if isinstance(value, str) else value
        if known[ours].is_group and value in presets.names(ours):
            return {ours: value}
        if not (is_other or known[ours].is_group):
            try:
                value = fields.typed(ours, value, known[ours])
                reason = f"{name}: {ours}={value}: {fields.allowed(value, known[ours])}"
            except ValueError as error:
                reason = f"{name}: {error}"
            if reason.endswith(": "):
                return {ours: value}
    print(reason, file=sys.stderr)
    return {}
