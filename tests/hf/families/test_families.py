"""Every family computes as in transformers, and its folders go out and come back."""

from transformers import CONFIG_MAPPING

from longctx.hf.families import FAMILIES
from tests.hf.families.parity import TABLES, FamilyTests


def family_tests(kind: str) -> type[FamilyTests]:
    """Return the tests of a model_type."""
    attributes = {"config_class": CONFIG_MAPPING[kind], **TABLES[kind]}
    return type(f"Test{FAMILIES[kind].class_name}", (FamilyTests,), attributes)


def test_every_family_is_tried():
    assert TABLES.keys() == FAMILIES.keys()


for _kind in TABLES:
    globals()[f"Test{FAMILIES[_kind].class_name}"] = family_tests(_kind)
