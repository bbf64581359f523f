"""Tensors of random numbers on the GPU, where there is one."""

import torch
from torch import Tensor

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def inputs(*shape: int, seed: int = 0) -> Tensor:
    """Normally distributed numbers, the same ones for a seed."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)
