"""docs/cards.md is what the planner says; steps under caps are those of its table."""

from dataclasses import replace

import pytest

from benchmarks import caps, cards
from benchmarks.cards import PAGE, Case
from benchmarks.words import training_run

TINY = ["model=tiny", "model.layers=1", "model.vocab_size=300", "seq_len=64", "batch_size=1"]


def test_the_page_is_what_the_planner_says():
    assert PAGE.read_text() == cards.page()


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
    on_nf4, plain = Case("8b", "LoRA on nf4"), Case("8b", "LoRA")
    assert [point[:2] for point in points] == [(on_nf4, 24), (plain, 80)]
    assert all(f" {step.seq_len:,} (" in PAGE.read_text() for *_, step in points)


@pytest.mark.no_gpu
def test_a_step_under_a_cap_is_measured():
    run = training_run([*TINY, "workers=0", "compile=false"], "cpu")
    found = caps.stepped_here(replace(run, val_rows=1), 1, 1.0)
    assert found.failed is None and len(found.ms) == 1
