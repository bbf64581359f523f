"""A validation's loss by position, and its memory."""

import gc

import pytest
import torch

from longctx.runs.metrics import BY_POSITION
from tests.training.sample_run import steps, validations


def test_the_buckets_of_a_run_are_its_losses(trained):
    """A model that knows nothing yet loses ln(vocabulary) everywhere."""
    folder = trained(max_steps=1, lr=0.0, val_rows=0)
    before, after = validations(folder)
    buckets = {key: value for key, value in before.items() if key.startswith(BY_POSITION)}
    assert list(buckets) == [f"{BY_POSITION}/{2**b}" for b in range(6)]
    for value in buckets.values():
        assert value == pytest.approx(before["val_loss"], rel=0.02)
    assert {key: after[key] for key in buckets} == pytest.approx(buckets)


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
