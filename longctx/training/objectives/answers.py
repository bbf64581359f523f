"""The losses of preferences, from log-probabilities of answers.

    DPO    -log σ(β (log p(w) - log q(w) - log p(l) + log q(l)))                   arXiv 2305.18290
    ORPO   -log p(w) / |w| - β log σ(log odds(w) - log odds(l))                    arXiv 2403.07691
    SimPO  -log σ(β (log p(w) / |w| - log p(l) / |l|) - γ)                         arXiv 2405.14734
    KTO    weight · (1 - σ(β (r - z))) if desirable, else weight · (1 - σ(β (z - r)))
                                                                                   arXiv 2402.01306

w is the chosen answer, l the rejected one, |w| its tokens, q the reference. In odds = p / (1 - p),
log p is a mean over tokens. r = log p(y) - log q(y), and z, without gradient, is the mean of r over
unrelated answers of the micro-batches of all ranks, or 0 if that is more.

The loss of a step is the mean over its pairs or labelled answers. So is ORPO's first term, the
cross entropy of the answer, as in its paper. TRL's is the mean over all tokens of prompts and
answers.

Each answer is a document of its own in a sequence, so masks, packing and shared sequences hold as
for any other. Its log p is the sum over its tokens, in fp32. No logits of a whole sequence exist.
Ranks that share a sequence all compute the same loss, each a share of it.

B sequences, S = SIDES · documents of the fullest one: slot SIDES · n + side is side `side` of
document n.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import logsigmoid
from torch.nn.utils.rnn import pad_sequence

from longctx.data.preferences import CHOSEN, REJECTED, SIDES, UNRELATED
from longctx.data.sequences import IGNORED
from longctx.model import GPT, lora
from longctx.training.batches import NO_WINDOW, MicroBatch, Windows, micro_batch

Result = tuple[Tensor, Tensor]  # the loss; sums and counts of the figures


class AnswerBatch(MicroBatch):
    """Sequences of answers. `scored` counts documents: pairs, or labelled answers."""

    def __init__(self, batch: MicroBatch, slots: int, reference: Tensor | None) -> None:
        vars(self).update(vars(batch))
        self.slots = slots  # S
        self.reference = reference  # (B, S) float32, log p by the reference


def collate(sequences: Sequence[Mapping[str, Tensor]], windows: Windows = NO_WINDOW) -> AnswerBatch:
    """Stack sequences of answers, with the reference's log p of them."""
    batch = micro_batch(sequences, windows)
    counts = [len(sequence["documents"]) for sequence in sequences]
    reference = None
    if "reference" in sequences[0]:
        reference = pad_sequence([x["reference"] for x in sequences], batch_first=True).flatten(1)
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
    first = (S + 1) * torch.arange(B, device=losses.device)[:, None]
    slots = batch.mask.doc_ids.clamp(max=S) + first
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


def dpo(model: GPT, batch: AnswerBatch, keys: Any) -> Result:
    """Return the loss of the pairs in `batch`, and the sums and counts of its figures."""
    reference, policy = reference_of(model, batch), answers(model, batch)
    rewards = keys.beta * (policy.logp - reference)
    return of_pairs(model, batch, policy, rewards, policy.logp, -logsigmoid(margin(rewards)))


def orpo(model: GPT, batch: AnswerBatch, keys: Any) -> Result:
    """Return the loss of the pairs in `batch`, and the sums and counts of its figures."""
    policy = answers(model, batch)
    # Without an answer any log-probability below 0 keeps the odds finite
    mean = policy.mean.masked_fill(policy.tokens == 0, -1.0)
    # So does one for an answer that is certain
    below = mean.clamp(max=-1e-6)
    odds = below - (-below.expm1()).log()
    losses = -mean[..., CHOSEN] - keys.beta * logsigmoid(margin(odds))
    return of_pairs(model, batch, policy, keys.beta * mean, mean, losses)


def simpo(model: GPT, batch: AnswerBatch, keys: Any) -> Result:
    """Return the loss of the pairs in `batch`, and the sums and counts of its figures."""
    policy = answers(model, batch)
    rewards = keys.beta * policy.mean
    losses = -logsigmoid(margin(rewards) - keys.gamma)
    return of_pairs(model, batch, policy, rewards, policy.mean, losses)


def of_pairs(
    model: GPT, batch: AnswerBatch, policy: LogP, rewards: Tensor, logp: Tensor, losses: Tensor
) -> Result:
    """Return the sum of `losses` (B, documents) over the pairs, weighed, and the figures."""
    present = policy.tokens[..., CHOSEN] > 0
    sides = [x[..., side] for x in (rewards, logp) for side in (CHOSEN, REJECTED)]
    margins = margin(rewards)
    figures = summed(present, *sides[:2], margins, (margins > 0).double(), *sides[2:])
    # A part of it, if ranks share the sequences
    share = batch.weight / model.context.ranks.count
    return losses.masked_fill(~present, 0).sum() * share, figures


def kto(model: GPT, batch: AnswerBatch, keys: Any) -> Result:
    """Return the loss of labelled answers in `batch`, and the sums and counts of its figures."""
    reference, policy = reference_of(model, batch), answers(model, batch)
    ratio = policy.logp - reference
    good, bad, others = (policy.tokens[..., side] > 0 for side in (CHOSEN, REJECTED, UNRELATED))
    # Over all ranks
    total = ratio[..., UNRELATED].detach().masked_fill(~others, 0).sum()
    sums = torch.stack([total, others.sum().to(total)])
    if dist.is_initialized():
        dist.all_reduce(sums)
    away = (sums[0] / sums[1].clamp(min=1)).clamp(min=0)
    of_good = keys.desirable_weight * (keys.beta * (away - ratio[..., CHOSEN])).sigmoid()
    of_bad = keys.undesirable_weight * (keys.beta * (ratio[..., REJECTED] - away)).sigmoid()
    loss = of_good.masked_fill(~good, 0).sum() + of_bad.masked_fill(~bad, 0).sum()
    figures = [
        summed(present, keys.beta * ratio[..., side], policy.logp[..., side])
        for present, side in ((good, CHOSEN), (bad, REJECTED))
    ]
    figures.append(summed(others, away.expand(others.shape)))
    share = batch.weight / model.context.ranks.count
    return loss * share, torch.cat(figures, dim=1)


def summed(present: Tensor, *figures: Tensor) -> Tensor:
    """Return the (2, figures) sums and counts of each over the documents that are `present`."""
    sums = [x.detach().double().masked_fill(~present, 0).sum() for x in figures]
    return torch.stack([torch.stack(sums), present.sum().double().expand(len(sums))])
