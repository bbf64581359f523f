"""Rehearsals: steps as training takes them, in this process or a child, whose end is an answer
whatever it is.
"""

import dataclasses
import gc

import pytest
import torch

from longctx import cli
from longctx.config.model_config import GPTConfig
from longctx.config.train_config import CompleteConfig, complete
from longctx.runs import run_folder
from longctx.training import probe

WORDS = [
    "model=tiny",
    "model.layers=1",
    "model.vocab_size=64",
    "seq_len=33",
    "batch_size=2",
    "accumulate=3",
    "workers=0",
]


@pytest.fixture(scope="module")
def small() -> CompleteConfig:
    return complete(cli.compose("train", WORDS).config, "cpu")


def test_a_rehearsal_measures_steps(small: CompleteConfig) -> None:
    seen: list[int] = []
    measured = probe.rehearse(small, "cpu", 2, validate=True, after=seen.append)
    assert (len(measured.ms), seen, measured.failed) == (2, [1, 2], None)
    assert measured.tokens == 2 * 3 * 33
    assert measured.pairs == 2 * 3 * 33 * 34 // 2
    assert measured.kernels["flash"] == "torch-tiled"
    assert measured.memory["process_peak_gib"] > 0


def test_the_collector_passes_over_what_the_first_step_leaves(small: CompleteConfig) -> None:
    seen: list[int] = []
    probe.rehearse(small, "cpu", 2, after=lambda step: seen.append(gc.get_freeze_count()))
    assert min(seen) > 10_000
    assert gc.get_freeze_count() == 0

    def fail(step: int) -> None:
        raise MemoryError

    assert probe.rehearse(small, "cpu", 2, after=fail).failed == probe.OUT_OF_MEMORY
    assert gc.get_freeze_count() == 0


def test_documents_shorten_attention_and_nothing_else(small: CompleteConfig) -> None:
    row = probe.RandomRows(64, 33, 10)[5]
    assert row["doc_ids"].tolist() == [i // 10 for i in range(33)]
    assert torch.equal(row["tokens"][1:], row["targets"][:-1])
    assert probe.rehearse(small, "cpu", 1, document=1).pairs == 2 * 3 * 33


def test_a_configuration_survives_its_way_to_the_child(small: CompleteConfig) -> None:
    there = probe.config_of(run_folder.plain(small))
    assert run_folder.plain(there) == run_folder.plain(small)
    assert isinstance(there.model, type(small.model))


@pytest.mark.parametrize(
    ("changes", "seconds", "failed"),
    [
        ({}, 120, None),
        ({"seq_len": 2**40}, 120, "out of memory"),
        ({"model": GPTConfig(vocab_size=64, heads=3)}, 120, "model.heads=3 is not a multiple"),
        ({}, 0.5, "took longer"),
    ],
)
def test_a_child_always_answers(
    small: CompleteConfig, changes: dict[str, object], seconds: float, failed: str
) -> None:
    measured = probe.in_child(dataclasses.replace(small, **changes), "cpu", 1, None, False, seconds)
    assert (failed or "None") in str(measured.failed)
    assert len(measured.ms) == (0 if failed else 1)
