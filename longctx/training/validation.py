"""Validation inside training: the loss of unseen sequences, in all and by position."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain, pairwise
from typing import Any

import torch
from torch import nn

from longctx.data import Data
from longctx.data.sequences import IGNORED
from longctx.parallel.mesh import Parallel
from longctx.runs.metrics import BY_POSITION
from longctx.training.batches import validation_batches
from longctx.training.cuda_graphs import ForwardGraph
from longctx.training.positions import LossByPosition, error_of_ratio
from longctx.training.run import Run
from longctx.training.throughput import means


def validate(module: nn.Module, data: Data, run: Run, parallel: Parallel) -> dict[str, float]:
    """Return loss, its standard error, perplexity and loss by position over `val_rows` sequences;
    {} if they have no target.
    """
    objective = run.config.objective.traits
    if objective.figures:
        return validated_by_loss(module, data, run, parallel)
    # In fp64, so that the number of ranks does not show in the sums
    totals = torch.zeros(2, dtype=torch.float64, device=parallel.device)  # nats, targets
    positions, sequences = LossByPosition(), list[tuple[float, float]]()
    # Small batches wait for the host unless their kernels are launched as a graph
    step: Any = module.validation_step
    losses_of = ForwardGraph(step) if run.workload.captured else step
    for micro in validation_batches(run, data, parallel):
        with scoring(module, parallel):
            losses = losses_of(micro.to(parallel.device)).double()
        if not micro.scored:
            continue
        totals[0] += losses.sum()
        totals[1] += micro.scored
        nats, is_target = losses.cpu().numpy(), micro.targets.numpy() != IGNORED
        sequences += zip(nats.sum(axis=1).tolist(), is_target.sum(axis=1).tolist(), strict=True)
        assert micro.mask.offsets is not None
        for first, last in pairwise(micro.mask.offsets.tolist()):
            positions.add(nats.reshape(-1)[first:last], is_target.reshape(-1)[first:last])
    # Each target is scored once over all ranks
    sums = torch.cat([totals, torch.from_numpy(positions.sums).to(totals).flatten()])
    sums = parallel.all_reduce_sum(sums * parallel.counted_once(1))
    total, scored = sums[:2].tolist()
    if not scored:
        return {}
    row = objective.metrics(total / scored)
    mine = [pair for pair in sequences if pair[1]] * parallel.counted_once(1)
    error = error_of_ratio(list(chain(*parallel.all_gather_objects(mine))))
    if not math.isnan(error):
        row["val_loss_error"] = error
    positions.sums = sums[2:].view(positions.sums.shape).cpu().numpy()
    return row | {f"{BY_POSITION}/{row['first']}": row["loss"] for row in positions.rows()}


def validated_by_loss(module: Any, data: Data, run: Run, parallel: Parallel) -> dict[str, float]:
    """Return the mean loss of an objective with figures, and those; {} if nothing is scored."""
    objective = run.config.objective.traits
    size = 2 + 2 * len(objective.figures)  # loss, how many are scored, sums, counts
    sums = torch.zeros(size, dtype=torch.float64, device=parallel.device)
    with scoring(module, parallel):
        for micro in validation_batches(run, data, parallel):
            micro.weight = torch.ones(())
            loss = module.training_step(micro.to(parallel.device))
            sums[0] += loss * module.model.context.ranks.count
            sums[1] += micro.scored
            sums[2:] += module.taken_figures().flatten()
    total, scored, *figures = parallel.all_reduce_sum(sums.mul_(parallel.counted_once(1))).tolist()
    if not scored:
        return {}
    averages = {f"val_{key}": mean for key, mean in means(objective.figures, figures).items()}
    return objective.metrics(total / scored) | averages


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
    """Compute without gradients inside, in eval mode and in the precision of the run."""
    # Nothing is compiled: torch.compile would compile everything a second time.
    with (
        in_eval_mode(module),
        torch.no_grad(),
        parallel.fabric.autocast(),
        torch.compiler.set_stance("force_eager"),
    ):
        yield
