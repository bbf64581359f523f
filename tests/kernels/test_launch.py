"""Launches: configs for every request, and what is kept between calls of a shape."""

import gc
import weakref
from typing import NamedTuple
from unittest.mock import MagicMock

import pytest
import torch
import triton
from triton.backends.nvidia import driver

from benchmarks import tune
from longctx import kernels
from longctx.kernels.attention import IMPLEMENTATIONS
from longctx.kernels.attention import launch as configs
from longctx.kernels.attention.launch import Launch, launch_config, measured, measured_file, table
from longctx.kernels.attention.portable import ROW
from longctx.kernels.attention.relaunch import Relaunch, _mapped

TILES = [2**n for n in range(4, 20)]


@pytest.mark.parametrize("arch", list(table()))
@pytest.mark.parametrize("kernel", ["forward", "dkv", "dq"])
def test_every_request_has_an_entry(arch, kernel, monkeypatch):
    monkeypatch.setattr(configs, "architecture", lambda device, itemsize: arch)
    for head_dim in IMPLEMENTATIONS["triton-portable"].head_sizes:
        for length in (1, 100, 4096, 8191, 8192, 1 << 20):
            launch = launch_config(kernel, torch.empty(1, 1, 1, head_dim), length)
            assert launch.BM in TILES and launch.BN in TILES
            # lse and delta are padded to ROW, and read without a mask
            assert launch.BM <= ROW.value
            assert launch.warps in (4, 8)
            assert 1 <= launch.stages <= 5


class Descriptor:
    def __init__(self, base):
        self.base, self.shape = base, [3, 5]


def test_a_relaunch_takes_addresses_and_holds_no_tensor():
    x, compiled = torch.zeros(3, 5), MagicMock()
    alive = weakref.ref(x)
    again = Relaunch(compiled, 7, [Descriptor(x), None], (2.0,))
    del x
    gc.collect()
    assert alive() is None
    again(1, (64,), 128)
    compiled.__getitem__.assert_called_once_with((7, 1, 1))
    (descriptor, *rest), options = compiled.__getitem__.return_value.call_args
    assert (rest, options) == ([None, 128, 2.0], {"stream": 1})
    assert (descriptor.base.data_ptr(), descriptor.shape) == (64, [3, 5])


def test_the_c_function_gets_what_triton_gives_it(monkeypatch):
    monkeypatch.setattr(
        driver, "make_tensordesc_arg", lambda x, meta: [(x.base.data_ptr(), meta), *x.shape]
    )
    run, launch = object.__new__(driver.CudaLauncher), MagicMock()
    run.launch = driver.wrap_handle_tensordesc(launch, {0: "tensordesc<>", 1: "i64"}, ["map"])
    run.launch_cooperative_grid = run.launch_pdl = False
    run.global_scratch_size = run.profile_scratch_size = 0
    run.global_scratch_align = run.profile_scratch_align = 1
    run.arg_annotations, run.kernel_signature = ["annotation"], b"signature"
    compiled = MagicMock(run=run, metadata=MagicMock(tensordesc_meta=["map"]))
    again = Relaunch(compiled, 7, [Descriptor(torch.zeros(3, 5)), None], (2.0,))
    head = 7, 1, 1, 5, compiled.function, compiled.packed_metadata, None, None, None
    for address in (64, 128, 64):
        again(5, (address,), 3)
        run(*head, _mapped(address, again.likes[0]), None, 3, 2.0)
        ours, triton_s = launch.call_args_list[-2:]
        assert ours == triton_s
    # a profiler sees launches
    monkeypatch.setattr(triton.knobs.runtime.launch_enter_hook, "calls", [print])
    Relaunch(compiled, 7, [], ())(5, (), 3)
    compiled.__getitem__.return_value.assert_called_once_with(3, stream=5)


# Tables that were measured


