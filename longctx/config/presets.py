"""The named choices of a group, and the request that the command line makes of them.

`attention=flash` is configs/attention/flash.yaml, with what differs from the defaults. A name that
code has registered, such as a plugin's backend, needs no file: the first key of its group has it.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar, get_type_hints

import yaml

from longctx.config.fields import keys
from longctx.config.train_config import TrainConfig
from longctx.spec.model_config import GPTConfig

# The folder is a link, so that wheels have the files
CONFIGS = (Path(__file__).parents[1] / "configs").resolve()
# Every group that has a folder there, and its key that has the name; a model has no such key
GROUPS: dict[str, str] = {
    name: next((f"{name}.{key}" for key, declared in keys(hint).items() if declared.short), name)
    for name, hint in get_type_hints(TrainConfig).items()
    if (CONFIGS / name).is_dir()
}
GROUP_OF = {key: group for group, key in GROUPS.items()}

Config = TypeVar("Config")


class Request(NamedTuple, Generic[Config]):
    """A checked configuration, the preset chosen in each group, and the keys that were overridden.

    choices: group → name of its preset, "auto" for model= if the device will decide; {} for a
    resumed run. overrides: key → value as typed.
    """

    config: Config
    choices: dict[str, str]
    overrides: dict[str, str]

    @property
    def names_data(self) -> bool:
        """Return True if data= or a key of it is given."""
        return any(name.partition(".")[0] == "data" for name in self.overrides)


@functools.cache
def files(group: str) -> dict[str, Path]:
    """Return name → file of the presets in configs/`group`."""
    return {path.stem: path for path in sorted((CONFIGS / group).glob("*.yaml"))}


def names(group: str) -> list[str]:
    """Return the names that `group`= may have; none if it has no presets."""
    choices = keys(TrainConfig)[GROUPS[group]].choices if group in GROUPS else ()
    return sorted({*files(group), *choices})


def read(group: str, name: str) -> dict[str, Any]:
    """Return key → value of the preset `name`: what differs from the defaults."""
    if str(name) not in files(group):
        return {GROUPS[group].rpartition(".")[2]: name}
    values: dict[str, Any] = yaml.safe_load(files(group)[name].read_text()) or {}
    return values


def chosen(schema: type, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the groups of `schema` with presets, each with its name in `given`, or the default."""
    known, usual = keys(schema), {"model": "auto"}
    return {
        group: given.get(key, usual.get(key, known[key].default))
        for group, key in GROUPS.items()
        if group in known and known[group].is_group
    }


def with_model(request: Request[TrainConfig], gpu: bool) -> Request[TrainConfig]:
    """Replace model=auto by the preset for a machine with a `gpu` or without one. Keys of the model
    that are overridden keep their values.
    """
    if request.choices.get("model") != "auto":
        return request
    name, config = "124m" if gpu else "tiny", request.config
    overridden = {key.split(".")[1] for key in request.overrides if key.startswith("model.")}
    own = {key: getattr(config.model, key) for key in overridden}
    model = GPTConfig(**read("model", name) | own)
    model.validate()
    choices = request.choices | {"model": name}
    return request._replace(config=dataclasses.replace(config, model=model), choices=choices)
