"""Compiling while data is read: every task runs beside the others, and none can end a run."""

import gc
import sys
import threading
from dataclasses import replace
from typing import Any

import pytest
import torch

from benchmarks.words import training_run
from longctx.model import GPT
from longctx.training import compile_ahead
from tests.processes import ROOT, finished


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


def test_compiler_settings_are_those_of_its_thread():
    code = """if True:
        from concurrent.futures import ThreadPoolExecutor
        from longctx.model import compile_cache
        with ThreadPoolExecutor(1) as pool:
            pool.submit(compile_cache.preload).result()
        compile_cache.use()
        import torch._functorch.config, torch._inductor.config, torch.compiler.config
        assert torch._functorch.config.autograd_cache_allow_custom_autograd_functions
        assert torch._inductor.config.unsafe_marked_cacheable_functions
        assert "longctx" in torch.compiler.config.cache_key_tag
    """
    done = finished("-c", [code], ROOT)
    assert done.returncode == 0, done.stderr


def test_nobody_waits_for_compilers_at_the_end():
    code = """if True:
        import threading
        from longctx.system import exit_with
        from longctx.training.compile_ahead import side_by_side
        side_by_side([threading.Event().wait], 1)
        print("said", flush=False)
        exit_with(2)
    """
    done = finished("-c", [code], ROOT)
    assert (done.returncode, done.stdout) == (2, "said\n")


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


@pytest.mark.gpu
def test_a_hundred_warm_starts_end_no_task(monkeypatch):
    """Each start compiles nothing and loads every kernel anew, with launchers seen before; kernels
    are tested before the run needs them, and take no random number of it.
    """
    triton = pytest.importorskip("triton")
    from longctx.kernels.attention import selftest

    errors: list[Exception] = []
    on = compile_ahead.on

    def note(device: int, task: compile_ahead.Task) -> None:
        try:
            on(device, task)
        except Exception as error:
            errors.append(error)
            raise

    monkeypatch.setattr(compile_ahead, "on", note)
    work = training_run(["model=124m", "seq_len=4096"], "cuda").workload
    compile_ahead.begin(work)()
    state = torch.get_rng_state(), torch.cuda.get_rng_state()
    # isinstance would look through proxies of objects that are gone
    kernels = [x for x in gc.get_objects() if issubclass(type(x), triton.JITFunction)]
    hopper = "longctx.kernels.attention.hopper"
    modules = [module for name, module in sys.modules.items() if name.startswith(hopper)]
    for _ in range(100):
        selftest._trusted.clear()
        for kernel in kernels:
            kernel.device_caches.clear()
        for module in modules:
            getattr(module, "_launches", {}).clear()
        compile_ahead.begin(work)()
        assert errors == []
        assert {key[0] for key in selftest._trusted} == {"forward", "backward"}
    after = torch.get_rng_state(), torch.cuda.get_rng_state()
    assert all(torch.equal(a, b) for a, b in zip(state, after, strict=True))
