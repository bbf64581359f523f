"""Log-probabilities of whole answers, from which preference objectives are made.

Each answer is a document of its own in a sequence, so masks, packing and shared sequences hold as
for any other. log p of an answer is the sum over its tokens, in fp32; no logits of a whole sequence
exist. Ranks that share a sequence all compute the same loss, each a share of it.

B sequences, S = SIDES · documents of the fullest one: slot SIDES · n + side is side `side` of
document n.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from longctx.data.preferences import SIDES
from longctx.data.rows import IGNORED
from longctx.model import lora
from longctx.training.batches import NO_WINDOW, MicroBatch, Windows, micro_batch

if TYPE_CHECKING:
    from longctx.model import GPT


class AnswerBatch(MicroBatch):
    """Sequences of answers. `scored` counts documents: pairs, or labelled answers."""

    def __init__(self, batch: MicroBatch, slots: int, reference: Tensor | None) -> None:
        vars(self).update(vars(batch))
        self.slots = slots  # S
        self.reference = reference  # (B, S) float32, log p by the reference

    def each(self, function: Callable[[Tensor], Tensor]) -> AnswerBatch:
        moved = super().each(function)
        assert isinstance(moved, AnswerBatch)
        moved.reference = None if self.reference is None else function(self.reference)
        return moved


def collate(sequences: Sequence[Mapping[str, Tensor]], windows: Windows = NO_WINDOW) -> AnswerBatch:
    """Stack sequences of answers, with what the reference says of them."""
    batch = micro_batch(sequences, windows)
    counts = [len(sequence["documents"]) for sequence in sequences]
    reference = None
    if "reference" in sequences[0]:
        reference = torch.zeros(len(sequences), max(counts), SIDES)
        for row, sequence in enumerate(sequences):
            reference[row, : counts[row]] = sequence["reference"]
        reference = reference.flatten(1)
    batch.scored = sum(counts)
    batch.weight = 1.0 / torch.tensor(float(max(batch.scored, 1)))
    return AnswerBatch(batch, SIDES * max(counts), reference)


class Answers(NamedTuple):
    """Sums over the answers of a batch, (B, documents, SIDES) each; 0 where there is none."""

    logp: Tensor
    tokens: Tensor

    @property
    def mean(self) -> Tensor:
        """Return log p of a token of each answer."""
        return self.logp / self.tokens.clamp(min=1)


def answers(model: GPT, batch: AnswerBatch) -> Answers:
    """Return log p and the number of tokens of each answer."""
    losses = model(batch.tokens, batch.targets, batch.mask, reduction="none")
    assert batch.mask.doc_ids is not None
    # Padding has larger numbers than answers; what they share is dropped
    B, S = len(losses), batch.slots
    slots = (
        batch.mask.doc_ids.clamp(max=S) + (S + 1) * torch.arange(B, device=losses.device)[:, None]
    )
    empty = losses.new_zeros(B * (S + 1))
    sums = empty.index_add(0, slots.flatten(), -losses.flatten())
    counts = empty.index_add(0, slots.flatten(), (batch.targets != IGNORED).to(losses).flatten())
    logp, tokens = (x.view(B, S + 1)[:, :S].unflatten(1, (-1, SIDES)) for x in (sums, counts))
    return Answers(logp, tokens)


def reference_of(model: GPT, batch: AnswerBatch) -> Tensor:
    """Return log p of each answer by the reference, (B, documents, SIDES)."""
    if batch.reference is not None:
        return batch.reference.unflatten(1, (-1, SIDES))
    with torch.no_grad(), lora.off(model):
        return answers(model, batch).logp


def share_of(model: GPT, batch: MicroBatch) -> Tensor:
    """Return the weight of a document in the loss of this rank, which may share sequences."""
    return batch.weight / model.context.ranks.count


def summed(present: Tensor, *figures: Tensor) -> Tensor:
    """Return the (2, figures) sums and counts of each over the documents that are `present`."""
    sums = [x.detach().double().masked_fill(~present, 0).sum() for x in figures]
    return torch.stack([torch.stack(sums), present.sum().double().expand(len(sums))])
