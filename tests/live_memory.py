"""The memory that some code holds at one time."""

import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveMemory(TorchDispatchMode):
    """Records in `peak` the most bytes that new tensors hold at one time, also on meta."""

    def __init__(self) -> None:
        super().__init__()
        self.peak, self.held = 0, dict[int, int]()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        inputs = {x.untyped_storage()._cdata for x in tensors((args, kwargs))}
        out = func(*args, **(kwargs or {}))
        for storage in (x.untyped_storage() for x in tensors(out)):
            if storage._cdata not in inputs | self.held.keys():
                self.held[storage._cdata] = storage.nbytes()
                weakref.finalize(storage, self.held.pop, storage._cdata)
        self.peak = max(self.peak, sum(self.held.values()))
        return out


def tensors(tree: object) -> list[torch.Tensor]:
    return [x for x in tree_leaves(tree) if isinstance(x, torch.Tensor)]
