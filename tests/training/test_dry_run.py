"""Dry runs: steps as training takes them, here or in a child, which always answers."""

import dataclasses

import pytest
import torch

from longctx import cli
from longctx.config.asked import workload_of
from longctx.config.doors import ObjectiveConfig
from longctx.data.preferences import REJECTED, SIDES, UNRELATED
from longctx.data.sequences import IGNORED
from longctx.training import dry_run as dry
from longctx.training.dry_run import OUT_OF_MEMORY, dry_run_in_child
from longctx.training.run import Run, scheduled

MODEL = "model=tiny model.layers=1 model.vocab_size=64"
STEP = "seq_len=33 batch_size=2 accumulate=3 workers=0"


@pytest.fixture(scope="module")
def small() -> Run:
    config = cli.compose("train", [*MODEL.split(), *STEP.split()]).config
    return scheduled(config, workload_of(config, "cpu", 33))


def test_dry_run_measures_steps(small):
    steps: list[int] = []
    measured = dry.dry_run(small, 2, validate=True, after=steps.append)
    assert (len(measured.ms), steps, measured.failed) == (2, [1, 2], None)
    assert (measured.tokens, measured.pairs) == (2 * 3 * 33, 2 * 3 * 33 * 34 // 2)
    assert measured.kernels["flash"] == "torch-tiled" and measured.memory["process_peak_gib"] > 0


def test_dry_run_out_of_memory_is_an_answer(small):
    def fail(step: int) -> None:
        raise MemoryError

    assert dry.dry_run(small, 2, after=fail).failed == OUT_OF_MEMORY


def test_a_dry_run_is_deterministic_where_its_run_is(small):
    """Other kernels would take other memory."""
    config = dataclasses.replace(small.config, deterministic=True)
    assert dry.dry_run(dataclasses.replace(small, config=config), 1).failed is None
    assert torch.are_deterministic_algorithms_enabled()


def test_documents_shorten_attention_and_nothing_else(small):
    row = dry.RandomSequences(64, 33, 10)[5]
    assert row["doc_ids"].tolist() == [i // 10 for i in range(33)]
    assert torch.equal(row["tokens"][1:], row["targets"][:-1])
    assert dry.dry_run(small, 1, document=1).pairs == 2 * 3 * 33


@pytest.mark.parametrize(("name", "other"), [("dpo", REJECTED), ("kto", UNRELATED)])
def test_dry_run_of_answers_has_pairs(small, name, other):
    config = dataclasses.replace(small.config, objective=ObjectiveConfig.of(name))
    run = dataclasses.replace(small, config=config)
    row = dry.RandomSequences(64, 33, 10, dry.Answers(other, True))[5]
    assert row["doc_ids"].unique().tolist() == [0, other, SIDES, SIDES + other]
    assert (row["targets"] == IGNORED).nonzero().flatten().tolist() == [9, 19, 29, 32]
    assert row["reference"].shape == (2, SIDES)
    found = dry.dry_run(run, 2, validate=True)
    assert (len(found.ms), found.failed) == (2, None)


@pytest.mark.parametrize(("seconds", "failed"), [(240, None), (0.5, "took longer")])
def test_child_always_answers(small, seconds, failed):
    large = bytearray(b"x") * 2**31  # no part of the child's peak
    measured = dry_run_in_child(small, 1, None, False, seconds)
    assert (failed or "None") in str(measured.failed)
    assert len(measured.ms) == (0 if failed else 1)
    assert measured.memory.get("process_peak_gib", 0) < len(large) / 2**30
