"""Compiling while data is read: every task runs beside the others, and none can end a run."""

import threading
from dataclasses import replace
from typing import Any

import pytest
import torch

from benchmarks.points import training_run
from longctx.model import GPT
from longctx.training import compile_ahead


def test_tasks_run_in_parallel_and_fail_in_silence():
    meeting, done = threading.Barrier(3), []

    def fails() -> None:
        meeting.wait(300)
        raise RuntimeError("no compiler")

    def works() -> None:
        meeting.wait(300)
        done.append(threading.current_thread())

    wait = compile_ahead.side_by_side([fails, works, works], 3)
    wait()
    assert len(set(done)) == 2
    assert threading.current_thread() not in done


@pytest.mark.parametrize(
    "keys",
    [[], ["model.nope_layers=[1,3]"], ["model.window=64", "model.window_layers=[0,2]"]],
    ids=["plain", "nope", "windows"],
)
def test_a_step_of_one_block_works_for_every_layer(keys):
    work = training_run(["model=tiny", "model.layers=4", "model.vocab_size=512", *keys], "cpu")
    state = torch.get_rng_state()
    compile_ahead.step_of_one_block(work.workload)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.gpu
def test_one_block_compiles_every_kernel_of_a_model(monkeypatch):
    triton = pytest.importorskip("triton")
    compiled: list[str] = []

    def note(*_: object, fn: Any, **__: object) -> None:
        compiled.append(fn.name)

    work = training_run(["model=124m", "model.vocab_size=16384"], "cuda").workload
    compile_ahead.step_of_one_block(work)
    monkeypatch.setattr(triton.knobs.runtime, "jit_post_compile_hook", note)
    model = GPT(replace(work.model, layers=2), "naive").cuda()
    tokens = torch.zeros(2, 1024, dtype=torch.int64, device="cuda")
    with torch.autocast("cuda", torch.bfloat16):
        loss = model(tokens, tokens, reduction="sum", scale=torch.ones((), device="cuda"))
    loss.backward()
    assert compiled == []
