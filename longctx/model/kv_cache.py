"""Keys and values of the tokens so far, which every later token attends to.

One buffer per layer, as long as its rows may become from the beginning: nothing is ever moved, and
a CUDA graph that writes to it stays valid. Row b holds its tokens 0 .. lengths[b] - 1; what lies
behind them is never read.
"""

from __future__ import annotations

import torch
from torch import Tensor

from longctx.config.model_config import GPTConfig


class KVCache:
    """Room for `length` tokens in each of `rows` rows, for every layer of the model of `config`."""

    def __init__(
        self,
        config: GPTConfig,
        rows: int,
        length: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        self.rows, self.length = rows, length
        shape = (rows, length, config.kv_heads, config.head_size)
        # zeros: naive multiplies what is not seen by 0
        self.keys = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(config.layers)]
        self.values = [torch.zeros_like(k) for k in self.keys]
        self.lengths = torch.zeros(rows, dtype=torch.int64, device=device)
        self.starts = length * torch.arange(rows, device=device)  # of the rows, in slots

    @staticmethod
    def bytes_of(config: GPTConfig, rows: int, length: int, dtype: torch.dtype) -> int:
        """The memory that such a cache takes."""
        elements = sum(2 * block.attention.key_size for block in config.blocks())
        return rows * length * elements * dtype.itemsize

    def write(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """Write k, v (N, Hkv, D) of `layer` to `slots` (N,): row · length + place in the row."""
        self.keys[layer].flatten(0, 1).index_copy_(0, slots, k)
        self.values[layer].flatten(0, 1).index_copy_(0, slots, v)
