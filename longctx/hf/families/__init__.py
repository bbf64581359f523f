"""Model families: one file each, which says how a config.json of transformers reads and writes.

Every file of this folder is imported, so a family that registers itself is known.
"""

from __future__ import annotations

import importlib
import os
import pkgutil
from pathlib import Path

from longctx import untrusted
from longctx.hf.families import multimodal
from longctx.hf.families.config_json import ConfigJson
from longctx.hf.families.family import FAMILIES, Family
from longctx.spec.model_config import GPTConfig

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")


def read_model(folder: str | Path) -> tuple[Family, GPTConfig]:
    """The family and the model of `folder`/config.json.

    transformers 5 writes rope_parameters, older ones rope_theta; both are read. Raises ValueError
    or FileNotFoundError naming the first key and value that GPT does not cover.
    """
    source = _text_model(folder)
    model_type = source.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        known = ", ".join(sorted(FAMILIES))
        raise source.error(f"model_type={model_type} is not covered yet; there are {known}")
    family = FAMILIES[model_type]
    try:
        return family, family.read(source)
    except (AttributeError, IndexError, KeyError, TypeError) as error:
        # such as a number in the place of a list
        reason = f"{type(error).__name__}: {error}"
        raise source.error(f"its keys are not as transformers writes them ({reason})") from error


def has_family(folder: str | Path) -> bool:
    """Return True if the model_type in `folder`/config.json has a family here, or there is none."""
    model_type = _text_model(folder).get("model_type")
    return not isinstance(model_type, str) or model_type in FAMILIES


def _text_model(folder: str | Path) -> ConfigJson:
    file = Path(folder) / "config.json"
    if not os.path.lexists(file):
        raise FileNotFoundError(
            f"{file}: no such file; give a folder with config.json and safetensors"
        )
    return multimodal.text_model(ConfigJson(file, untrusted.read_settings(file)))


def family_of(config: GPTConfig) -> Family:
    """The family whose class in transformers is meant for `config`."""
    suiting = [family for family in FAMILIES.values() if family.suits(config)]
    return max(suiting, key=lambda family: family.rank)
