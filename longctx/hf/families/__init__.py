"""Model families, which say how a config.json of transformers is read. A model remembers the
config.json that it was read from, and an export repeats it.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from longctx import files, untrusted
from longctx.config.fields import refuse, shown
from longctx.hf.families.config_json import TABLES, ConfigJson
from longctx.hf.families.family import PARTS, Family
from longctx.runs.run_folder import flat, plain
from longctx.spec.model_config import GPTConfig

FAMILIES: dict[str, Family] = {}
for _name, _table in TABLES.items():
    for _part in (*_table.pop("like", ()), "every"):
        # Lists and tables add up
        for _key, _value in PARTS[_part].items():
            _own = _table.get(_key, type(_value)())
            _table[_key] = _value | _own if isinstance(_value, dict) else _value + _own
    _code = resolve_name(f"{__name__}.{_table.get('code', Family.code)}")
    FAMILIES[_name] = _code(_name, **_table)


def register(family: Family) -> None:
    """Make a family known by its model_type."""
    FAMILIES[family.model_type] = family


# A model without a source is written as the first of these that reads back equal
NEW = ["llama", "mistral", "ministral", "qwen2", "qwen3", "olmo2", "mixtral", "qwen3_moe"]
NEW += ["gpt_oss", "gpt_neox", "starcoder2", "cohere2"]
# Keys of a source about its files: code, formats of weights, and who wrote it
OF_FILES = {"auto_map", "quantization_config", "torch_dtype", "transformers_version"}


def read_model(folder: str | Path) -> tuple[Family, GPTConfig]:
    """Return the family and the model of `folder`/config.json.

    transformers 5 writes rope_parameters, older ones rope_theta; both are read. Raises ValueError
    or FileNotFoundError naming the first key and value that GPT does not cover.
    """
    source = _text_model(folder)
    model_type = source.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        known = ", ".join(sorted(FAMILIES))
        raise source.error(f"model_type={model_type} is not covered yet; there are {known}")
    family = FAMILIES[model_type]
    # Such as a number in the place of a list
    try:
        config = family.read(source.with_keys(**family.defaults | source))
        return family, replace(config, source=dict(source))
    except (AttributeError, ArithmeticError, LookupError, TypeError) as error:
        reason = f"{type(error).__name__}: {files.one_line(error)}"
        raise source.error(f"its keys are not as transformers writes them ({reason})") from error


def read_config(folder: str | Path, by_transformers: str = "auto") -> GPTConfig:
    """Return the model of `folder`/config.json. `by_transformers` says if transformers computes it:
    "auto", if no family here has its model_type; "always"; "never".

    Raises ValueError or FileNotFoundError naming the first key and value that is not covered.
    """
    if by_transformers == "auto":
        kind = _text_model(folder).get("model_type")
        by_transformers = "never" if not isinstance(kind, str) or kind in FAMILIES else "always"
    if by_transformers == "never":
        return read_model(folder)[1]
    message = f"{folder}: transformers has to compute this model: pip install 'transformers>=5'"
    refuse((importlib.util.find_spec("transformers") is None, message))
    from longctx.hf.transformers_model import described

    file = Path(folder) / "config.json"
    with untrusted.named(file):
        return described(untrusted.read_settings(file))


def asked_of(request: Any, run: Path | None = None) -> str:
    """Return what `request` says of the model of its init=; a `run` has decided it."""
    way: str = request.transformers
    refuse((run is not None and way != "auto", f"transformers={way}: the run {run} decides that"))
    return way


def _text_model(folder: str | Path) -> ConfigJson:
    file = Path(folder) / "config.json"
    if not os.path.lexists(file):
        remedy = "give a folder with config.json and safetensors"
        raise FileNotFoundError(f"{file}: no such file; {remedy}")
    return ConfigJson(file, untrusted.read_settings(file)).text_model()


def write_config(config: GPTConfig, context: int) -> dict[str, Any]:
    """Return config.json of `config` for `context` tokens: its source's, with the changes.

    Raises ValueError if no family would read this model from it.
    """
    if config.rope_scaling.get("rope_type") == "dynamic":
        # The length from which its base starts to grow, whatever the run trained at
        context = config.context or context
    wanted = _comparable(config, context)
    for family, keys in _candidates(config):
        names = {x for x, key in family.aliases.items() if key == "max_position_embeddings"}
        keys |= dict.fromkeys(["max_position_embeddings", *names], context)
        with suppress(ValueError):
            found = family.read(ConfigJson(Path("config.json"), family.defaults | keys))
            if _comparable(found, context) == wanted:
                return keys
    sizes = ("source", *FAMILIES["llama"].sizes.values())
    usual = replace(GPTConfig(), **{key: getattr(config, key) for key in sizes})
    own, others = (flat(plain(model)) for model in (config, usual))
    named = [f"model.{key}={shown(x)}" for key, x in own.items() if x != others.get(key, ...)]
    problem = f"no class of transformers has all of this model: {', '.join(named)}"
    raise ValueError(f"{problem}; generate, chat and eval take the run itself")


def _candidates(config: GPTConfig) -> Iterator[tuple[Family, dict[str, Any]]]:
    """Yield families with what they may write for `config`."""
    if not config.source:
        # Classes of transformers refuse other widths
        names = NEW if config.channels % config.heads == 0 else []
        yield from ((FAMILIES[name], FAMILIES[name].write_new(config)) for name in names)
        return
    kind = config.source["model_type"]
    refuse((kind not in FAMILIES, f"model_type={kind}: of a plugin; name its file in plugins=[]"))
    family = FAMILIES[kind]
    kept = {x: y for x, y in config.source.items() if not (x in OF_FILES or x.startswith("_"))}
    kept |= {"architectures": [f"{family.class_name}ForCausalLM"], **family.changed(config)}
    yield family, dict(kept)
    # The run may have stretched its positions
    yield family, kept | family.write_rope(config)


def _comparable(config: GPTConfig, context: int) -> GPTConfig:
    """Return `config` with one value for each of what may be said in two ways."""
    is_usual = config.head_size * config.heads == config.channels
    windows = [n for n in range(config.layers) if config.window_of(n) is not None]
    has_dense = not all(map(config.has_experts, range(config.layers))) or config.experts.beside
    return replace(
        config,
        context=context,
        head_dim=None if is_usual else config.head_size,
        window_layers=None if len(windows) in (0, config.layers) else windows,
        ffn=config.ffn if has_dense else config.expert_ffn,
        experts=replace(config.experts, ffn=config.expert_ffn, balance=0.0),  # in training alone
    )
