"""Log-probabilities of answers, from which the objectives of preferences are made.

Each answer is a document of its own in a sequence, so masks, packing and shared sequences hold as
for any other. Its log p is the sum over its tokens, in fp32. No logits of a whole sequence exist.
Ranks that share a sequence all compute the same loss, each a share of it.

B sequences, S = SIDES · documents of the fullest one: slot SIDES · n + side is side `side` of
document n.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import logsigmoid as logsigmoid

from longctx.data.preferences import CHOSEN, REJECTED, SIDES, UNRELATED
from longctx.data.sequences import IGNORED
from longctx.model import lora
from longctx.training.batches import NO_WINDOW, MicroBatch, Windows, micro_batch

if TYPE_CHECKING:
    from longctx.model import GPT

Result = tuple[Tensor, Tensor]


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
    """Stack sequences of answers, with the reference's log p of them."""
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


class LogP(NamedTuple):
    """Sums over the answers of a batch, (B, documents, SIDES) each; 0 for a missing answer."""

    logp: Tensor
    tokens: Tensor

    @property
    def mean(self) -> Tensor:
        """Return log p of a token of each answer."""
        return self.logp / self.tokens.clamp(min=1)


def answers(model: GPT, batch: AnswerBatch) -> LogP:
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
    return LogP(logp, tokens)


def reference_of(model: GPT, batch: AnswerBatch) -> Tensor:
    """Return log p of each answer by the reference, (B, documents, SIDES)."""
    if batch.reference is not None:
        return batch.reference.unflatten(1, (-1, SIDES))
    with torch.no_grad(), lora.off(model):
        return answers(model, batch).logp


def margin(x: Tensor) -> Tensor:
    """Return by how much x of the chosen answers is above that of the rejected ones."""
    return x[..., CHOSEN] - x[..., REJECTED]


def distance(policy: LogP, ratio: Tensor) -> Tensor:
    """Return the mean of log p/q of unrelated answers over all ranks, 0 if it is below."""
    present = policy.tokens[..., UNRELATED] > 0
    total = ratio[..., UNRELATED].detach().masked_fill(~present, 0).sum()
    sums = torch.stack([total, present.sum().to(total)])
    if dist.is_initialized():
        dist.all_reduce(sums)
    return (sums[0] / sums[1].clamp(min=1)).clamp(min=0)


def of_pairs(
    model: GPT, batch: AnswerBatch, policy: LogP, rewards: Tensor, logp: Tensor, losses: Tensor
) -> Result:
    """Return the sum of `losses` (B, documents) over the pairs, weighed, and the figures."""
    present = policy.tokens[..., CHOSEN] > 0
    figures = summed(
        present,
        rewards[..., CHOSEN],
        rewards[..., REJECTED],
        margin(rewards),
        (margin(rewards) > 0).double(),
        logp[..., CHOSEN],
        logp[..., REJECTED],
    )
    return losses.masked_fill(~present, 0).sum() * share_of(model, batch), figures


def of_labels(
    model: GPT,
    batch: AnswerBatch,
    policy: LogP,
    rewards: Tensor,
    away: Tensor,
    losses: tuple[Tensor, Tensor],
) -> Result:
    """Return the sum of the `losses` (B, documents) of desirable and of undesirable answers,
    weighed, and the figures.
    """
    good, bad, others = (policy.tokens[..., side] > 0 for side in (CHOSEN, REJECTED, UNRELATED))
    loss = sum(
        x.masked_fill(~present, 0).sum() for x, present in zip(losses, (good, bad), strict=True)
    )
    figures = [
        summed(good, rewards[..., CHOSEN], policy.logp[..., CHOSEN]),
        summed(bad, rewards[..., REJECTED], policy.logp[..., REJECTED]),
        summed(others, away.expand(others.shape)),
    ]
    return loss * share_of(model, batch), torch.cat(figures, dim=1)


def share_of(model: GPT, batch: MicroBatch) -> Tensor:
    """Return the weight of a document in the loss of this rank, which may share sequences."""
    return batch.weight / model.context.ranks.count


def summed(present: Tensor, *figures: Tensor) -> Tensor:
    """Return the (2, figures) sums and counts of each over the documents that are `present`."""
    sums = [x.detach().double().masked_fill(~present, 0).sum() for x in figures]
    return torch.stack([torch.stack(sums), present.sum().double().expand(len(sums))])
