"""Muon: the matrices of the blocks move by the orthogonalized momentum of their gradients.

For each matrix W of r rows and c columns with gradient G (Jordan et al. 2024,
https://kellerjordan.github.io/posts/muon/):

    M = M + (1 - μ)(G - M)              momentum
    O = NS((1 - μ) G + μ M)             Nesterov's look ahead, orthogonalized
    W = (1 - lr · decay) W - lr · 0.2 · sqrt(max(r, c)) · O

NS is the Newton-Schulz iteration: singular vectors stay, singular values come near 1. The factor
0.2 · sqrt(max(r, c)) gives the update the size of AdamW's, so that lr and weight_decay carry over
(Liu et al., "Muon is Scalable for LLM Training", arXiv 2502.16982, section 2.2). Embedding,
lm_head, norms and biases are AdamW's, with the same lr.

torch.optim.Muon computes the same for one whole parameter, and has no AdamW for the others. Here q,
k and v are stacked in one weight, gate and up in another, and each is a matrix of its own. Matrices
of one shape are orthogonalized together: the 84 of 124m are a few large products, not a thousand
small ones.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from longctx.model import GPT
from longctx.parallel.sharding import full, like, local, rows
from longctx.spec.step import STACK
from longctx.training.optimizers.adamw import AdamW, fetched, groups
from longctx.training.run import Run

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of Newton-Schulz, from Jordan's post
EPS = 1e-7  # the least norm that a matrix is divided by
SCALE = 0.2  # root mean square of AdamW's updates, arXiv 2502.16982


def build(model: GPT, run: Run) -> Muon:
    """Return Muon over the matrices in `model.blocks`, AdamW over all other weights of `model`."""
    parts = block_matrices(model)
    others = [p for p in model.parameters() if p.requires_grad and p not in parts]
    return Muon(parts, groups(others, run.config.weight_decay), run)


def block_matrices(model: GPT) -> dict[Tensor, tuple[int, ...]]:
    """Return each trained weight of a linear layer in the blocks → the rows of its matrices."""
    linears = {
        block.get_submodule(path).weight: linear.rows
        for block, parts in zip(model.blocks, model.config.blocks, strict=True)
        for path, linear in parts.linears.items()
    }
    return {weight: rows for weight, rows in linears.items() if weight.requires_grad}


class Matrix(NamedTuple):
    """One matrix of a block, (r, c): rows of a weight, of its gradient and of its momentum."""

    weight: Tensor
    gradient: Tensor
    momentum: Tensor  # as it is stored between steps


class Muon(AdamW):
    """Muon for `parts`, weight → rows of each of its matrices, and AdamW for `others`, groups.

    State is stored as in AdamW; all arithmetic but Newton-Schulz is fp32.
    """

    def __init__(
        self, parts: dict[Tensor, tuple[int, ...]], others: list[dict[str, Any]], run: Run
    ) -> None:
        matrices = {"params": list(parts), "weight_decay": run.config.weight_decay}
        super().__init__([matrices, *others], run)
        keys: Any = run.workload.optimizer  # MuonKeys
        self.parts, self.momentum, self.iterations = parts, keys.momentum, keys.iterations

    def state_names(self, p: Tensor) -> tuple[str, ...]:
        """Return the names of the states of p."""
        return ("step", "momentum") if p in self.parts else super().state_names(p)

    def _update_group(self, group: dict[str, Any]) -> None:
        weights = [p for p in group["params"] if p in self.parts and p.grad is not None]
        if not weights:
            return super()._update_group(group)
        lr, decay = group["lr"], group["weight_decay"]
        if isinstance(weights[0], DTensor):
            for p in weights:
                self._update_slice(p, lr, decay)
            return None
        for batch in batches(self._matrices(weights)):
            self._update_batch(batch, lr, decay)

    def _update_batch(self, batch: list[Matrix], lr: float, decay: float) -> None:
        """Update the weights of `batch`; its memory is free again for the next batch."""
        moved = [matrix.weight for matrix in batch]
        updates = orthogonalized(self._stack(batch), self.iterations)
        along = [u.mT if is_tall(w) else u for u, w in zip(updates, moved, strict=True)]
        torch._foreach_mul_(moved, 1 - lr * decay)
        torch._foreach_add_(moved, along, alpha=-lr * SCALE * math.sqrt(max(moved[0].shape)))

    def _update_slice(self, p: DTensor, lr: float, decay: float) -> None:
        """Update this rank's rows of p; every rank orthogonalizes the gathered matrices."""
        weight = local(p)
        assert p.grad is not None
        matrix = Matrix(weight, local(p.grad), self.state[p]["momentum"])
        # Rows of a matrix depend on all others: a rank cannot orthogonalize its own alone
        update = full(like(p, self._directions([matrix])[0].bfloat16()))
        for part in update.split(self.parts[p]):
            upright = part.mT if is_tall(part) else part
            upright.copy_(orthogonalized(upright[None], self.iterations)[0])
            upright.mul_(math.sqrt(max(part.shape)))
        update = update[rows(p)]
        weight.mul_(1 - lr * decay).add_(update, alpha=-lr * SCALE)

    def _matrices(self, weights: Iterable[Tensor]) -> Iterator[Matrix]:
        """Yield every matrix in `weights` with its stored momentum."""
        for p in weights:
            assert p.grad is not None
            splits = (x.split(self.parts[p]) for x in (p, p.grad, self.state[p]["momentum"]))
            yield from map(Matrix._make, zip(*splits, strict=True))

    def _stack(self, batch: list[Matrix]) -> Tensor:
        """Update the momentum; return the directions to orthogonalize, (n, r, c) bf16, r <= c."""
        weight = batch[0].weight
        shape = len(batch), *sorted(weight.shape)
        stack = torch.empty(shape, dtype=torch.bfloat16, device=weight.device)
        for x, direction in zip(stack, self._directions(batch), strict=True):
            (x.mT if is_tall(direction) else x).copy_(direction)
        return stack

    def _directions(self, batch: list[Matrix]) -> list[Tensor]:
        """Update the momentum of `batch`; return the directions to orthogonalize."""
        gradients = [matrix.gradient for matrix in batch]
        stored = [matrix.momentum for matrix in batch]
        if self.factor is not None:
            torch._foreach_mul_(gradients, self.factor)
        with fetched(stored, gradients[0].device, torch.float32) as momenta:
            torch._foreach_lerp_(momenta, gradients, 1 - self.momentum)
            return list(torch._foreach_lerp(gradients, momenta, self.momentum))


