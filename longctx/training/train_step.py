"""One optimizer step, and the state that it changes."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import torch
from torch import Tensor

from longctx.distributed import sharding
from longctx.distributed.parallel import Parallel
from longctx.model import fp8
from longctx.runs import checkpoints
from longctx.training.batches import StepBatch
from longctx.training.best import Best
from longctx.training.cuda_graphs import StepGraphs
from longctx.training.learning_rate import LearningRate
from longctx.training.module import TrainingModule
from longctx.training.run import Run
from longctx.training.step_parts import StepParts
from longctx.training.throughput import Meter

# Said of a step that is dropped, whose learning rate is passed over as it should be
warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step")


def optimizer_step(
    state: TrainState,
    batch: StepBatch,
    parallel: Parallel,
    mark: Callable[[str], None] = lambda part: None,
    drops: Callable[[float | None, float], bool] | None = None,
) -> Tensor:
    """One update of the weights; returns the loss summed over this rank's scored tokens.

    Where `drops`, told the mean loss and the gradient norm of all ranks, says so, weights and
    optimizer stay as they are.

    The gradient is that of the mean loss over the scored tokens of all micro-batches and ranks.
    `mark` is told when "forward", "backward" and "optimizer" have been queued.
    """
    parts, weight = state.parts, parallel.loss_weight(batch.scored)
    batch.weigh(weight)
    total = torch.zeros((), device=parallel.device)
    once = state.run.workload.quantizes_once
    # around all micro-batches, so that weights are cast once
    with parallel.autocast(), fp8.weights_quantized(state.module) if once else nullcontext():
        for micro in batch.micro:
            first, last = micro is batch.micro[0], micro is batch.micro[-1]
            total += parts.forward_backward(micro, first, last, mark) / weight
    parts.clip()
    if drops is None or not drops(*step_figures(state, batch, total * weight, parallel)):
        parts.update()
    parts.zero_grad()
    state.scheduler.step()
    state.steps_done += 1
    mark("optimizer")
    return total


def step_figures(
    state: TrainState, batch: StepBatch, weighted: Tensor, parallel: Parallel
) -> tuple[float | None, float]:
    """Return the mean loss of a step over all ranks, None if it has no target, and its gradient
    norm; waits for the device.
    """
    scored = weighted.new_tensor(float(parallel.counted_once(batch.scored)))
    sums = parallel.all_reduce_sum(torch.stack([weighted / parallel.ranks, scored]))
    loss, targets = sums.tolist()
    return loss if targets else None, float(state.module.grad_norm)


class TrainState:
    """What a step changes: weights, optimizer, learning rate."""

    def __init__(self, run: Run, parallel: Parallel) -> None:
        self.run, self.steps_done = run, run.steps_done
        self.module = TrainingModule(run, parallel.shard)
        parallel.build(self.module.configure_model)
        self.module.model.share_rows(parallel.context)
        configured = self.module.configure_optimizers()
        self.optimizer: torch.optim.Optimizer = configured["optimizer"]
        self.scheduler: LearningRate = configured["lr_scheduler"]["scheduler"]
        kind = StepGraphs if run.workload.captured else StepParts
        self.parts = kind(self.module, parallel.prepare(self.module), self.optimizer, parallel)

    def tensors(self) -> dict[str, Tensor]:
        """What this rank has of every weight, which is its master copy, and of the moments of the
        optimizer, by a name for messages.
        """
        sharding.reshard(self.module)
        weights = {name: sharding.local(x) for name, x in self.module.named_parameters()}
        numbers = sharding.trained_names(self.module, self.optimizer)
        moments = {
            f"{key} of {numbers[number]}": x
            for number, values in self.optimizer.state_dict()["state"].items()
            for key, x in values.items()
            if isinstance(x, Tensor)
        }
        return weights | {name: sharding.local(x) for name, x in moments.items()}

    def restore(self, path: Path, meter: Meter, parallel: Parallel, best: Best) -> None:
        """Continue from the checkpoint at `path`, bit for bit."""
        checkpoint = checkpoints.read(path)
        for name, weight in self.module.named_parameters():
            sharding.write_rows_of(checkpoint["state_dict"][name], weight)
        state = sharding.state_of_rank(checkpoint["optimizer_states"][0], self.optimizer)
        if isinstance(self.optimizer, torch.optim.AdamW):  # its settings are the run's own
            state["param_groups"] = self.optimizer.state_dict()["param_groups"]
        self.optimizer.load_state_dict(state)
        self.scheduler = LearningRate(self.optimizer, self.run)
        meter.restore(checkpoint["meter"], parallel.is_first)
        best.restore(checkpoint["best"])
        checkpoints.restore_random_state(checkpoint["random"])
