"""Compiling while data is read: every task runs beside the others, and none can end a run."""

from __future__ import annotations

import threading

import pytest

from benchmarks.words import training_run
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
    compile_ahead.begin(work)()
    assert {key[0] for key in selftest._trusted} == {"forward", "backward"}