def is_tall(matrix: Tensor) -> bool:
    """Return True if `matrix` has more rows than columns: Newton-Schulz takes its transpose."""
    return matrix.shape[0] > matrix.shape[1]


def batches(matrices: Iterable[Matrix]) -> Iterator[list[Matrix]]:
    """Yield `matrices` by shape, a transpose with its like, at most STACK weights at a time."""
    by_shape: dict[tuple[int, ...], list[Matrix]] = {}
    for matrix in matrices:
        by_shape.setdefault(tuple(sorted(matrix.weight.shape)), []).append(matrix)
    for (r, c), alike in by_shape.items():
        together = max(1, STACK // (r * c))
        for start in range(0, len(alike), together):
            yield alike[start : start + together]


def orthogonalized(x: Tensor, iterations: int) -> Tensor:
    """Return x (n, r, c), r <= c, with all singular values of each matrix near 1, in its dtype."""
    # X = X / |X|, then X = a X + (b A + c A²) X with A = X Xᵀ: an odd polynomial of the singular
    # values, steep at 0. They end between about 0.7 and 1.2, not at 1, which serves as well
    # (Jordan).
    a, b, c = COEFFICIENTS
    norm = torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True, dtype=torch.float32)
    x = x / norm.clamp(min=EPS).to(x.dtype)
    for _ in range(iterations):
        gram = torch.bmm(x, x.mT)
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, polynomial, x, beta=a)
    return x
