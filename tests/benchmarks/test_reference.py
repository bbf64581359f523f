"""docs/keys.md and docs/combinations.md say what the code does."""

from benchmarks import reference
from longctx.config import fields
from longctx.config.eval_config import EvalConfig
from longctx.config.train_config import TrainConfig
from tests.processes import ROOT


def test_pages_are_what_the_code_says():
    pages = reference.pages()
    for name, text in pages.items():
        assert (ROOT / "docs" / name).read_text() == text, "run python -m benchmarks reference"
    for schema in (TrainConfig, EvalConfig):
        leaves = {name for name, key in fields.keys(schema).items() if not key.is_group}
        assert {name for name in leaves if f"| `{name}` |" not in pages["keys.md"]} == set()
