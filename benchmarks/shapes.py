"""Models as transformers describes them: those of benchmarks, and small ones of every family, for
the table of models and for tests. shapes.yaml has their numbers.
"""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import yaml

TABLES = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())
SHAPES: dict[str, dict[str, Any]] = TABLES["models"]
OWN: dict[str, dict[str, Any]] = TABLES["own"]
OWN |= {kind: own for kinds, own in TABLES["alike"].items() for kind in kinds.split()}


def settings_of(kind: str) -> dict[str, Any]:
    """Return the settings of a small model with this model_type."""
    from transformers import CONFIG_MAPPING

    if kind not in CONFIG_MAPPING:
        return {"model_type": kind}
    config_class: Any = CONFIG_MAPPING[kind]
    known = set(getattr(config_class, "__dataclass_fields__", {}))
    known |= set(inspect.signature(config_class.__init__).parameters)
    experts: dict[str, Any] = TABLES["experts"]
    known |= {alias for alias, name in config_class.attribute_map.items() if name not in experts}
    keys = {key: value for key, value in (TABLES["sizes"] | experts).items() if key in known}
    return {"model_type": kind, **keys, **OWN.get(kind, {})}


def reference(kind: str) -> Any:
    """Return a model of transformers with random weights and its own attention, without dropout."""
    import torch
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    torch.manual_seed(0)
    config = CONFIG_MAPPING[kind].from_dict(settings_of(kind))
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    for weight in model.parameters():
        if weight.ndim == 1:  # ones and zeros would hide mistakes
            torch.nn.init.normal_(weight, mean=0.2, std=0.1)
    return model
