"""Launches: configs for every request, and what is kept between calls of a shape."""

import gc
import json
import weakref
from unittest.mock import MagicMock

import pytest
import torch

from longctx.cli import main
from longctx.kernels.attention import HEAD_SIZES
from longctx.kernels.attention import launch as configs
from longctx.kernels.attention.launch import launch_config, table
from longctx.kernels.attention.portable import ROW
from longctx.kernels.attention.relaunch import Relaunch

TILES = [2**n for n in range(4, 20)]


@pytest.mark.parametrize("arch", list(table()))
@pytest.mark.parametrize("kernel", ["forward", "dkv", "dq"])
def test_every_request_has_an_entry(arch, kernel, monkeypatch):
    monkeypatch.setattr(configs, "architecture", lambda device, itemsize: arch)
    for head_dim in HEAD_SIZES:
        for length in (1, 100, 4096, 8191, 8192, 1 << 20):
            launch = launch_config(kernel, torch.empty(1, 1, 1, head_dim), length)
            assert launch.BM in TILES and launch.BN in TILES
            # lse and delta are padded to ROW, and read without a mask
            assert launch.BM <= ROW.value
            assert launch.warps in (4, 8)
            assert 1 <= launch.stages <= 5


def test_show_is_json(capsys):
    assert main(["kernels", "show", "head_size=32"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["kernel"] in ("torch-tiled", "triton-portable")
    assert report["launch"].keys() in (set(), configs.PORTABLE.keys())
    assert len(report["fingerprint"]["dq"]) == 64


@pytest.mark.gpu
@pytest.mark.hopper
def test_show_has_the_configs_of_hoppers_kernels(capsys):
    assert main(["kernels", "show", "head_size=128"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["launch"].keys() == configs.HOPPER.keys()


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
