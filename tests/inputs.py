"""Tensors of random numbers on the GPU, where there is one, and gradients against those in fp64."""

from collections.abc import Sequence

import torch
from torch import Tensor

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def inputs(*shape: int, seed: int = 0) -> Tensor:
    """Normally distributed numbers, the same ones for a seed."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def assert_gradients(
    actual: Tensor,
    expected: Tensor,
    leaves: Sequence[Tensor],
    exact: Sequence[Tensor],
    **close: float,
) -> None:
    """Check that gradients of `actual` by `leaves` are those of `expected` by `exact`, in fp64."""
    dy = inputs(*actual.shape, seed=9).to(actual.dtype)
    grads = torch.autograd.grad(actual, leaves, dy)
    wanted = torch.autograd.grad(expected, exact, dy.double())
    for leaf, grad, want in zip(leaves, grads, wanted, strict=True):
        assert grad.dtype == leaf.dtype
        torch.testing.assert_close(grad.double(), want, **close)
