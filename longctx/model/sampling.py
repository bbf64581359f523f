"""How the next token is chosen from the logits: the likeliest one, or by chance.

The rules and their order are those of transformers: temperature, then top-k, then top-p (nucleus
sampling, arXiv 1904.09751). The chance of a text comes from the seed and its number alone: it is
continued in the same way whatever texts are beside it.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch
from torch import Tensor


class Sampler:
    """Chooses tokens for the texts of these `numbers`; with a `temperature` of 0 the likeliest.

    top_k: only the k likeliest tokens. top_p: only the fewest whose probabilities reach that sum.
    """

    def __init__(
        self,
        numbers: Sequence[int],
        temperature: float,
        top_k: int | None = None,
        top_p: float | None = None,
        seed: int = 1,
    ) -> None:
        self.temperature, self.top_k, self.top_p = temperature, top_k, top_p
        self.random = [random.Random(f"sample {seed} {number}") for number in numbers]

    def __call__(self, logits: Tensor) -> Tensor:
        """Tokens (rows,) int64 of logits (rows, V)."""
        if self.temperature == 0:
            return logits.argmax(-1)
        # 24 bits, which no product with a sum in fp64 rounds up to that sum
        chance = [row.getrandbits(24) / 2**24 for row in self.random]
        sums = self.probabilities(logits).double().cumsum(-1)
        at = torch.tensor(chance, dtype=torch.float64).to(logits.device)[:, None] * sums[:, -1:]
        chosen = torch.searchsorted(sums, at, right=True)[:, 0]
        return chosen.clamp(max=logits.shape[-1] - 1)  # of logits that are no numbers

    def probabilities(self, logits: Tensor) -> Tensor:
        """(rows, V) fp32; 0 for what top_k and top_p leave out."""
        logits = logits.float()
        logits = (logits - logits.amax(-1, keepdim=True)) / self.temperature  # 0 at most: no inf
        if self.top_k is not None:
            least = logits.topk(min(self.top_k, logits.shape[-1])).values[:, -1:]
            logits = logits.masked_fill(logits < least, float("-inf"))
        p = logits.softmax(-1)
        if self.top_p is not None and self.top_p < 1:
            ordered, order = p.sort(dim=-1, descending=True)
            beyond = ordered.cumsum(-1) - ordered >= self.top_p  # those before it suffice
            p = torch.zeros_like(p).scatter_(-1, order, ordered.masked_fill(beyond, 0.0))
            p = p / p.sum(-1, keepdim=True)
        return p
