"""Pages of the docs say what the code does: keys, combinations, cards, models."""

import json
from importlib.metadata import version

import pytest

from benchmarks import cards, models, reference
from benchmarks.words import main
from longctx.config import fields
from longctx.config.eval_config import EvalConfig
from longctx.config.train_config import TrainConfig
from tests.processes import ROOT

TABLE = models.table()
SAMPLE = (
    *("bert", "falcon", "gemma3n_text", "glm4_moe", "lfm2", "llama4_text", "mamba", "mllama"),
    *("deepseek_v32", "kimi_linear", "phimoe", "youtu"),
)
of_this_release = pytest.mark.skipif(
    version("transformers") not in models.PAGE.read_text(), reason="the table is of another release"
)


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
    own = ["measure=true", "lengths=64", "tokens=64", "minutes=2"]
    assert main(["cards", *own, f"out={tmp_path}", *shape]) == 0
    card = json.loads((tmp_path / "none.json").read_text())
    assert [row["backend"] for row in card["steps"]] == ["flash", "sdpa", "naive"]
    (line,) = cards.step_rows("x.json", card)
    speed = card["steps"][0]["tokens_per_second"]
    assert line["`flash`"] == f"{speed:,.0f} (unknown card)"


def test_steps_under_caps_are_those_of_the_page():
    points = cards.points(cards.Options(caps=(24, 80), models=("8b",)))
    on_nf4, plain = cards.Case("8b", "LoRA on nf4"), cards.Case("8b", "LoRA")
    assert [point[:2] for point in points] == [(on_nf4, 24), (plain, 80)]
    assert all(f" {step.seq_len:,} (" in cards.PAGE.read_text() for *_, step in points)


def test_families_of_ours_are_in_the_table():
    assert {kind for kind, result in TABLE.items() if result == models.OURS} == models.families()


@of_this_release
def test_every_model_type_has_a_row():
    assert list(TABLE) == models.known()


@of_this_release
@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=() if kind in SAMPLE else pytest.mark.slow) for kind in TABLE]
)
def test_a_row_is_what_a_trial_finds(kind):
    assert models.trial(kind) == TABLE[kind]
