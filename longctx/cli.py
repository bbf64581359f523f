"""Command line → checked dataclass. The only module that knows Hydra.

The schemas are the library's own dataclasses; configs/ holds the named choices. Words are checked
against the schema before Hydra sees them, because a misspelt key deserves the closest right one and
no traceback. `--help` is made from the dataclasses alone. Nothing here imports torch.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import itertools
import re
import textwrap
import typing
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from longctx.options import answer

CONFIGS = Path(__file__).resolve().parent.parent / "configs"
SCHEMAS = {
    "train": "longctx.config.train_config:TrainConfig",
    "eval": "longctx.config.eval_config:EvalConfig",
    "describe": "longctx.data.describe:DescribeConfig",
}
AUTO_MODEL = {False: "tiny", True: "124m"}  # is there a GPU → preset that model=auto stands for


class Words(NamedTuple):
    """The command line, sorted: what to do, and the key=value words."""

    sweep: bool
    overrides: list[str]


class Composed(NamedTuple):
    """A checked configuration; `choices` names the preset of each group, `changed` holds what the
    words set.
    """

    config: Any
    choices: dict[str, str]
    changed: dict[str, str]


def run(script: str, argv: list[str], do: Callable[[Words], int]) -> int:
    """The exit code of `do` with the words of `script`; help is 0, a mistake one line on stderr and
    2, Ctrl-C 130.
    """
    return answer(argv, lambda: help_text(script), lambda words: do(read_words(script, words)))


def read_words(script: str, argv: list[str]) -> Words:
    """Sort the words of `script`, one of SCHEMAS; ValueError for a word or a key that does not
    exist.
    """
    sweep = [word for word in argv if word in ("-m", "--multirun")]
    return Words(bool(sweep), [_checked_word(script, word) for word in argv if word not in sweep])


def compose(script: str, overrides: list[str], gpu: bool | None = None) -> Composed:
    """The configuration of `script` with `overrides` (from `read_words`); ValueError, one line, for
    a wrong value.
    """
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir
    from hydra.core.config_store import ConfigStore
    from omegaconf import OmegaConf

    ConfigStore.instance().store(name=f"{script}_schema", node=_schema(script))
    _parse(overrides)
    changed = dict(_key_and_value(word) for word in overrides)
    if gpu is not None and changed.get("model", "auto") == "auto":
        overrides = [word for word in overrides if not word.startswith("model=")] + [
            f"model={AUTO_MODEL[gpu]}"
        ]
    with _one_line(overrides), initialize_config_dir(str(CONFIGS), version_base="1.3"):
        composed = hydra_compose(script, overrides, return_hydra_config=True)
        choices = {
            group: str(name)
            for group, name in composed.hydra.runtime.choices.items()
            if "/" not in group
        }
        OmegaConf.set_struct(composed, False)
        del composed["hydra"]
        config: Any = OmegaConf.to_object(composed)
    validate = getattr(config, "validate", None)
    if validate is not None:
        validate()
    _check_switches(config, changed)
    config.data.check_words(changed)
    return Composed(config, choices, changed)


def from_file(script: str, path: Path, overrides: list[str]) -> Composed:
    """The configuration saved at `path` with `overrides` applied; ValueError where it is none."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    changed = dict(_key_and_value(word) for word in overrides)
    schema = _schema(script)
    upgraded = getattr(importlib.import_module(schema.__module__), "upgraded", dict)
    try:
        saved = OmegaConf.load(path)
        plain = OmegaConf.to_container(saved)
        saved = OmegaConf.create(upgraded(plain)) if isinstance(plain, dict) else saved
        merged = OmegaConf.merge(OmegaConf.structured(schema), saved)
    except (OmegaConfBaseException, YAMLError, UnicodeDecodeError, AssertionError) as error:
        raise ValueError(
            f"{path}: not the configuration of a run: {str(error).splitlines()[0]}"
        ) from error
    with _one_line(overrides):
        if changed.get("max_tokens", "null") != "null":
            merged.max_steps = None
        for word in overrides:
            key, _ = _key_and_value(word)
            OmegaConf.update(
                merged, key, _parse([word])[0].value(), force_add=_is_open(script, key)
            )
        config: Any = OmegaConf.to_object(merged)
    config.validate()
    _check_switches(config, changed)
    return Composed(config, {}, changed)