class Query(NamedTuple):
    """A tensor that the table takes for one of the GPU "Test"."""

    shape: tuple = (1, 100, 2, 64)
    device: torch.device = torch.device("cpu")
    is_cuda: bool = True

    def element_size(self):
        return 2


@pytest.fixture
def path(monkeypatch, tmp_path):
    """Return the file of measured tables, those of the GPU "Test"."""
    monkeypatch.setattr(configs, "_name", lambda _: "Test")
    monkeypatch.setenv("LONGCTX_LAUNCH", str(tmp_path / "launch.json"))
    measured.cache_clear()
    configs.configure.cache_clear()
    yield tmp_path / "launch.json"
    measured.cache_clear()
    configs.configure.cache_clear()


def test_training_reads_what_tune_has_written(path):
    rows = {}
    fastest = {1024: [64, 32, 4, 3], 4096: [64, 32, 4, 3], 16384: [128, 32, 8, 2]}
    for length, config in fastest.items():
        tune.add(rows, length, list(fastest), config)
    assert rows == {"0": [64, 32, 4, 3], "8192": [128, 32, 8, 2]}
    before = {"Other": {"dq": {}}, "Test": {"measured": {}, "dq": {"64": {"0": [64, 32, 4, 1]}}}}
    tune.write(path, before, "Test", {"forward": {"64": rows}}, {"date": "2026-01-01"})
    assert tune.read(path)["Other"] == {"dq": {}}
    assert tune.read(path)["Test"]["measured"] == {"date": "2026-01-01"}
    q = Query()
    assert launch_config("forward", q, 5000) == Launch(64, 32, 4, 3)
    assert launch_config("forward", q, 8192) == Launch(128, 32, 8, 2)
    assert configs.longest_bucket(["forward"], q, 9000) == 8192
    assert launch_config("dq", q, 5000) == Launch(64, 32, 4, 1)
    shipped = table()
    assert launch_config("dkv", q, 100) == Launch(*shipped["any"]["dkv"]["64"]["0"])
    unmeasured = torch.zeros(1, 8, 1, 64)  # fp32
    expected = Launch(*shipped["any-fp32"]["forward"]["64"]["0"])
    assert launch_config("forward", unmeasured, 100) == expected


def test_a_hopper_module_gets_its_config_once(path):
    module = type(configs)("module")
    module.CONFIGS = {64: Launch(64, 128, 4, 2), 128: Launch(64, 64, 4, 2)}
    tune.write(path, {}, "Test", {"hopper_forward": {"64": {"0": [64, 128, 8, 3]}}}, {})
    configs.configure(module, "hopper_forward", torch.device("cpu"))
    assert module.CONFIGS == {64: Launch(64, 128, 8, 3), 128: Launch(64, 64, 4, 2)}


def test_tables_are_looked_up_by_environment(monkeypatch, tmp_path, path):
    monkeypatch.setenv("LONGCTX_LAUNCH", "")
    assert measured_file() is None
    assert measured("Test") == {}
    monkeypatch.delenv("LONGCTX_LAUNCH")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert measured_file() == tmp_path / ".config" / "longctx" / "launch.json"
    measured.cache_clear()
    assert measured("Test") == {}, "that one need not be there"
    measured.cache_clear()
    monkeypatch.setenv("LONGCTX_LAUNCH", str(path))
    with pytest.raises(FileNotFoundError):
        launch_config("forward", Query(), 100)


@pytest.mark.parametrize(("triton", "warns"), [("3.6.0", 0), ("3.7.1", 0), ("3.10.0", 1)])
def test_a_triton_that_has_not_run_is_one_line(triton, warns, monkeypatch, capsys):
    monkeypatch.setattr(kernels, "version", lambda name: triton)
    monkeypatch.setattr(kernels, "HAS_TRITON", True)
    kernels.warn_of_triton.cache_clear()
    for _ in range(2):
        kernels.warn_of_triton()
    assert capsys.readouterr().err.count(triton) == warns
