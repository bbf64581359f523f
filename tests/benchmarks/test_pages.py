"""Pages of the docs say what the code does: keys, combinations, cards."""

import json

import pytest

from benchmarks import cards, reference
from benchmarks.words import main
from longctx.config import fields
from longctx.config.eval_config import EvalConfig
from longctx.config.train_config import TrainConfig
from tests.processes import ROOT


def test_pages_are_what_the_code_says():
    assert cards.PAGE.read_text() == cards.page()
    pages = reference.pages()
    for name, text in pages.items():
        assert (ROOT / "docs" / name).read_text() == text, "run python -m benchmarks reference"
    for schema in (TrainConfig, EvalConfig):
        leaves = {name for name, key in fields.keys(schema).items() if not key.is_group}
        assert {name for name in leaves if f"| `{name}` |" not in pages["keys.md"]} == set()


@pytest.mark.slow
@pytest.mark.no_gpu
def test_a_small_card_is_measured(tmp_path):
    shape = ["model=tiny", "model.layers=1", "model.vocab_size=300", "compile=false", "workers=0"]
    own = ["measure=true", "lengths=64", "tokens=64", "minutes=60"]
    assert main(["cards", *own, f"out={tmp_path}", *shape]) == 0
    card = json.loads((tmp_path / "none.json").read_text())
    assert [row["backend"] for row in card["steps"]] == ["flash", "sdpa", "naive"]
    (line,) = cards.step_rows("x.json", card)
    speed = card["steps"][0]["tokens_per_second"]
    assert line["`flash`"] == f"{speed:,.0f} (unknown card)"
