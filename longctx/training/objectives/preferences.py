"""The objectives of preferences: DPO, ORPO and SimPO of pairs, KTO of labelled answers.

    DPO    -log σ(β (log p(w) - log q(w) - log p(l) + log q(l)))                   arXiv 2305.18290
    ORPO   -log p(w) / |w| - β log σ(log odds(w) - log odds(l))                    arXiv 2403.07691
    SimPO  -log σ(β (log p(w) / |w| - log p(l) / |l|) - γ)                         arXiv 2405.14734
    KTO    weight · (1 - σ(β (r - z))) if desirable, else weight · (1 - σ(β (z - r)))
                                                                                   arXiv 2402.01306

w is the chosen answer, l the rejected one, |w| its tokens, q the reference. In odds = p / (1 - p),
log p is a mean over tokens. As in ORPO's paper its first term is that of the answer alone; TRL's is
over the prompt too. r = log p(y) - log q(y), and z, without gradient, is the mean of r over
unrelated answers of the micro-batches of all ranks, or 0 if that is more.

The loss of a step is the mean over its pairs or labelled answers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from longctx.data.preferences import CHOSEN, REJECTED, UNRELATED
from longctx.training.objectives.answers import (
    AnswerBatch,
    Answers,
    answers,
    reference_of,
    share_of,
    summed,
)

if TYPE_CHECKING:
    from longctx.model import GPT

Result = tuple[Tensor, Tensor]


def dpo(model: GPT, batch: AnswerBatch, keys: Any) -> Result:
    """Return the loss of the pairs in `batch`, and the sums and counts of its figures."""
    reference, policy = reference_of(model, batch), answers(model, batch)
    rewards = keys.beta * (policy.logp - reference)
    return total(model, batch, policy, rewards, -F.logsigmoid(margin(rewards)))


def orpo(model: GPT, batch: AnswerBatch, keys: Any) -> Result:
    """Return the loss of the pairs in `batch`, and the sums and counts of its figures."""
    policy = answers(model, batch)
    # Without an answer any log-probability below 0 keeps the odds finite
    mean = policy.mean.masked_fill(policy.tokens == 0, -1.0)
    odds = mean - torch.log(-torch.expm1(mean))
    losses = -mean[..., CHOSEN] - keys.beta * F.logsigmoid(margin(odds))
    return total(model, batch, policy, keys.beta * mean, losses)


def simpo(model: GPT, batch: AnswerBatch, keys: Any) -> Result:
    """Return the loss of the pairs in `batch`, and the sums and counts of its figures."""
    policy = answers(model, batch)
    rewards = keys.beta * policy.mean
    return total(model, batch, policy, rewards, -F.logsigmoid(margin(rewards) - keys.gamma))


def margin(x: Tensor) -> Tensor:
    """Return by how much x of the chosen answers is above that of the rejected ones."""
    return x[..., CHOSEN] - x[..., REJECTED]


def total(
    model: GPT, batch: AnswerBatch, policy: Answers, rewards: Tensor, losses: Tensor
) -> Result:
    """Return the sum of `losses` (B, documents) over the pairs, weighed, and the figures."""
    present = policy.tokens[..., CHOSEN] > 0
    figures = summed(
        present,
        rewards[..., CHOSEN],
        rewards[..., REJECTED],
        margin(rewards),
        (margin(rewards) > 0).double(),
        policy.logp[..., CHOSEN],
        policy.logp[..., REJECTED],
    )
    return losses.masked_fill(~present, 0).sum() * share_of(model, batch), figures


def kto(model: GPT, batch: AnswerBatch, keys: Any) -> Result:
    """Return the loss of the answers in `batch`, and the sums and counts of its figures."""
    reference, policy = reference_of(model, batch), answers(model, batch)
    ratio = policy.logp - reference
    good, bad, others = (policy.tokens[..., side] > 0 for side in (CHOSEN, REJECTED, UNRELATED))
    away = mean_of_ranks(ratio[..., UNRELATED].detach().masked_fill(~others, 0).sum(), others.sum())
    losses = [
        keys.desirable_weight * torch.sigmoid(keys.beta * (away - ratio[..., CHOSEN])),
        keys.undesirable_weight * torch.sigmoid(keys.beta * (ratio[..., REJECTED] - away)),
    ]
    loss = sum(
        x.masked_fill(~present, 0).sum() for x, present in zip(losses, (good, bad), strict=True)
    )
    rewards = keys.beta * ratio
    figures = [
        summed(good, rewards[..., CHOSEN], policy.logp[..., CHOSEN]),
        summed(bad, rewards[..., REJECTED], policy.logp[..., REJECTED]),
        summed(others, away.expand(others.shape)),
    ]
    return loss * share_of(model, batch), torch.cat(figures, dim=1)


def mean_of_ranks(total: Tensor, count: Tensor) -> Tensor:
    """Return the mean over all ranks, 0 if it is below."""
    sums = torch.stack([total, count.to(total)])
    if dist.is_initialized():
        dist.all_reduce(sums)
    return (sums[0] / sums[1].clamp(min=1)).clamp(min=0)
