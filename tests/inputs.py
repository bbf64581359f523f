"""Random tensors on the GPU, where there is one, and results against a formula in fp64."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def inputs(*shape: int, seed: int = 0) -> Tensor:
    """Normally distributed numbers, the same ones for a seed."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def check_decoding(decoder: Any, texts: Tensor, starts: Sequence[int], steps: int) -> None:
    """Check the logits of `texts` (rows, T), decoded from `starts` on, against whole forwards."""
    rows, ends = torch.arange(len(texts)), torch.tensor(starts)
    logits = [decoder.prefill([x[:n].tolist() for x, n in zip(texts, starts, strict=True)]).clone()]
    logits += [decoder.step(texts[rows, ends + n]).clone() for n in range(steps)]
    wanted = decoder.model(texts)
    for n, found in enumerate(logits):
        torch.testing.assert_close(found, wanted[rows, ends + n - 1], rtol=1e-4, atol=1e-4)


def assert_formula(
    actual: Sequence[Tensor],
    expected: Sequence[Tensor],
    leaves: Sequence[Tensor],
    exact: Sequence[Tensor],
    **close: float,
) -> None:
    """Check `actual` and its gradients by `leaves` against `expected` and `exact`, in fp64."""
    dys = [inputs(*x.shape, seed=9 + n).to(x.dtype) for n, x in enumerate(actual)]
    grads = torch.autograd.grad(actual, leaves, dys, allow_unused=True)
    wanted = torch.autograd.grad(expected, exact, [dy.double() for dy in dys], allow_unused=True)
    for found, want in zip([*actual, *grads], [*expected, *wanted], strict=True):
        assert (found is None) == (want is None)
        if found is not None:
            torch.testing.assert_close(found.double(), want, **close)
