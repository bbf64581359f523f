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

The loss of a step is the mean over its pairs or labelled answers. Each answer is a document of its
own in a sequence, so masks, packing and shared sequences hold as for any other. Its log p is the
sum over its tokens, in fp32. No logits of a whole sequence exist. Ranks that share a sequence all
compute the same loss, each a share of it.

B sequences, S = SIDES · documents of the fullest one: slot SIDES · n + side is side `side` of
document n.

The reference's log-probabilities of all answers are computed once: no second model is kept. They
are cached beside the tokens by a fingerprint of model, weights and data, and a run that finds them
computes its first sequences again to compare. The run's folder has a copy, so resuming needs
neither the cache nor the weights of init=.
"""

from __future__ import annotations

import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from longctx import files, untrusted
from longctx.data import Data
from longctx.data.cache import cached, contents, fingerprint, is_whole
from longctx.data.dataset import SPLITS, SourcePart
from longctx.data.preferences import CHOSEN, REJECTED, SIDES, UNRELATED
from longctx.data.sequences import IGNORED
from longctx.data.store import progress
from longctx.model import huggingface, lora
from longctx.parallel.mesh import Parallel
from longctx.training.batches import NO_WINDOW, MicroBatch, Windows, dealt, micro_batch
from longctx.training.run import Run
from longctx.training.validation import scoring

if TYPE_CHECKING:
    from longctx.model import GPT

Result = tuple[Tensor, Tensor]
COPY = "reference.npz"  # in the run's folder
TABLE = "log_p.npy"  # in the cache
LARGEST = 0.05  # nats of an answer's token by which cached values may differ


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
    # So does one for an answer that is certain
    below = mean.clamp(max=-1e-6)
    odds = below - torch.log(-torch.expm1(below))
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


def prepare(run: Run, data: Data, module: Any, parallel: Parallel) -> None:
    """Give every part of `data` its log-probabilities by the model as it is now, with LoRA's
    additions still zero; a resumed run reads its copy.

    Raises ValueError, on every rank, if cached ones are not those of the model.
    """
    if not run.caches_reference:
        return
    copy = run.folder / COPY
    if run.checkpoint is not None:
        # The folder is the run's own, but a file may be lost or cut
        problem = "cannot be read ({}); copy it from elsewhere, or begin a new run"
        lost = OSError, ValueError, KeyError, zipfile.BadZipFile
        with untrusted.named(copy, problem, lost), np.load(copy) as arrays:
            for name, part in data.parts.items():
                part.reference = arrays[name or "data"]
        return
    reference = described(run)
    for part in data.parts.values():
        key = fingerprint([part.fingerprint, part.seq_len, reference])
        folder = part.config.cache_folder() / "references" / key
        # Rank 0 reads the cache for all: other machines may have none, or another one
        is_cached = parallel.is_first and is_whole(folder)
        table, *_ = parallel.all_gather_objects(np.load(folder / TABLE) if is_cached else None)
        if table is not None:
            compare(run, part, folder, table, module, parallel)
        else:
            table = computed(run, part, module, parallel)
            if parallel.is_first:
                cached(folder, lambda at, table=table: np.save(at / TABLE, table))  # type: ignore[misc]
        part.reference = table
    if parallel.is_first:
        tables: dict[str, Any] = {
            name or "data": part.reference for name, part in data.parts.items()
        }
        with files.atomic(copy) as file, file.open("wb") as opened:
            np.savez(opened, **tables)


def described(run: Run) -> list[Any]:
    """Return the values that decide the reference's log-probabilities of an answer."""
    workload = run.workload
    return [
        contents(huggingface.with_weights(run.config.init or "", "init")),
        # The same weights compute otherwise with rope=, or with an edited config.json
        asdict(workload.model),
        workload.lora.base,
        workload.precision,
        workload.bf16_layers,
    ]


def computed(run: Run, part: SourcePart, module: Any, parallel: Parallel) -> np.ndarray:
    """Return log p of all answers of `part`, (documents, SIDES) float32, the same on every rank."""
    table = torch.zeros(len(part.store), SIDES, dtype=torch.float64, device=parallel.device)
    seen = 0
    shown = progress("log-probabilities of the reference", len(part.store))
    with shown if parallel.is_first else nullcontext() as show:
        for split in SPLITS:
            for documents, policy, is_new in log_ps(run, part, split, module, parallel):
                if is_new:
                    table[documents] += parallel.counted_once(1) * policy.logp.double()
                seen += len(documents) * parallel.data_ranks
                if show is not None:
                    show(min(seen, len(part.store)), 0)
    return parallel.all_reduce_sum(table).float().cpu().numpy()


def log_ps(
    run: Run, part: SourcePart, split: str, module: Any, parallel: Parallel
) -> Iterator[tuple[Tensor, Answers, bool]]:
    """Yield documents (n,) and their answers (n, SIDES) of this rank's sequences, and True if they
    are new, see `dealt`.
    """
    rows = part.sequences(split)
    for numbers, is_new in dealt(len(rows), run.workload.batch_size, parallel):
        sequences = [rows[number] for number in numbers]
        batch = collate(sequences, NO_WINDOW).to(parallel.device)
        with scoring(module, parallel):
            policy = answers(module.model, batch)  # type: ignore[arg-type]
        counts = [len(sequence["documents"]) for sequence in sequences]
        filled = [
            torch.cat([row[:count] for row, count in zip(sums, counts, strict=True)])
            for sums in policy
        ]
        documents = torch.cat([sequence["documents"] for sequence in sequences])
        yield documents.to(parallel.device), Answers(*filled), is_new


def compare(
    run: Run, part: SourcePart, folder: Path, table: np.ndarray, module: Any, parallel: Parallel
) -> None:
    """Raise ValueError, on every rank, if the first values of the cached `table` are not those of
    the model.
    """
    documents, policy, _ = next(log_ps(run, part, "train", module, parallel))
    cached_log_p = torch.from_numpy(table).to(parallel.device)[documents]
    # Of all answers together: in bf16 a single token may differ by more
    off = (cached_log_p - policy.logp).abs().sum() / policy.tokens.sum()
    differs = f"{folder}: not the log-probabilities of this model by {off:.2g} nats a token"
    problem = parallel.first_problem(None if off < LARGEST else differs)
    if problem is not None:
        raise ValueError(f"{problem}; remove it")
