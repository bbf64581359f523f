"""Tensors of Hugging Face folders that have their rows in another order than ours."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from longctx.spec.parts import Fold


@dataclass(frozen=True)
class Interleaved(Fold):
    """The folder's rotary pairs are channels 2i and 2i + 1, as in GLM-4; here they are half a head
    apart. Only the channels of each head from `first` on, `rotated` of them, are paired.
    """

    head_size: int
    rotated: int
    first: int = 0

    def load(self, tensor: Any) -> Any:
        return self._paired(tensor, (-1, 2))

    def save(self, rows: Any) -> Any:
        return self._paired(rows, (2, -1))

    def _paired(self, rows: Any, pairs: tuple[int, int]) -> Any:
        moved = rows.clone()
        heads = moved.unflatten(0, (-1, self.head_size)).narrow(1, self.first, self.rotated)
        heads.copy_(heads.unflatten(1, pairs).transpose(1, 2).flatten(1, 2))
        return moved


class OfHeads(Fold):
    """The folder has a number of each head in the shape (1, 1, heads, 1)."""

    def rows(self, shape: tuple[int, ...]) -> int:
        return shape[2]

    def load(self, tensor: Any) -> Any:
        return tensor.flatten()

    def save(self, rows: Any) -> Any:
        return rows.view(1, 1, -1, 1)


@dataclass(frozen=True)
class Share(Fold):
    """A tensor of the folder stacks rows of several of ours, head by head: `sizes` rows of each.
    This one's are those of number `index`.
    """

    sizes: Sequence[int]
    index: int

    def rows(self, shape: tuple[int, ...]) -> int:
        return shape[0] // sum(self.sizes) * self.sizes[self.index]

    def load(self, tensor: Any) -> Any:
        heads = tensor.unflatten(0, (-1, sum(self.sizes)))
        return heads.split(self.sizes, dim=1)[self.index].flatten(0, 1)

    def save(self, rows: Any) -> Any:
        """Return (heads, rows of each, ...), which `family_folder.joined` puts between others."""
        return rows.unflatten(0, (-1, self.sizes[self.index]))


@dataclass(frozen=True)
class Stacked(Fold):
    """The folder has one tensor for all experts: (experts, rows, columns), or biases (experts,
    rows). `turned`: it is transposed. `paired`: rows of gate are 0, 2, 4, ..., those of up between.
    """

    count: int
    turned: bool
    paired: bool

    def shape(self, ours: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the tensor, of that of our parameter."""
        rows, *columns = ours
        each = rows // self.count
        return (self.count, *columns, each) if self.turned else (self.count, each, *columns)

    def rows(self, shape: tuple[int, ...]) -> int:
        return self.count * shape[-1 if self.turned else 1]

    def load(self, tensor: Any) -> Any:
        return self._sorted(self._turned(tensor), (-1, 2)).flatten(0, 1)

    def save(self, rows: Any) -> Any:
        return self._turned(self._sorted(rows.unflatten(0, (self.count, -1)), (2, -1))).contiguous()

    def _sorted(self, rows: Any, pairs: tuple[int, int]) -> Any:
        """Return (experts, rows, ...) with the halves or `pairs` of rows told apart."""
        return rows.unflatten(1, pairs).transpose(1, 2).flatten(1, 2) if self.paired else rows

    def _turned(self, tensor: Any) -> Any:
        return tensor.mT if self.turned and tensor.ndim == 3 else tensor
