"""Loss by position of packed validation rows: the right tokens in the right buckets."""

import gc
import math

import pytest
import torch

from longctx.data.sequences import IGNORED
from longctx.training.batches import micro_batch
from longctx.training.positions import error_of_ratio
from longctx.training.validation import (
    BUCKETS,
    BY_POSITION,
    cells_of_targets,
    sequence_sums,
    standard_error,
)
from tests.training.sample_run import row, steps, validations


def test_targets_after_a_gap_fill_no_bucket():
    """Documents without gaps: see evaluation/test_perplexity.py."""
    conversation = row(16, 16)
    conversation["targets"][:5] = IGNORED  # what is asked
    conversation["targets"][23:27] = IGNORED
    place, kept, full = cells_of_targets(micro_batch([conversation]))
    assert full.tolist() == [0, 3]
    assert kept.tolist() == list(range(16, 23))
    assert place.tolist() == [3 * BUCKETS + int(math.log2(n)) for n in range(1, 8)]


def test_the_buckets_of_a_run_are_its_losses(trained):
    """A model that knows nothing yet loses ln(vocabulary) everywhere."""
    folder = trained(max_steps=1, lr=0.0, val_rows=0)
    before, after = validations(folder)
    buckets = {key: value for key, value in before.items() if key.startswith(BY_POSITION)}
    assert list(buckets) == [f"{BY_POSITION}/{2**b}" for b in range(6)]
    for value in buckets.values():
        assert value == pytest.approx(before["val_loss"], rel=0.02)
    assert {key: after[key] for key in buckets} == pytest.approx(buckets)


def test_the_standard_error_is_that_of_a_ratio():
    torch.manual_seed(0)
    losses, targets = torch.rand(7, 9, dtype=torch.float64), torch.randint(-1, 2, (7, 9))
    targets[targets < 0] = IGNORED
    targets[4] = IGNORED
    losses[targets == IGNORED] = 0
    sums = sequence_sums(losses[:3], targets[:3]) + sequence_sums(losses[3:], targets[3:])
    scored = int((targets != IGNORED).sum())
    error = standard_error(sums.tolist(), float(losses.sum()) / scored, scored)
    pairs = [
        (float(a.sum()), int((b != IGNORED).sum())) for a, b in zip(losses, targets, strict=True)
    ]
    assert error == pytest.approx(error_of_ratio([pair for pair in pairs if pair[1]]), rel=1e-9)
    assert standard_error(sequence_sums(losses[:1], targets[:1]).tolist(), 1.0, 9) is None


@pytest.mark.gpu
@pytest.mark.parametrize("length", [1024, 8192])
def test_memory_of_pass_keys_is_predicted(trained, length):
    keys = {"device": "cuda", "attention": "naive", "seq_len": 2048, "batch_size": 2}
    keys |= {"passkey": "true", "passkey.lengths": f"[{length}]", "passkey.samples": 3}
    keys |= {"data": "embedded", "data.path": None, "data.vocab_size": 4096, "val_rows": 4}
    keys |= {"model.channels": 256, "model.ffn": 768, "model.heads": 4, "kernel.lock": "off"}
    keys |= {"graphs": "false", "memory": "fast", "max_steps": 2}
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    last = steps(trained(**keys))[-1]
    assert last["memory_peak_gib"] == pytest.approx(last["memory_predicted_gib"], rel=0.1)
