"""docs/keys.md and docs/combinations.md say what the code does, and the site has every page."""

from benchmarks import reference
from longctx.config import fields
from longctx.config.eval_config import EvalConfig
from longctx.config.train_config import TrainConfig
from tests.processes import ROOT

PAGES = reference.pages()  # before other tests register names of their own


def test_pages_are_what_the_code_says() -> None:
    for name, page in PAGES.items():
        assert (ROOT / "docs" / name).read_text() == page, "run python -m benchmarks reference"
            f"run python -m benchmarks reference: {name}"
        )


def test_every_key_is_in_the_reference() -> None:
    for schema in (TrainConfig, EvalConfig):
        leaves = {name for name, key in fields.keys(schema).items() if not key.is_group}
        assert {name for name in leaves if f"| `{name}` |" not in PAGES["keys.md"]} == set()
