"""Rotary position embedding (arXiv 2104.09864), half-split as in Hugging Face: channel d turns with channel d + D/2.

No table bound to a maximum length: cos and sin are computed once per forward from the positions themselves. The angle,
an integer times a 24-bit frequency, is formed in fp64, where the product is exact; in fp32 it would be off by 0.03 rad
at position 1,000,000.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Rope(nn.Module):
    """cos and sin for every token, from its position in its document."""

    def __init__(self, head_dim: int, theta: float) -> None:
        super().__init__()
        exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu") / head_dim
        self.frequencies = 1.0 / theta**exponents  # (D/2,), no buffer: a model cast to bf16 keeps it in fp32

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """positions (B, T) → cos, sin (B, T, 1, D/2) in fp32."""
        if self.frequencies.device != positions.device:
            self.frequencies = self.frequencies.to(positions.device)
        angles = positions[..., None, None].double() * self.frequencies.double()
        return angles.cos().float(), angles.sin().float()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each head of x (B, T, H, D) by its token's angles, in fp32 or x's own precision if that is higher."""
    x1, x2 = x.chunk(2, dim=-1)
    return torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), dim=-1).to(x.dtype)
