"""Compiling while data is read leaves the memory of a run alone, and fails in silence."""

import pytest
import torch

from benchmarks.points import training_run
from longctx.attention import registered
from longctx.training import compile_ahead


@pytest.mark.gpu
def test_compiling_ahead_fails_in_silence(monkeypatch):
    def fails() -> None:
        raise RuntimeError("no compiler")

    work = training_run(["model=tiny", "model.vocab_size=512"], "cuda").workload
    backend = registered()[work.attention.backend]
    state = torch.cuda.get_rng_state()
    monkeypatch.setattr(backend, "compile_tasks", lambda *_: [fails])
    compile_ahead.begin(work)()
    assert torch.equal(torch.cuda.get_rng_state(), state)
