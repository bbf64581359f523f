"""The objectives of preferences: DPO, ORPO and SimPO of pairs, KTO of labelled answers.

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

answers.py has log p of the answers, and reference.py that of the reference. Both import torch, so
the losses import them when they are computed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from longctx.config.doors import OBJECTIVES, Objective, ObjectiveConfig
from longctx.config.fields import key

if TYPE_CHECKING:
    from longctx.model import GPT
    from longctx.training.objectives.answers import AnswerBatch, Result

OF_PAIRS = (
    *("rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies"),
    *("logps/chosen", "logps/rejected"),
)
OF_LABELS = ("rewards/chosen", "logps/chosen", "rewards/rejected", "logps/rejected", "kl")


def collate(*arguments: Any) -> AnswerBatch:
    """Stack sequences of answers."""
    from longctx.training.objectives import answers

    return answers.collate(*arguments)


def prepare(*arguments: Any) -> dict[str, Any]:
    """Give the data of a run the log-probabilities of its reference."""
    from longctx.training.objectives import reference

    return reference.prepare(*arguments)


def dpo(model: GPT, batch: AnswerBatch, keys: Any) -> Result:
    """Return the loss of the pairs in `batch`, and the sums and counts of its figures."""
    from longctx.training.objectives import answers

    reference, policy = answers.reference_of(model, batch), answers.answers(model, batch)
    rewards = keys.beta * (policy.logp - reference)
    losses = -answers.logsigmoid(answers.margin(rewards))
    return answers.of_pairs(model, batch, policy, rewards, policy.logp, losses)


def orpo(model: GPT, batch: AnswerBatch, keys: Any) -> Result:
    """Return the loss of the pairs in `batch`, and the sums and counts of its figures."""
    from longctx.training.objectives import answers

    policy = answers.answers(model, batch)
    # Without an answer any log-probability below 0 keeps the odds finite
    mean = policy.mean.masked_fill(policy.tokens == 0, -1.0)
    # So does one for an answer that is certain
    below = mean.clamp(max=-1e-6)
    odds = below - (-below.expm1()).log()
    losses = -mean[..., answers.CHOSEN] - keys.beta * answers.logsigmoid(answers.margin(odds))
    return answers.of_pairs(model, batch, policy, keys.beta * mean, mean, losses)


def simpo(model: GPT, batch: AnswerBatch, keys: Any) -> Result:
    """Return the loss of the pairs in `batch`, and the sums and counts of its figures."""
    from longctx.training.objectives import answers

    policy = answers.answers(model, batch)
    rewards = keys.beta * policy.mean
    losses = -answers.logsigmoid(answers.margin(rewards) - keys.gamma)
    return answers.of_pairs(model, batch, policy, rewards, policy.mean, losses)


def kto(model: GPT, batch: AnswerBatch, keys: Any) -> Result:
    """Return the loss of the answers in `batch`, and the sums and counts of its figures."""
    from longctx.training.objectives import answers

    reference, policy = answers.reference_of(model, batch), answers.answers(model, batch)
    ratio = policy.logp - reference
    away = answers.distance(policy, ratio)
    good = keys.desirable_weight * (keys.beta * (away - ratio[..., answers.CHOSEN])).sigmoid()
    bad = keys.undesirable_weight * (keys.beta * (ratio[..., answers.REJECTED] - away)).sigmoid()
    return answers.of_labels(model, batch, policy, keys.beta * ratio, away, (good, bad))


@dataclass
class OrpoKeys(ObjectiveConfig):
    """The keys of ORPO."""

    beta: float = key(0.1, "how steep rewards are; of simpo 2", above=0)


@dataclass
class SimpoKeys(ObjectiveConfig):
    """The keys of SimPO."""

    beta: float = key(2.0, "how steep rewards are", above=0)
    gamma: float = key(
        1.0, "margin that a reward of the chosen answer should have", between=(0, 99)
    )


@dataclass
class DpoKeys(OrpoKeys):
    """The keys of DPO."""

    reference: str | None = key(
        None,
        "log-probabilities of the model that training began with: step: with LoRA off in each "
        "step | cached: once for all answers | null: step with LoRA, else cached",
        choices=("step", "cached"),
    )


@dataclass
class KtoKeys(DpoKeys):
    """The keys of KTO."""

    desirable_weight: float = key(1.0, "weight of desirable answers", between=(0, 99))
    undesirable_weight: float = key(1.0, "weight of undesirable answers", between=(0, 99))


def register(
    name: str, loss: Callable[..., Result], data: str, keys: type[ObjectiveConfig]
) -> None:
    """Register an objective of `data`, pairs or labels, with its own `keys`."""
    figures = OF_PAIRS if data == "pairs" else OF_LABELS
    begin = prepare if issubclass(keys, DpoKeys) else None
    OBJECTIVES.register(
        name,
        Objective(
            loss,
            None,
            collate=collate,
            figures=figures,
            keys=keys,
            data=data,
            prepare=begin,
            rate=0.05,
        ),
    )


register("dpo", dpo, "pairs", DpoKeys)
register("orpo", orpo, "pairs", OrpoKeys)
register("simpo", simpo, "pairs", SimpoKeys)
register("kto", kto, "labels", KtoKeys)
