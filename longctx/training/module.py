"""The LightningModule, and the parts of an optimizer step that call its hooks.

Our own step (train_step.py) calls them in a visible order. A stock `lightning.Trainer` calls the
hooks too, with one micro-batch per optimizer step.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from longctx.model import GPT, fp8, lora, offload
from longctx.model.gpt import build
from longctx.parallel import sharding
from longctx.parallel.devices import dtype_of
from longctx.parallel.fabric import pytorch as pl
from longctx.parallel.mesh import Parallel
from longctx.training import optimizers, pretrained
from longctx.training.batches import MicroBatch
from longctx.training.optimizers.adamw import AdamW
from longctx.training.run import Run

Mark = Callable[[str], None]  # called with the part of a step that has been queued


def learning_rate(optimizer: Optimizer, run: Run) -> LambdaLR:
    """Set the rate of the schedule in every parameter group, from the run's next step on."""
    for group in optimizer.param_groups:
        # A plugin's group may have another rate: torch multiplies the schedule's by this
        is_usual = not run.lr or group["lr"] in (run.lr, optimizer.defaults.get("lr"))
        group.setdefault("initial_lr", 1.0 if is_usual else group["lr"] / run.lr)
    return LambdaLR(optimizer, run.schedule.rate, last_epoch=run.steps_done - 1)


def clip_gradients(optimizer: Optimizer, max_norm: float | None) -> Tensor:
    """Clip the gradients to the norm `max_norm` (arXiv 1211.5063); return their norm before."""
    weights = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    norm = sharding.full(torch.nn.utils.get_total_norm([p.grad for p in weights]))
    if max_norm is None:
        return norm
    # Our optimizers multiply by the factor when they read the gradients anyway
    if isinstance(optimizer, AdamW):
        optimizer.factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    else:
        torch.nn.utils.clip_grads_with_norm_(weights, max_norm, norm)
    return norm


class TrainingModule(pl.LightningModule):
    """The GPT of `run` under training; its weights are random, or those of init=."""

    model: GPT

    def __init__(self, run: Run, shard: Callable[[GPT], None] = lambda model: None) -> None:
        super().__init__()
        self.run, self.shard = run, shard  # spreads the weights of a new model over the ranks
        self.objective, self.keys = run.config.objective.traits, run.config.objective
        self.figures: Tensor | None = None  # the objective's sums and counts since they were taken
        self.grad_norm = torch.zeros(())  # global, before clipping, of the last step

    def configure_model(self) -> None:
        """Build the model on the default device, with the same weights on every rank."""
        if hasattr(self, "model"):
            return
        workload, config = self.run.workload, self.run.config
        device = torch.get_default_device()
        # On "meta" no weight takes memory before it is sharded
        with torch.device("meta"):
            self.model = build(workload.model, workload.attention, workload.memory)
        # Weights that LoRA freezes need no fp32 copy
        if workload.lora.rank is not None:
            self.model.cast(dtype_of(workload.precision))
            lora.add(self.model, workload.lora)
        if workload.precision == "fp8":
            fp8.convert(self.model, workload.bf16_layers)
        self.shard(self.model)
        offload.allocate(self.model, workload.memory.offload_weights or 0.0, device)

        # The weights depend on the seed alone, not on the number of ranks
        torch.manual_seed(config.seed)
        # Plugins may draw from these
        random.seed(config.seed)
        np.random.seed(config.seed % 2**32)
        self.model.init_weights(sharding.draw)
        for layer in lora.layers(self.model):
            layer.init_added(sharding.draw)
        if config.init is not None and self.run.checkpoint is None:
            pretrained.copy_into(self.model, config.init)
        if workload.compile:
            self.model.compile_blocks()
            # A graph for each length is faster than one for all
            if config.seq_len_schedule:
                torch._dynamo.config.automatic_dynamic_shapes = False

    def configure_optimizers(self) -> Any:
        optimizer = optimizers.build(self.model, self.run)
        scheduler = {"scheduler": learning_rate(optimizer, self.run), "interval": "step"}
        return {"optimizer": optimizer, "lr_scheduler": scheduler}

    def training_step(self, batch: MicroBatch, batch_idx: int = 0) -> Tensor:
        """Return what a micro-batch adds to the loss of its optimizer step."""
        result = self.objective.loss(self.model, batch, self.keys)
        if not self.objective.figures:
            return result
        loss, figures = result
        self.figures = figures if self.figures is None else self.figures + figures
        return loss

    def taken_figures(self) -> Tensor | None:
        """Return the figures since the last call; None if the objective has none."""
        figures, self.figures = self.figures, None
        return figures

    def configure_gradient_clipping(self, optimizer: Optimizer, *_: Any, **of_trainer: Any) -> None:
        """Clip the global norm of the gradients to `clip`, and keep what it was."""
        self.grad_norm = clip_gradients(optimizer, self.run.config.clip)

    def validation_step(self, batch: MicroBatch, batch_idx: int = 0) -> Tensor:
        """Return the (B, T) loss of each target, 0 if it is not scored."""
        assert self.objective.losses is not None
        return self.objective.losses(self.model, batch)


@dataclass
class StepParts:
    """The parts of a step, launched kernel by kernel; `prepared` is `module` in its strategy."""

    module: TrainingModule
    prepared: Any
    optimizer: Optimizer
    parallel: Parallel

    def forward_backward(self, micro: MicroBatch, first: bool, last: bool, mark: Mark) -> Tensor:
        """Add the gradients of `micro` to those of the step; return its loss, which the next call
        may overwrite. `first` and `last` say where in the step it is.
        """
        with self.parallel.accumulates(self.prepared, last):
            loss: Tensor = self.prepared.training_step(micro)
            mark("forward")
            self.parallel.backward(loss)
            mark("backward")
        return loss.detach()

    def clip(self) -> None:
        """Clip the gradients as the module does; ValueError if DDP lacks that of a weight."""
        weights = [p for group in self.optimizer.param_groups for p in group["params"]]
        absent = [n for n, p in enumerate(weights) if p.grad is None and p.requires_grad]
        # DDP averages whole buckets: those of the other weights in them would be one rank's
        if absent and self.parallel.strategy.buckets_gradients:
            name = sharding.trained_names(self.module.model, self.optimizer)[absent[0]]
            raise ValueError(f"strategy=ddp: {name} has no gradient; use it, or strategy=fsdp")
        self.module.configure_gradient_clipping(self.optimizer)

    def update(self) -> None:
        """Update the weights."""
        self.optimizer.step()

    def zero_grad(self) -> None:
        """Let the next step begin without gradients."""
        self.optimizer.zero_grad()
