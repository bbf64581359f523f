"""Validation inside training: the loss of unseen rows, in all and by the number of tokens before
each.

Bucket b holds the targets with 2^b .. 2^(b+1) - 1 tokens of their piece before them. All buckets
are those of the same pieces, the ones that reach to the end of the last bucket, or far buckets
would be of other texts than near ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from longctx.config.train_config import CompleteConfig
from longctx.data import Data, Mixture
from longctx.data.rows import IGNORED
from longctx.evaluation.passkey import check_texts, filler_of, recall
from longctx.evaluation.windows import Document
from longctx.runs.metrics import BY_POSITION, FACTS_FOUND
from longctx.training.batches import MicroBatch, StepBatch, validation_batches
from longctx.training.module import TrainingModule

DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
T = TypeVar("T")
FEWEST = 8  # pieces that the longest bucket should have
MOST = 32  # buckets; rows are shorter than 2^32 tokens


def validate(
    module: TrainingModule, data: Data | Mixture, config: CompleteConfig
) -> dict[str, float]:
    """Loss, perplexity and loss by position over `val_rows` rows, each scored token once over all
    ranks; empty where none is.

    Without torch.compile, which would compile everything a second time for it.
    """
    rank, ranks = module.trainer.global_rank, module.trainer.world_size
    # Nats of every (full buckets of the piece, bucket), then those of all tokens, their number, and
    # pieces by full buckets.
    sums = torch.zeros(MOST * MOST + 2 + MOST, dtype=torch.float64, device=module.device)
    nats, totals, pieces = (
        sums[: MOST * MOST],
        sums[MOST * MOST : MOST * MOST + 2],
        sums[MOST * MOST + 2 :],
    )
    module.eval()
    for micro in validation_batches(data.val, config.val_rows, config.batch_size, rank, ranks):
        place, kept, full = places(micro)
        moved = StepBatch([micro]).to(module.device).micro[0]
        losses = _eager(module.validation_losses, moved).double().flatten()
        nats.index_add_(0, place.to(module.device), losses[kept.to(module.device)])
        pieces += torch.bincount(full, minlength=MOST).to(pieces)
        totals[0] += losses.sum()
        totals[1] += micro.scored
    module.train()
    if ranks > 1:
        dist.all_reduce(sums)
    total, scored = totals.tolist()
    if not scored:
        return {}
    loss = total / scored
    row = {"val_loss": loss, "val_perplexity": math.exp(min(loss, 700.0))}
    return row | by_position(nats.view(MOST, MOST).tolist(), pieces.tolist())


def facts_found(
    module: TrainingModule, data: Data | Mixture, config: CompleteConfig
) -> dict[str, float]:
    """The share of hidden facts that the model finds, for each kind and length; every rank asks for
    all of them.
    """
    asked, lengths = config.passkey, config.passkey.lengths or [config.seq_len]
    filler = _filler(data, lengths)
    dtype = torch.bfloat16 if config.precision == "bf16" else None
    depths = asked.depths or DEPTHS
    cells = _eager(
        recall,
        module.model,
        data.tokenizer,
        filler,
        lengths,
        depths,
        asked.samples,
        asked.kinds,
        dtype,
    )
    groups = {(cell.kind, cell.length): 0 for cell in cells}
    for cell in cells:
        groups[cell.kind, cell.length] += cell.right
    return {
        f"{FACTS_FOUND}/{kind}/{n}": right / (len(depths) * asked.samples)
        for (kind, n), right in groups.items()
    }


def check_facts(data: Data | Mixture, config: CompleteConfig) -> None:
    """ValueError where passkey=true and no such texts can be made of the documents of `data`."""
    if config.passkey.enabled:
        lengths = config.passkey.lengths or [config.seq_len]
        check_texts(data.tokenizer, _filler(data, lengths), lengths, config.passkey.kinds)


def check_validation(
    data: Data | Mixture, config: CompleteConfig, words: Mapping[str, str]
) -> None:
    """ValueError for one of the `words` about validations where there is nothing to validate on."""
    for key in ("val_every", "val_rows", "passkey.enabled"):
        if words.get(key, "null").lower() not in ("null", "false") and not len(data.val):
            share = config.data.val_fraction
            raise ValueError(
                f"{key}={words[key]}: no document is left to validate on, data.val_fraction={share}; raise it"
            )


def _filler(data: Data | Mixture, lengths: list[int]) -> np.ndarray:
    unseen = (
        Document(*document)
        for document in data.documents("val" if len(data.split["val"]) else "train")
    )
    return filler_of(unseen, data.tokenizer, 4 * max(lengths))


def places(micro: MicroBatch) -> tuple[Tensor, Tensor, Tensor]:
    """For each target in a bucket that its piece fills: full buckets of its piece · MOST + bucket,
    and its place (n,) in the flattened batch; and per piece the number of buckets that it fills.
    """
    assert micro.mask.offsets is not None
    offsets = micro.mask.offsets.numpy().astype(np.int64)
    starts, lengths = offsets[:-1], np.diff(offsets)
    scored = (micro.targets.numpy() != IGNORED).reshape(-1)
    ends = np.where(
        scored, len(scored), np.arange(len(scored))
    )  # of what is scored without a gap from the beginning
    run = np.minimum(np.minimum.reduceat(ends, starts), offsets[1:]) - starts
    full = _exponent(
        run + 1
    )  # of a piece with n targets: log2(n + 1); in conversations the first target is none
    bucket = _exponent(np.arange(len(scored)) - np.repeat(starts, lengths) + 1)
    of_piece = np.repeat(full, lengths)
    kept = np.flatnonzero(scored & (bucket < of_piece))
    place = of_piece[kept] * MOST + bucket[kept]
    return torch.from_numpy(place), torch.from_numpy(kept), torch.from_numpy(full)


def by_position(nats: list[list[float]], pieces: list[float]) -> dict[str, float]:
    """Mean loss per bucket over the pieces that fill as many buckets as `FEWEST` do (of fewer, as
    any does).
    """
    reach = [sum(pieces[n:]) for n in range(MOST)]  # pieces that fill n buckets or more
    enough = FEWEST if reach[1] >= FEWEST else 1
    longest = max((n for n in range(1, MOST) if reach[n] >= enough), default=0)
    return {
        f"{BY_POSITION}/{2**b}": math.fsum(row[b] for row in nats[longest:])
        / (reach[longest] * 2**b)
        for b in range(longest)
    }


def _exponent(counts: Any) -> Any:
    """floor(log2) of whole numbers from 1 up."""
    return np.frexp(counts.astype(np.float64))[1] - 1


def _eager(function: Callable[..., T], *args: Any) -> T:
    with torch.compiler.set_stance("force_eager"):
        return function(*args)
