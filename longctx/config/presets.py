"""The named choices in configs/, read as plain values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

CONFIGS = Path(__file__).resolve().parents[2] / "configs"


def names(group: str) -> list[str]:
    """The names that `group`= may have, sorted."""
    return sorted(path.stem for path in (CONFIGS / group).glob("*.yaml"))


def read(group: str, name: str) -> dict[str, Any]:
    """Key → value of configs/<group>/<name>.yaml."""
    values: dict[str, Any] = yaml.safe_load((CONFIGS / group / f"{name}.yaml").read_text())
    return values
