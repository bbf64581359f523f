"""Compiling while data is read: every task runs beside the others, and none can end a run."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import pytest
import torch

from benchmarks.words import training_run
from longctx.model import GPT
from longctx.training import compile_ahead


def test_tasks_run_beside_one_another_and_what_fails_is_left_to_the_run() -> None:
    meeting, done = threading.Barrier(3), []

    def fails() -> None:
        meeting.wait(20)
        raise RuntimeError("no compiler")

    def works() -> None:
        meeting.wait(20)
        done.append(threading.current_thread())

    wait = compile_ahead.side_by_side([fails, works, works])
    wait()
    assert len(set(done)) == 2
    assert threading.current_thread() not in done


def test_nothing_to_do_is_done_at_once() -> None:
    compile_ahead.side_by_side([])()


def test_a_cpu_compiles_nothing_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_ahead, "side_by_side", lambda tasks: pytest.fail("it does"))
    compile_ahead.begin(training_run(["model=tiny"], "cpu").workload)()


@pytest.mark.gpu
def test_a_gpu_has_the_kernels_of_a_run_tested_before_it_asks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from longctx.kernels import selftest

    monkeypatch.setattr(selftest, "_trusted", set())
    work = training_run(["model=124m", "seq_len=4096"], "cuda").workload
    state = torch.get_rng_state(), torch.cuda.get_rng_state()
    compile_ahead.begin(work)()
    assert {key[0] for key in selftest._trusted} == {"forward", "backward"}
    after = torch.get_rng_state(), torch.cuda.get_rng_state()
    assert all(torch.equal(a, b) for a, b in zip(state, after, strict=True))


@pytest.mark.gpu
def test_a_step_of_one_block_compiles_what_a_step_of_the_model_needs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    triton = pytest.importorskip("triton")
    compiled: list[str] = []

    def note(*_: object, fn: Any, **__: object) -> None:
        compiled.append(fn.name)

    work = training_run(["model=124m", "model.vocab_size=16384"], "cuda").workload
    compile_ahead.step_of_one_block(work, torch.device("cuda", 0))
    monkeypatch.setattr(triton.knobs.runtime, "jit_post_compile_hook", note)
    model = GPT(replace(work.model, layers=2), "naive").cuda()
    tokens = torch.zeros(2, 1024, dtype=torch.int64, device="cuda")
    with torch.autocast("cuda", torch.bfloat16):
        loss = model(tokens, tokens, reduction="sum", scale=torch.ones((), device="cuda"))
    loss.backward()
    assert compiled == []