def _check_switches(config: Any, changed: dict[str, str]) -> None:
    """ValueError for a word about what is switched off, such as passkey.samples=3 without
    passkey=true.
    """
    for key, value in changed.items():
        group, _, name = key.partition(".")
        if name not in ("", "enabled") and not getattr(getattr(config, group), "enabled", True):
            raise ValueError(f"{key}={value}: does nothing without {group}=true")


def jobs(overrides: list[str]) -> list[list[str]]:
    """One list of words per combination of the choices and ranges in `overrides`, the last varying
    fastest.
    """
    with _one_line(overrides):
        alternatives = []
        for word, parsed in zip(overrides, _parse(overrides), strict=True):
            if parsed.is_discrete_sweep():
                key = parsed.get_key_element()
                alternatives.append([f"{key}={value}" for value in parsed.sweep_string_iterator()])
            elif parsed.is_sweep_override():
                raise ValueError(
                    f"{word}: an interval cannot be swept; list its values, as in lr=0.001,0.003"
                )
            else:
                alternatives.append([word])
    return [list(job) for job in itertools.product(*alternatives)]


def help_text(script: str) -> str:
    """Every key with its default and meaning, and the presets of each group."""
    doc = {
        "train": "Train a GPT on long documents.\n\n"
        "  python train.py attention=flash seq_len=16384\n"
        "  python train.py -m attention=naive,sdpa,flash seq_len=4096,8192   every combination, one process each\n"
        "  python train.py resume=runs/NAME",
        "eval": "Evaluate a run or a checkpoint, on documents it has not seen or on any text.\n\n"
        "  python eval.py checkpoint=runs/NAME seq_len=16384",
        "describe": "Describe a data set: documents, tokens, lengths, split, and packing into rows.\n\n"
        "  python -m longctx.data seq_len=16384\n"
        "  python -m longctx.data data=text data.path=docs/ out=docs.png",
    }
    lines = [doc[script], "", "Choices (group=name):"]
    for group in _groups(script):
        lines.append(f"  {group + '=':<12}{' | '.join(sorted(presets(group)))}")
    lines += ["", "Keys (key=value):", *_help_lines(_schema(script), "")]
    return "\n".join(lines)


def _help_lines(schema: Any, prefix: str) -> Iterator[str]:
    nested = []
    for item in dataclasses.fields(schema):
        default = item.default_factory() if callable(item.default_factory) else item.default
        if dataclasses.is_dataclass(default):
            nested.append((item.name, type(default)))
            continue
        shown = "" if default is dataclasses.MISSING else _as_word(default)
        head = f"  {prefix}{item.name}={shown}"
        body = textwrap.wrap(item.metadata.get("help", ""), 84)
        yield f"{head:<36}{body[0] if body else ''}".rstrip() if len(head) < 36 else head
        yield from (" " * 36 + line for line in (body[1:] if len(head) < 36 else body))
    for name, inner in nested:
        yield ""
        yield from _help_lines(inner, f"{prefix}{name}.")


def _as_word(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, (list, tuple)):
        return "[" + ",".join(_as_word(item) for item in value) + "]"
    return str(value)


def _schema(script: str) -> Any:
    module, name = SCHEMAS[script].split(":")
    return getattr(importlib.import_module(module), name)


def _keys(schema: Any) -> dict[str, bool]:
    """Dotted key → whether keys of any name may follow it."""
    hints, found = typing.get_type_hints(schema), {}
    for item in dataclasses.fields(schema):
        hint = hints[item.name]
        if dataclasses.is_dataclass(hint):
            found.update({f"{item.name}.{key}": is_open for key, is_open in _keys(hint).items()})
        found[item.name] = typing.get_origin(hint) is dict
    return found


def _is_open(script: str, key: str) -> bool:
    """Whether `key` lies inside a dictionary of any keys, as attention.options.kernel does."""
    parts = key.split(".")
    keys = _keys(_schema(script))
    return any(keys.get(".".join(parts[:n]), False) for n in range(1, len(parts)))


def unquoted(value: str) -> str:
    """A value without the quotes around it."""
    return value[1:-1] if len(value) > 1 and value[0] == value[-1] and value[0] in "'\"" else value


def _groups(script: str) -> list[str]:
    """The groups that configs/<script>.yaml chooses from."""
    defaults = (CONFIGS / f"{script}.yaml").read_text()
    listed = re.findall(r"^\s*- (?:override )?/?(\w+)(?:@\w+)?: ", defaults, re.MULTILINE)
    return [group for group in listed if (CONFIGS / group).is_dir()]


def presets(group: str) -> set[str]:
    """The names that `group`= may have."""
    return {path.stem for path in (CONFIGS / group).glob("*.yaml")}


