"""docs/models.md says what computes each model_type of transformers."""

from importlib.metadata import version

import pytest

from benchmarks import models

TABLE = models.table()
SAMPLE = (
    *("bert", "falcon", "gemma3n_text", "glm4_moe", "lfm2", "llama4_text", "mamba", "mllama"),
    *("deepseek_v32", "kimi_linear", "phimoe", "youtu"),
)
of_this_release = pytest.mark.skipif(
    version("transformers") not in models.PAGE.read_text(), reason="the table is of another release"
)


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
