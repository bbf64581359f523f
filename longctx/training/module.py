"""The LightningModule: the model with its loss, optimizer, learning rate and clipping.

Our own loop (loop.py) calls these hooks in a visible order; a stock `lightning.Trainer` calls them
too, with one micro-batch per optimizer step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from longctx.distributed import sharding
from longctx.distributed.devices import dtype_of
from longctx.distributed.lightning_parts import pytorch as pl
from longctx.model import GPT, fp8, lora
from longctx.training import initial, optimizers
from longctx.training.batches import MicroBatch
from longctx.training.learning_rate import LearningRate
from longctx.training.run import Run


class TrainingModule(pl.LightningModule):
    """The GPT of `run` under training.

    Its weights are random, or those that a new run begins with.
    """

    model: GPT

    def __init__(self, run: Run, shard: Callable[[GPT], None] = lambda model: None) -> None:
        super().__init__()
        self.run, self.shard = run, shard  # spreads the weights of a new model over the ranks
        self.grad_norm = torch.zeros(())  # global, before clipping, of the last step

    def configure_model(self) -> None:
        """Build the model on the default device, with the same weights on every rank."""
        if hasattr(self, "model"):
            return
        work, config = self.run.workload, self.run.config
        device = torch.get_default_device()
        with torch.device("meta"):
            self.model = GPT(work.model, work.attention, work.memory)
        if work.lora.rank is not None:  # frozen weights lie in 16 bits where they are used so
            lora.add(lora.in_precision(self.model, dtype_of(work.precision)), work.lora)
        if work.precision == "fp8":
            fp8.convert(self.model, work.bf16_layers)
        self.shard(self.model)
        self.model.to_empty(device=device)

        torch.manual_seed(config.seed)
        self.model.init_weights(sharding.draw)
        for layer in lora.layers(self.model):
            layer.init_added(sharding.draw)
        if config.init is not None and self.run.checkpoint is None:
            initial.load(self.model, config.init)
        if work.compile:
            self.model.compile_blocks()
            if config.seq_len_schedule:  # a graph for each length is faster than one for all
                torch._dynamo.config.automatic_dynamic_shapes = False

    def configure_optimizers(self) -> Any:
        optimizer = optimizers.build(self.model, self.run)
        scheduler = LearningRate(optimizer, self.run)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }

    def training_step(self, batch: MicroBatch, batch_idx: int = 0) -> Tensor:
        """Loss of one micro-batch, as it adds to the loss of the optimizer step: times its weight.

        The weight is applied before gradients are rounded to 16 bits.
        """
        loss: Tensor = self.model(
            batch.tokens, batch.targets, batch.mask, reduction="sum", scale=batch.weight
        )
        return loss

    def configure_gradient_clipping(
        self,
        optimizer: torch.optim.Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clip the global norm of the gradients to `clip`, and keep what it was."""
        self.grad_norm = optimizers.clip_gradients(optimizer, self.run.config.clip)

    def validation_step(self, batch: MicroBatch, batch_idx: int = 0) -> Tensor:
        """(B, T) loss of each target, 0 where not scored."""
        with torch.no_grad():
            losses: Tensor = self.model(batch.tokens, batch.targets, batch.mask, reduction="none")
        return losses

    def transfer_batch_to_device(
        self, batch: MicroBatch, device: torch.device, dataloader_idx: int
    ) -> MicroBatch:
        return batch.to(device)
