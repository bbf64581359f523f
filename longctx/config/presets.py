"""The named choices in configs/, and the request that the command line makes of them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import yaml

from longctx.config.fields import keys
from longctx.config.model_config import GPTConfig

CONFIGS = (Path(__file__).parents[1] / "configs").resolve()  # a link, so that wheels have them
AUTO_MODEL = {"cuda": "124m", "cpu": "tiny"}  # what model=auto stands for

Config = TypeVar("Config")


class Request(NamedTuple, Generic[Config]):
    """A checked configuration, the preset chosen in each group, and the keys that were overridden.

    choices: group → name of its preset, "auto" for model= if the device will decide; {} for a
    resumed run. overrides: key → value as typed.
    """

    config: Config
    choices: dict[str, str]
    overrides: dict[str, str]


@functools.cache
def names(group: str) -> set[str]:
    """Return the names that `group`= may have; none if it has no presets."""
    return {path.stem for path in (CONFIGS / group).glob("*.yaml")}


def read(group: str, name: str) -> dict[str, Any]:
    """Return key → value of configs/<group>/<name>.yaml: what differs from the defaults."""
    values: dict[str, Any] = yaml.safe_load((CONFIGS / group / f"{name}.yaml").read_text()) or {}
    return values


def groups(schema: type) -> dict[str, str]:
    """Return the groups of `schema` that have presets, each with its default choice.

    The first key of a group holds the name of its preset; a model has no such key.
    """
    result = {}
    for name, declared in keys(schema).items():
        if declared.is_group and names(name):
            default = dataclasses.fields(declared.type)[0].default
            result[name] = default if default in names(name) else "auto"
    return result


def auto_model(composed: GPTConfig, overrides: Mapping[str, str], device: str) -> GPTConfig:
    """Return the model of model=auto on "cuda" or "cpu".

    Keys in `overrides` (model.KEY) keep the value that they have in `composed`.
    """
    overridden = {key.split(".")[1] for key in overrides if key.startswith("model.")}
    values = read("model", AUTO_MODEL[device])
    model = GPTConfig(**values | {key: getattr(composed, key) for key in overridden})
    model.validate()
    return model
