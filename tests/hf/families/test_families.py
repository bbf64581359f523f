"""Every family computes as in transformers, and its folders go out and come back."""

from pathlib import Path
from typing import Any

import yaml
from transformers import CONFIG_MAPPING

from longctx.hf.families import FAMILIES
from tests.hf.families.parity import FamilyTests

TABLES: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("families.yaml").read_text())
del TABLES["shared"]


def family_tests(kind: str) -> type[FamilyTests]:
    """Return the tests of a model_type."""
    attributes = {"config_class": CONFIG_MAPPING[kind], **TABLES[kind]}
    return type(f"Test{FAMILIES[kind].class_name}", (FamilyTests,), attributes)


def test_every_family_is_tried():
    assert TABLES.keys() == FAMILIES.keys()


for _kind in TABLES:
    globals()[f"Test{FAMILIES[_kind].class_name}"] = family_tests(_kind)
