"""What is kept between calls of a shape is bounded, and holds no tensor. Launches need a GPU:
tests/attention/test_flash_hopper.py."""

import gc
import weakref

import torch

from longctx.kernels import relaunch
from longctx.kernels.relaunch import MOST_ADDRESSES, TensorMaps


class Descriptor:
    def __init__(self, base):
        self.base, self.shape = base, [3, 5]


def of_tensor(x):
    return relaunch._mapped(0, Descriptor(x))


def made(descriptor):
    return [descriptor.base.data_ptr(), *descriptor.shape]


def test_a_map_is_made_once_for_an_address_and_holds_no_tensor():
    calls = []
    x = torch.zeros(3, 5)
    alive = weakref.ref(x)
    maps = TensorMaps(of_tensor(x), lambda d: calls.append(1) or made(d))
    assert [maps[64], maps[128], maps[64]] == [(64, 3, 5), (128, 3, 5), (64, 3, 5)]
    assert len(calls) == 2
    del x
    gc.collect()
    assert alive() is None


def test_maps_of_one_argument_and_of_all_are_bounded(monkeypatch):
    monkeypatch.setattr(relaunch, "MOST_MAPS", 3 * MOST_ADDRESSES)
    every = [TensorMaps(of_tensor(torch.zeros(1)), made) for _ in range(20)]
    most = 0
    for address in range(0, 16 * MOST_ADDRESSES, 16):
        for maps in every:
            assert maps[address] == (address, 3, 5)
            assert len(maps) <= MOST_ADDRESSES
        most = max(most, sum(map(len, every)))
    assert MOST_ADDRESSES < most <= 3 * MOST_ADDRESSES + 1024
