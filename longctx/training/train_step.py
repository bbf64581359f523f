"""One optimizer step, and the state that it changes."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

from longctx import plugins
from longctx.parallel import sharding
from longctx.parallel.mesh import Parallel
from longctx.runs import checkpoints
from longctx.training.batches import MicroBatch
from longctx.training.cuda_graphs import StepGraphs
from longctx.training.module import Mark, StepParts, TrainingModule, learning_rate
from longctx.training.run import Run


def optimizer_step(
    state: TrainState, batch: list[MicroBatch], parallel: Parallel, mark: Mark = lambda part: None
) -> Tensor:
    """Update the weights once; return the loss summed over this rank's target tokens.

    The gradient is that of the mean loss over the target tokens of all micro-batches and ranks.
    `mark` is called once "forward", "backward" and "optimizer" have been queued.
    """
    parts, weight = state.parts, parallel.loss_weight(sum(micro.scored for micro in batch))
    total = torch.zeros((), device=parallel.device)
    # Around all micro-batches, so that weights are cast once
    with parallel.fabric.autocast():
        for number, micro in enumerate(batch, start=1):
            micro = micro.to(parallel.device)
            micro.weight = weight
            first, last = number == 1, number == len(batch)
            total += parts.forward_backward(micro, first, last, mark) / weight
    # Gradients of all micro-batches and ranks are summed by now
    parts.clip()
    parts.update()
    parts.zero_grad()
    state.scheduler.step()
    mark("optimizer")
    return total


class TrainState:
    """The state that a step changes: weights, optimizer, learning rate."""

    def __init__(self, run: Run, parallel: Parallel) -> None:
        self.run = run
        self.module = TrainingModule(run, parallel.shard)
        with parallel.fabric.init_module():
            self.module.configure_model()
        self.module.model.context = parallel.context
        configured = self.module.configure_optimizers()
        self.optimizer: torch.optim.Optimizer = configured["optimizer"]
        self.scheduler: LambdaLR = configured["lr_scheduler"]["scheduler"]
        parts = StepGraphs if run.workload.captured else StepParts
        self.parts = parts(self.module, parallel.prepare(self.module), self.optimizer, parallel)

    def tensors(self) -> dict[str, Tensor]:
        """Return this rank's part of every weight and moment, by a name for messages."""
        sharding.reshard(self.module)
        tensors: dict[str, Any] = dict(self.module.named_parameters())
        for name, weight in self.module.named_parameters():
            state = self.optimizer.state.get(weight, {})
            tensors |= {f"{key} of {name}": value for key, value in state.items()}
        return {name: sharding.local(x) for name, x in tensors.items() if isinstance(x, Tensor)}

    def require_finite(self, step: int, parallel: Parallel) -> None:
        """Raise FloatingPointError on each rank if a weight or moment of any rank is not finite."""
        # Such a state is never saved, so no checkpoint before it is deleted
        names = parallel.all_gather_objects(checkpoints.not_finite(self.tensors()))
        if name := next(filter(None, names), None):
            problem = f"{name} is not finite after step {step}, so that is not saved"
            raise FloatingPointError(f"{problem}; {advice(self.run, step)}")

    def restore(self, checkpoint: dict[str, Any]) -> None:
        """Continue from `checkpoint`, bit for bit."""
        for name, weight in self.module.named_parameters():
            sharding.write(weight, checkpoint["state_dict"][name])
        state = sharding.state_of_rank(checkpoint["optimizer_states"][0], self.optimizer)
        # The run decides the settings of AdamW and Muon, not the checkpoint
        if isinstance(self.optimizer, torch.optim.AdamW):
            state["param_groups"] = self.optimizer.state_dict()["param_groups"]
        self.optimizer.load_state_dict(state)
        self.scheduler = learning_rate(self.optimizer, self.run)


def require_finite(name: str, value: float, step: int, run: Run) -> None:
    """Raise FloatingPointError unless `value`, which is of `step`, is finite."""
    if not math.isfinite(value):
        problem = f"the {name} is {value}, not a finite number, at step {step}"
        raise FloatingPointError(f"{problem}; {advice(run, step)}")


def advice(run: Run, step: int) -> str:
    """Return what to look at, plugins first, if a number of `step` is not finite."""
    init, rates = run.config.init, f"lr={run.lr} warmup_steps={run.warmup_steps}"
    remedy = f"try a smaller lr or longer warm-up ({rates})"
    if not step:
        cause = f"init={init}" if init else f"model.init_std={run.workload.model.init_std}"
        remedy = f"the weights that the run begins with make it so ({cause})"
    named = run.config.plugins and plugins.as_typed(run.config.plugins)
    return f"does `longctx check` find NaN in {named}? If not: {remedy}" if named else remedy
