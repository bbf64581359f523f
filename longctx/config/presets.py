"""The named choices in configs/, read as plain values."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from longctx.config.model_config import GPTConfig

CONFIGS = (Path(__file__).parents[1] / "configs").resolve()  # a link, so that wheels have them
AUTO_MODEL = {"cuda": "124m", "cpu": "tiny"}  # what model=auto stands for


def names(group: str) -> set[str]:
    """The names that `group`= may have."""
    return {path.stem for path in (CONFIGS / group).glob("*.yaml")}


def read(group: str, name: str) -> dict[str, Any]:
    """Key → value of configs/<group>/<name>.yaml."""
    values: dict[str, Any] = yaml.safe_load((CONFIGS / group / f"{name}.yaml").read_text())
    return values


def auto_model(composed: GPTConfig, overrides: Mapping[str, str], device: str) -> GPTConfig:
    """The model of model=auto on "cuda" or "cpu".

    Keys in `overrides` (model.KEY) keep the value that they have in `composed`.
    """
    overridden = {key.removeprefix("model.") for key in overrides if key.startswith("model.")}
    values = read("model", AUTO_MODEL[device])
    model = GPTConfig(**values | {key: getattr(composed, key) for key in overridden})
    model.validate()
    return model