def _checked_word(script: str, word: str) -> str:
    key, equals, value = word.partition("=")
    bare = key.lstrip("+")
    if word.startswith("-"):
        raise ValueError(
            f"{word}: not an option; there are --help, -m for a sweep, and key=value words"
        )
    if bare.lstrip("~").split(".")[0].split("/")[0] == "hydra":
        raise ValueError(f"{word}: settings of Hydra cannot be changed here")
    if "_target_" in word:
        raise ValueError(f"{word}: _target_ is not used here; presets are chosen by name")
    if "${" in value:
        raise ValueError(f"{word}: ${{...}} is not filled in here; give the value itself")
    if bare.startswith("~") or not equals or not bare:
        raise ValueError(f"{word}: not of the form key=value, such as seq_len=16384; see --help")
    keys = _keys(_schema(script))
    if keys.get(bare) or _is_open(script, bare):
        return f"++{bare}={value}"
    if bare not in keys:
        raise ValueError(f"{bare} is not a key{_closest(bare, keys)}; all keys: --help")
    if bare in _groups(script):
        names = presets(bare)
        for name in value.split(","):
            if name.strip() not in names:
                raise ValueError(
                    f"{bare}={name}: not one of {', '.join(sorted(names))}{_closest(name, names)}"
                )
    elif f"{bare}.enabled" in keys and value.lower() in ("true", "false"):
        return f"{bare}.enabled={value}"
    elif f"{bare}.enabled" in keys:
        raise ValueError(f"{word}: must be true or false")
    elif any(other.startswith(bare + ".") for other in keys):
        inner = [key for key in keys if key.startswith(bare + ".")]
        raise ValueError(
            f"{word}: {bare} has keys of its own: {', '.join(inner[:6])}{', …' if inner[6:] else ''}"
        )
    return f"{bare}={value}"


def _closest(name: str, names: Iterable[str]) -> str:
    names = list(names)
    close = [full for full in names if full.endswith("." + name)]
    close = close or difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    return f"; did you mean {close[0]}?" if close else ""


def _key_and_value(word: str) -> tuple[str, str]:
    key, _, value = word.partition("=")
    return key.lstrip("+"), value


def _parse(overrides: list[str]) -> Any:
    from hydra.core.override_parser.overrides_parser import OverridesParser

    parser, parsed = OverridesParser.create(), []
    for word in overrides:
        with _one_line([word]):
            parsed += parser.parse_overrides([word])
    return parsed


@contextmanager
def _one_line(overrides: list[str]) -> Iterator[None]:
    """Turns what Hydra and OmegaConf raise inside it into a ValueError of one line that shows the
    word at fault.
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
        said = str(cause).strip().splitlines()[0]
        at_fault = [w for w in overrides if w in str(error) or len(overrides) == 1] or [
            w
            for w in overrides
            if re.search(rf"full_key: {re.escape(_key_and_value(w)[0])}\b", str(cause))
        ]
        shown = at_fault[0].lstrip("+") if at_fault else "configuration"
        raise ValueError(f"{shown}: {_plain(said)}") from error


def _plain(said: str) -> str:
    """OmegaConf's and Hydra's words in the words of someone who never heard of them."""
    kinds = {"Integer": "a whole number", "Float": "a number", "Boolean": "true or false"}
    wrong = re.search(r"could not be converted to (\w+)", said)
    if wrong:
        return f"must be {kinds.get(wrong[1], wrong[1])}"
    if "is not a valid bool" in said:
        return "must be true or false"
    if said.startswith("Cannot convert") and " to string" in said:
        return "must be text, not a list or a dictionary"
    if "is not Optional" in said:
        return "needs a value, null is none"
    if said.startswith("Ambiguous value"):
        return "several values are a sweep: add -m; a list is written [a,b]"
    if wrong := re.search(r"incompatible with type hint '(\w+)'", said):
        kind = {
            "int": "whole numbers",
            "float": "numbers",
            "bool": "true or false",
            "str": "text",
        }.get(wrong[1], wrong[1])
        return f"must hold {kind}"
    if re.match(r"Cannot assign \w+ to Dict", said):
        return "must be keys with values, such as {key: value}"
    if "is not a ListConfig" in said:
        return "must be a list such as [1,2]"
    if said.startswith(
        ("no viable", "mismatched input", "extraneous input", "token recognition", "missing")
    ):
        return "cannot be read; put a value with special characters in quotes twice, such as name='\"a=b\"'"
    return said
