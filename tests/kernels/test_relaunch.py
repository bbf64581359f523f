"""What is kept between calls of a shape holds no tensor. Launches need a GPU:
tests/attention/test_flash_hopper.py."""

import gc
import weakref

import torch

from longctx.kernels.attention.relaunch import Relaunch


class Descriptor:
    def __init__(self, base):
        self.base, self.shape = base, [3, 5]


class Compiled:
    """A compiled kernel that notes its launches."""

    def __init__(self):
        self.launched = []

    def __getitem__(self, grid):
        return lambda *arguments, stream: self.launched.append((grid, stream, arguments))


def test_a_relaunch_takes_addresses_and_holds_no_tensor():
    x, compiled = torch.zeros(3, 5), Compiled()
    alive = weakref.ref(x)
    again = Relaunch(compiled, 7, [Descriptor(x), None], (2.0,))
    del x
    gc.collect()
    assert alive() is None
    again(1, (64,), 128)
    [(grid, stream, (descriptor, *rest))] = compiled.launched
    assert (grid, stream, rest) == ((7, 1, 1), 1, [None, 128, 2.0])
    assert (descriptor.base.data_ptr(), descriptor.shape) == (64, [3, 5])
