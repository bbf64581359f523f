"""Overrides and presets → a checked dataclass. The only user of Hydra and OmegaConf.

The schemas are the library's own dataclasses; configs/ holds the named presets. Nothing is ever
filled in from the environment: an interpolation, ${...}, is a mistake wherever it stands.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
import typing
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from longctx import untrusted
from longctx.cli.overrides import (
    SCHEMAS,
    Key,
    in_full,
    is_open,
    key_and_value,
    keys,
    split_positional,
)
from longctx.config.fields import check
from longctx.config.memory_config import MemoryConfig
from longctx.config.presets import AUTO_MODEL, CONFIGS, auto_model
from longctx.config.request import Request
from longctx.config.train_config import TrainConfig
from longctx.data.sources import check_overrides

Options = TypeVar("Options")


def compose(command: str, overrides: list[str]) -> Request[Any]:
    """Compose configs/<command>.yaml with `overrides`, as `read` returns them.

    With model=auto, `config.model` has the values of tiny; `with_model` replaces them. ValueError,
    one line, for a wrong value.
    """
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir
    from hydra.core.config_store import ConfigStore
    from omegaconf import OmegaConf

    schema = SCHEMAS[command]
    ConfigStore.instance().store(name=f"{command}_schema", node=schema)
    _parse(schema, overrides)
    changed = dict(key_and_value(override) for override in overrides)
    with (
        _plain_errors(schema, overrides),
        initialize_config_dir(str(CONFIGS), version_base="1.3"),
    ):
        composed = hydra_compose(command, overrides, return_hydra_config=True)
        chosen = composed.hydra.runtime.choices.items()
        choices = {group: str(name) for group, name in chosen if "/" not in group}
        OmegaConf.set_struct(composed, False)
        del composed["hydra"]
        config = _instance(composed)
    config.validate()
    _check_switches(config, changed)
    check_overrides(config.data, changed)
    return Request(config, choices, changed)


def from_file(command: str, path: Path, overrides: list[str]) -> Request[Any]:
    """Read the configuration saved at `path` and apply `overrides`; ValueError where it is none."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    schema = SCHEMAS[command]
    overrides = [in_full(override, schema) for override in overrides]
    changed = dict(key_and_value(override) for override in overrides)
    try:
        saved = OmegaConf.create(untrusted.read_yaml(path))
        _refuse_interpolations(saved)
        merged = OmegaConf.merge(OmegaConf.structured(schema), saved)
    except (
        OmegaConfBaseException,
        YAMLError,
        AssertionError,
        *untrusted.WRONG_VALUE,
    ) as error:
        reason = str(error).splitlines()[0]
        problem = f"not the configuration of a run of this version: {reason}"
        raise ValueError(f"{path}: {problem}") from error
    with _plain_errors(schema, overrides):
        if changed.get("max_tokens", "null") != "null":
            merged.max_steps = None
        if "memory.policy" in changed:  # all values of the run's policy give way to the new one's
            merged.memory = MemoryConfig()
        _update(merged, schema, overrides)
        config = _instance(merged)
    try:
        config.validate()
    except ValueError as error:
        by_override = any(re.match(f"{re.escape(name)}[=: ]", str(error)) for name in changed)
        raise (error if by_override else ValueError(f"{path}: {error}")) from None
    _check_switches(config, changed)
    return Request(config, {}, changed)


def options(schema: type[Options], argv: list[str]) -> Options:
    """Fill the dataclass `schema` from arguments; ValueError names the one that is wrong.

    Lists may be written a,b as well as [a,b]. Paths are taken as they are. A number without a
    declared range must be above 0.
    """
    overrides, paths = split_positional(schema, argv)
    known = keys(typing.cast(type, schema))
    overrides = [_with_brackets(one, known) for one in overrides]
    filled: Any = _filled(schema, overrides) if overrides else schema()
    tuples = {
        name: tuple(getattr(filled, name))
        for name, key in known.items()
        if typing.get_origin(key.hint) is tuple
    }
    filled = dataclasses.replace(filled, **tuples, **paths)
    check(filled)
    _check_positive(filled, known)
    if hasattr(filled, "validate"):
        filled.validate()
    return typing.cast(Options, filled)


def with_model(request: Request[TrainConfig], gpu: bool) -> Request[TrainConfig]:
    """Replace model=auto, where it is still open, by the preset for a machine with a `gpu` or
    without one.
    """
    if request.choices.get("model") != "auto":
        return request
    device, config = "cuda" if gpu else "cpu", request.config
    model = auto_model(config.model, request.overrides, device)
    choices = request.choices | {"model": AUTO_MODEL[device]}
    return request._replace(config=dataclasses.replace(config, model=model), choices=choices)


def jobs(command: str, overrides: list[str]) -> list[list[str]]:
    """List the overrides of each job of a sweep: every combination of the choices and ranges in
    `overrides`, the last varying fastest.
    """
    schema = SCHEMAS[command]
    alternatives = []
    with _plain_errors(schema, overrides):
        for override, parsed in zip(overrides, _parse(schema, overrides), strict=True):
            if parsed.is_discrete_sweep():
                name = parsed.get_key_element()
                alternatives.append([f"{name}={one}" for one in parsed.sweep_string_iterator()])
            elif parsed.is_sweep_override():
                raise ValueError(
                    f"{override}: an interval cannot be swept; list values, as in lr=0.001,0.003"
                )
            else:
                alternatives.append([override])
    return [list(job) for job in itertools.product(*alternatives)]


def _filled(schema: type, overrides: Sequence[str]) -> Any:
    """The dataclass `schema`, frozen or not, with its defaults and `overrides`."""
    from omegaconf import OmegaConf

    node = OmegaConf.structured(schema)
    OmegaConf.set_readonly(node, False)
    _update(node, schema, overrides)
    return _instance(node)


