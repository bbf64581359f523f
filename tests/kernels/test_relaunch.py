"""What is kept between calls of a shape is bounded, and holds no tensor. Launches need a GPU:
tests/attention/test_flash_hopper.py. Triton loads launchers in threads without mixing them up."""

import gc
import shutil
import sysconfig
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from longctx.kernels.attention import relaunch
from longctx.kernels.attention.relaunch import MapMaker, tensor_map


class Descriptor:
    def __init__(self, base):
        self.base, self.shape = base, [3, 5]


def test_a_map_is_made_once_and_holds_no_tensor():
    calls = []

    def made(descriptor, metadata):
        calls.append(metadata)
        return [descriptor.base.data_ptr(), *descriptor.shape]

    x = torch.zeros(3, 5)
    alive = weakref.ref(x)
    one, other = (MapMaker(relaunch._mapped(0, Descriptor(x)), made, name) for name in "ab")
    assert [tensor_map(one, at) for at in (64, 128, 64)] == [(64, 3, 5), (128, 3, 5), (64, 3, 5)]
    tensor_map(other, 64)
    assert calls == ["a", "a", "b"]
    del x
    gc.collect()
    assert alive() is None


# An extension module like those that Triton 3.6 makes for each kernel: of one name, init in one
# phase.
LAUNCHER = """
#include <Python.h>
static PyObject* launch(PyObject* self, PyObject* args) { return PyLong_FromLong(%d); }
static PyMethodDef methods[] = {{"launch", launch, METH_VARARGS, ""}, {NULL, NULL, 0, NULL}};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "__triton_launcher", NULL, -1, methods};
PyMODINIT_FUNC PyInit___triton_launcher(void) { return PyModule_Create(&module); }
"""


class Driver:
    """A GPU's driver as Triton sees it, which builds and loads real launchers."""

    def __init__(self):
        self.utils = self
        self.together = None

    def launcher_cls(self, source, metadata):
        from triton.runtime.build import compile_module_from_src

        module = compile_module_from_src(source, "__triton_launcher")
        if self.together is not None:
            with suppress(threading.BrokenBarrierError):
                self.together.wait(1)
        return module.launch

    def get_current_device(self):
        return "a stand-in"

    def get_current_target(self):
        return SimpleNamespace(warp_size=32)

    def get_device_properties(self, device):
        return {"max_shared_mem": 0}

    def load_binary(self, name, binary, shared, device):
        return 1, 2, 3, 4, 1024


@pytest.fixture
def driver(monkeypatch, tmp_path):
    triton = pytest.importorskip("triton")
    if not shutil.which("gcc") or not Path(sysconfig.get_path("include"), "Python.h").exists():
        pytest.skip("needs gcc and Python.h")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    kernel = triton.compiler.CompiledKernel
    monkeypatch.setattr(kernel, "_init_handles", kernel._init_handles)
    driver, before = Driver(), triton.runtime.driver._active
    triton.runtime.driver.set_active(driver)
    relaunch.load_one_at_a_time.cache_clear()
    relaunch.load_one_at_a_time()
    yield driver
    relaunch.load_one_at_a_time.cache_clear()
    triton.runtime.driver.set_active(before)


def compiled_kernel(number):
    """A compiled kernel that is not loaded, whose launcher returns `number`."""
    from triton.compiler import CompiledKernel

    kernel = object.__new__(CompiledKernel)
    kernel.module = kernel.function = kernel._run = None
    kernel.src, kernel.metadata = LAUNCHER % number, SimpleNamespace(shared=0, num_warps=4)
    kernel.name, kernel.kernel, kernel.metadata_group, kernel.hash = "kernel", b"", {}, ""
    return kernel


def test_threads_load_each_its_own_launcher(driver):
    assert [compiled_kernel(n).run() for n in (1, 2)] == [1, 2]
    driver.together = threading.Barrier(2)
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(lambda n: compiled_kernel(n).run(), (1, 2))) == [1, 2]


def test_a_kernel_that_failed_to_load_is_loaded_again(driver, monkeypatch):
    def fails(*_):
        raise RuntimeError("out of memory")

    kernel = compiled_kernel(1)
    with monkeypatch.context() as full:
        full.setattr(driver, "load_binary", fails)
        with pytest.raises(RuntimeError, match="memory"):
            _ = kernel.run
    assert kernel.run() == 1
    assert kernel.function == 2
