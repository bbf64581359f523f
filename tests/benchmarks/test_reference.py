"""docs/keys.md and docs/combinations.md say what the code does."""

import pytest

from benchmarks import reference
from longctx.config import fields
from longctx.config.eval_config import EvalConfig
from longctx.config.train_config import TrainConfig
from tests.processes import ROOT

PAGES = reference.pages()  # before other tests register names of their own


@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_what_the_code_says(name: str) -> None:
    assert (ROOT / "docs" / name).read_text() == PAGES[name], "run python -m benchmarks reference"


@pytest.mark.parametrize("schema", [TrainConfig, EvalConfig])
def test_every_key_is_in_the_reference(schema: type) -> None:
    leaves = {name for name, key in fields.keys(schema).items() if not key.is_group}
    assert {name for name in leaves if f"| `{name}` |" not in PAGES["keys.md"]} == set()