def _parse(schema: type, overrides: Sequence[str]) -> list[Any]:
    """Hydra's reading of each override; ValueError shows the one that cannot be read."""
    from hydra.core.override_parser.overrides_parser import OverridesParser

    parser, parsed = OverridesParser.create(), []
    for override in overrides:
        with _plain_errors(schema, [override]):
            parsed += parser.parse_overrides([override])
    return parsed


def _update(node: Any, schema: type, overrides: Sequence[str]) -> None:
    """Set the keys of `node` that `overrides` name."""
    from hydra.errors import HydraException
    from omegaconf import OmegaConf

    for override, parsed in zip(overrides, _parse(schema, overrides), strict=True):
        name = parsed.key_or_group
        with _plain_errors(schema, [override]):
            if parsed.is_sweep_override():
                raise HydraException(f"Ambiguous value for argument '{override}'")
            OmegaConf.update(node, name, parsed.value(), force_add=is_open(schema, name))


def _instance(node: Any) -> Any:
    """The dataclass that `node` describes; ValueError where an interpolation is left in it."""
    from omegaconf import OmegaConf

    _refuse_interpolations(node)
    return OmegaConf.to_object(node)


def _refuse_interpolations(node: Any, name: str = "") -> None:
    """Raise ValueError for a value such as ${oc.env:HOME}, which OmegaConf would fill in."""
    from omegaconf import DictConfig, ListConfig

    if node._is_interpolation():
        raise ValueError(f"{name}: ${{...}} is not filled in here; give the value itself")
    if isinstance(node, DictConfig | ListConfig) and not node._is_none():
        keys_or_indices: Any = node if isinstance(node, DictConfig) else range(len(node))
        for key in keys_or_indices:
            _refuse_interpolations(node._get_node(key), f"{name}.{key}" if name else str(key))


def _with_brackets(override: str, known: Mapping[str, Key]) -> str:
    """An override in which a list written a,b is [a,b]."""
    name, value = key_and_value(override)
    is_bare = name in known and known[name].is_list() and not value.startswith("[")
    return f"{name}=[{value}]" if is_bare and value != "null" else override


def _check_positive(filled: Any, known: Mapping[str, Key]) -> None:
    """ValueError for an empty list, and for a number of 0 or less that no declared range allows."""
    for name, key in known.items():
        value = getattr(filled, name)
        values = value if isinstance(value, list | tuple) else [value]
        if key.is_list() and not values:
            raise ValueError(f"{name}=: give at least one")
        for one in values if key.metadata.get("between") is None else []:
            if isinstance(one, int | float) and not isinstance(one, bool) and not one > 0:
                raise ValueError(f"{name}={one}: must be above 0")


def _check_switches(config: Any, changed: Mapping[str, str]) -> None:
    """ValueError for a key of what is switched off, such as passkey.samples=3 without
    passkey=true.
    """
    for key, value in changed.items():
        group, _, name = key.partition(".")
        if name not in ("", "enabled") and not getattr(getattr(config, group), "enabled", True):
            raise ValueError(f"{key}={value}: does nothing without {group}=true")
    if "spike_budget" in changed and config.spike != "skip":
        budget = config.spike_budget
        if budget != TrainConfig.spike_budget:  # which the config.yaml of every run has
            raise ValueError(f"spike_budget={budget}: does nothing without spike=skip; give it too")


@contextmanager
def _plain_errors(schema: type, overrides: Sequence[str]) -> Iterator[None]:
    """Turn what Hydra and OmegaConf raise into a ValueError of one line: the override at fault and
    what would be right.
    """
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    try:
        yield
    except (HydraException, OmegaConfBaseException) as error:
        cause: BaseException = error
        while isinstance(
            deeper := cause.__cause__ or cause.__context__, (HydraException, OmegaConfBaseException)
        ):
            cause = deeper
        at_fault = _at_fault(error, cause, overrides)
        shown = at_fault.lstrip("+") if at_fault else "configuration"
        raise ValueError(f"{shown}: {_reason(cause, at_fault, schema)}") from error


def _at_fault(error: BaseException, cause: BaseException, overrides: Sequence[str]) -> str | None:
    """The override that an error is about: the only one, or one that it names."""
    if len(overrides) == 1:
        return overrides[0]
    full_key = str(getattr(cause, "full_key", None) or "").partition("[")[0]
    named = [one for one in overrides if f"{full_key}.".startswith(key_and_value(one)[0] + ".")]
    named += [one for one in overrides if one in str(error)]
    return named[0] if named else None


def _reason(cause: BaseException, override: str | None, schema: type) -> str:
    """What is wrong and what would be right, in words of someone who never heard of Hydra."""
    from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

    message = str(cause).strip().splitlines()[0]
    if message.startswith("Ambiguous value"):
        advice = "add -m for a sweep" if schema is TrainConfig else "give one"
        return f"several values; {advice}, or write a list as [a,b]"
    if not isinstance(cause, OmegaConfBaseException):
        is_syntax = re.match(r"no viable|mismatched|extraneous|token recognition|missing", message)
        quotes = "put a value with special characters in quotes twice, such as name='\"a=b\"'"
        return f"cannot be read; {quotes}" if is_syntax else message
    name, value = key_and_value(override or "")
    if name not in keys(schema) or isinstance(cause, ConfigAttributeError | ConfigKeyError):
        return message
    expected = keys(schema)[name].expected()
    if value.lower() in ("null", "none"):
        return f"not allowed; give {expected}"
    return f"must be {expected}"
