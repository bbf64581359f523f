"""The Lightning module: one optimizer step, and one validation batch. All that changes gradients is
in `training_step`.

Optimization is manual, so that the normalization of the loss, accumulation, clipping and the
learning rate stand in one place, in the order in which they happen.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from longctx.config.train_config import CompleteConfig
from longctx.model import GPT, lora
from longctx.model.huggingface import load_weights
from longctx.training import optimizers
from longctx.training.batches import MicroBatch, StepBatch
from longctx.training.optimizers import clip_gradients, learning_rate


class TrainingModule(pl.LightningModule):
    """A GPT under training; `config` is complete (see `longctx.config.train_config.complete`) and knows
    its vocabulary.

    Its weights are random, or those of the Hugging Face folder `weights`.
    """

    model: GPT

    def __init__(self, config: CompleteConfig, weights: Path | None = None) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.config = config
        self.weights = weights
        self.steps_done = 0
        self.grad_norm = torch.zeros(())

    def configure_model(self) -> None:
        """Build the model on this rank's device, every rank with the same weights."""
        if hasattr(self, "model"):
            return
        torch.manual_seed(self.config.seed)
        if self.config.lora.rank is None:
            self.model = GPT(self.config.model, self.config.attention, self.config.memory)
        else:
            self.model = self._frozen_with_lora()
        if self.weights is not None:
            load_weights(self.model, self.weights)
        if self.config.compile == "true":
            self.model.compile_blocks()
            if (
                self.config.seq_len_schedule
            ):  # compiled for each length, not for all of them at once, which is slower
                torch._dynamo.config.automatic_dynamic_shapes = False

    def _frozen_with_lora(self) -> GPT:
        """A model whose own weights rest, in 16 bits where they are used in 16 bits anyway, and are
        yet to be loaded.
        """
        device = torch.get_default_device()
        with torch.device("meta"):
            model = GPT(self.config.model, self.config.attention, self.config.memory)
        dtype = torch.bfloat16 if self.config.precision == "bf16" else torch.float32
        model = lora.in_precision(model, dtype).to_empty(device=device)
        model.init_weights()  # what no folder fills
        return lora.add(model, self.config.lora)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return optimizers.build(self.model, self.config)

    def transfer_batch_to_device(
        self, batch: StepBatch, device: torch.device, dataloader_idx: int
    ) -> StepBatch:
        return batch.to(device)

    def training_step(self, batch: StepBatch, batch_idx: int) -> Tensor:
        """One optimizer step; returns the loss summed over this rank's scored tokens, on the
        device.

        The gradient is that of the mean loss over the scored tokens of all micro-batches and ranks:
        each micro-batch's sum is divided by their number, and multiplied by the ranks because DDP
        averages over them; the loss does it before it rounds its gradients to 16 bits.
        """
        optimizer = self.optimizers()
        assert not isinstance(optimizer, list)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(self.steps_done, self.config)

        share = self.trainer.world_size / self._scored_on_all_ranks(batch)
        total = torch.zeros((), device=self.device)
        for micro in batch.micro:
            with self._gradients_stay_local(unless=micro is batch.micro[-1]):
                loss = self.model(
                    micro.tokens, micro.targets, micro.mask, reduction="sum", scale=share
                )
                self.manual_backward(loss)
            total += loss.detach() / share

        inner = self.optimizers(use_pl_optimizer=False)
        assert isinstance(inner, torch.optim.Optimizer)
        self.grad_norm = clip_gradients(inner, self.config.clip)
        optimizer.step()
        optimizer.zero_grad()
        self.steps_done += 1
        return total

    def validation_losses(self, micro: MicroBatch) -> Tensor:
        """(B, T) loss of each target of one batch, 0 where not scored, without gradient."""
        with torch.no_grad(), self.trainer.precision_plugin.val_step_context():
            return self.model(micro.tokens, micro.targets, micro.mask, reduction="none")

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        # steps_done says where the run is; Lightning's own counters would say it a second time
        checkpoint.pop("loops", None)
        checkpoint["steps_done"] = self.steps_done

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.steps_done = checkpoint["steps_done"]

    def _scored_on_all_ranks(self, batch: StepBatch) -> Tensor:
        """Scored tokens of the whole optimizer step, at least 1; on the device, so that nothing
        waits for it.
        """
        scored = torch.full((), float(batch.scored), device=self.device)
        if self.trainer.world_size > 1:
            dist.all_reduce(scored)
        return scored.clamp(min=1.0)

    def _gradients_stay_local(self, unless: bool) -> AbstractContextManager[None]:
        wrapped = self.trainer.strategy.model
        return (
            nullcontext()
            if unless or not isinstance(wrapped, DistributedDataParallel)
            else wrapped.no_sync()
        )
