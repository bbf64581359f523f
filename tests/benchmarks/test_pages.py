"""Pages of the docs say what the code does: keys, combinations, cards, models."""

from dataclasses import replace
from importlib.metadata import version

import pytest

from benchmarks import caps, cards, models, reference
from benchmarks.words import training_run
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


# Cards


def test_a_measured_card_is_next_to_its_prediction():
    step = {"backend": "flash", "batch": 4, "memory": "fast", "failed": None}
    step |= {"tokens": 4096, "tokens_per_second": 123456.7}
    failed = step | {"backend": "naive", "failed": "out of memory"}
    case = {"mask": "causal", "head_size": 128, "tokens": 16384, "both_tflops": 99.6}
    card = {
        **{"gpu": "NVIDIA A100-SXM4-80GB", "memory_gib": 79.1, "torch": "2.13"},
        **{"overrides": ["model=124m"], "steps": [step, failed]},
        "attention": [case | {"backend": "flash", "both_ratio": 1.05}],
    }
    (line,) = cards.step_rows("a100.json", card)
    shown, prediction = line.pop("`flash`").split(" ", 1)
    assert shown == "123,457" and 50_000 < int(prediction.strip("()").replace(",", "")) < 300_000
    assert line == {
        "card": "[NVIDIA A100-SXM4-80GB](../results/cards/a100.json)",
        **{"torch": "2.13", "tokens": "4,096"},
    }
    row = {"card": "NVIDIA A100-SXM4-80GB", "`flash`": "100 (1.05 ×)"}
    assert cards.attention_rows(card) == [row]
    (line,) = cards.step_rows("x.json", card | {"gpu": "Toaster"})
    assert line["`flash`"] == "123,457 (unknown card)"


def test_steps_under_caps_are_those_of_the_page():
    points = caps.points(caps.Options(caps=(24, 80), models=("8b",)))
    on_nf4, plain = cards.Case("8b", "LoRA on nf4"), cards.Case("8b", "LoRA")
    assert [point[:2] for point in points] == [(on_nf4, 24), (plain, 80)]
    assert all(f" {step.seq_len:,} (" in cards.PAGE.read_text() for *_, step in points)


@pytest.mark.no_gpu
def test_a_step_under_a_cap_is_measured():
    tiny = ["model=tiny", "model.layers=1", "model.vocab_size=300", "seq_len=64", "batch_size=1"]
    run = training_run([*tiny, "workers=0", "compile=false"], "cpu")
    found = caps.stepped_here(replace(run, val_rows=1), 1, 1.0)
    assert found.failed is None and len(found.ms) == 1


# Models


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
