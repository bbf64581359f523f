"""Validation inside training: the loss of unseen sequences, in all and by position."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from longctx.data import Data
from longctx.data.sequences import IGNORED
from longctx.parallel.mesh import Parallel
from longctx.runs.metrics import BY_POSITION
from longctx.training.batches import MicroBatch, validation_batches
from longctx.training.cuda_graphs import ForwardGraph
from longctx.training.positions import Filled, mean_losses, packed_buckets
from longctx.training.run import Run
from longctx.training.throughput import means

BUCKETS = 32  # sequences are shorter than 2^32 tokens


def validate(module: nn.Module, data: Data, run: Run, parallel: Parallel) -> dict[str, float]:
    """Return loss, its standard error, perplexity and loss by position over `val_rows` sequences;
    {} if they have no target.
    """
    if run.config.objective.traits.figures:
        return validated_by_loss(module, data, run, parallel)
    # Sums over the ranks travel together: nats of each (full buckets of the piece, bucket); of all
    # targets, and their number; pieces by full buckets; `sequence_sums`
    # In fp64, so that the number of ranks does not show in the sums
    sizes = [BUCKETS * BUCKETS, 2, BUCKETS, 4]
    sums = torch.zeros(sum(sizes), dtype=torch.float64, device=parallel.device)
    nats, totals, pieces, of_sequences = sums.split(sizes)
    # Small batches wait for the host unless their kernels are launched as a graph
    losses_of: Callable[[MicroBatch], Tensor] = partial(
        validation_losses, module, parallel=parallel
    )
    if run.workload.captured:
        losses_of = ForwardGraph(losses_of)
    for micro in validation_batches(run, data, parallel):
        losses = losses_of(micro.to(parallel.device)).double().flatten()
        if not micro.scored:
            continue
        cells, positions, full = cells_of_targets(micro)
        nats.index_add_(0, cells.to(parallel.device), losses[positions.to(parallel.device)])
        pieces += torch.bincount(full, minlength=BUCKETS).to(pieces)
        totals[0] += losses.sum()
        totals[1] += micro.scored
        of_sequences += sequence_sums(losses.view(micro.targets.shape), micro.targets)
    # Each target is scored once over all ranks
    parallel.all_reduce_sum(sums.mul_(parallel.counted_once(1)))
    total, scored = totals.tolist()
    if not scored:
        return {}
    loss = total / scored
    row = run.config.objective.traits.metrics(loss)
    error = standard_error(of_sequences.tolist(), loss, scored)
    row |= {} if error is None else {"val_loss_error": error}
    return row | by_position(nats.view(BUCKETS, BUCKETS).tolist(), pieces.tolist())


def validated_by_loss(module: Any, data: Data, run: Run, parallel: Parallel) -> dict[str, float]:
    """Return the mean loss of an objective with figures, and those; {} if nothing is scored."""
    objective = run.config.objective.traits
    size = 2 + 2 * len(objective.figures)  # loss, how many are scored, sums, counts
    sums = torch.zeros(size, dtype=torch.float64, device=parallel.device)
    with scoring(module, parallel):
        for micro in validation_batches(run, data, parallel):
            micro.weight = torch.ones(())
            loss, figures = module.loss(micro.to(parallel.device))
            sums[0] += loss * module.model.context.ranks.count
            sums[1] += micro.scored
            sums[2:] += figures.flatten()
    total, scored, *figures = parallel.all_reduce_sum(sums.mul_(parallel.counted_once(1))).tolist()
    if not scored:
        return {}
    averages = means(objective.figures, figures)
    return objective.metrics(total / scored) | {
        f"val_{key}": mean for key, mean in averages.items()
    }


def validation_losses(module: Any, micro: MicroBatch, parallel: Parallel) -> Tensor:
    """Return the (B, T) loss of each target, 0 if not scored."""
    with scoring(module, parallel):
        losses: Tensor = module.validation_step(micro)
    return losses


@contextmanager
def in_eval_mode(model: nn.Module) -> Iterator[None]:
    """Put `model` in eval mode inside the block."""
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)


@contextmanager
def scoring(module: nn.Module, parallel: Parallel) -> Iterator[None]:
    """Compute without gradients inside, in eval mode and in the precision of the run.

    Nothing is compiled: torch.compile would compile everything a second time.
    """
    with (
        in_eval_mode(module),
        torch.no_grad(),
        parallel.autocast(),
        torch.compiler.set_stance("force_eager"),
    ):
        yield


def sequence_sums(losses: Tensor, targets: Tensor) -> Tensor:
    """Return the (4,) sums of a², ab, b² and 1 over sequences with a nats and b targets each;
    losses and targets are (B, T).
    """
    nats = losses.sum(dim=1)
    scored = (targets != IGNORED).sum(dim=1).to(nats)
    return torch.stack([nats**2, nats * scored, scored**2, (scored > 0).to(nats)]).sum(dim=1)


def standard_error(sums: Sequence[float], loss: float, scored: float) -> float | None:
    """Return the standard error of `loss`, the mean over `scored` targets, from `sequence_sums`;
    None for one sequence.

    It equals `positions.error_of_ratio`, but from sums that ranks can add.
    """
    squares, products, of_targets, sequences = sums
    if sequences < 2:
        return None
    variance = max(0.0, squares - 2 * loss * products + loss**2 * of_targets)
    return math.sqrt(sequences / (sequences - 1) * variance) / scored


def cells_of_targets(micro: MicroBatch) -> tuple[Tensor, Tensor, Tensor]:
    """Return, for each target in a bucket that its piece fills, its cell (full buckets of the piece
    · BUCKETS + bucket) and its position in the flattened batch; and the full buckets per piece.
    """
    assert micro.mask.offsets is not None
    scored = (micro.targets.numpy() != IGNORED).reshape(-1)
    position, bucket, of_piece, full = packed_buckets(micro.mask.offsets.numpy(), scored)
    cells = of_piece * BUCKETS + bucket
    return torch.from_numpy(cells), torch.from_numpy(position), torch.from_numpy(full)


def by_position(nats: list[list[float]], pieces: list[float]) -> dict[str, float]:
    """Return the mean loss per bucket of the pieces that fill all of them: pieces[n] of them fill n
    buckets and have nats[n][b] in bucket b.
    """
    groups = (Filled(pieces[n], nats[n][:n]) for n in range(1, BUCKETS))
    return {f"{BY_POSITION}/{row['first']}": row["loss"] for row in mean_losses(groups)}
