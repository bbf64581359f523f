"""The parts of an optimizer step, in the order in which `optimizer_step` calls them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from longctx.distributed.parallel import Parallel
from longctx.training.batches import MicroBatch
from longctx.training.module import TrainingModule

Mark = Callable[[str], None]


class StepParts:
    """A step whose kernels are launched one by one; `prepared` is `module` with its strategy."""

    def __init__(
        self,
        module: TrainingModule,
        prepared: Any,
        optimizer: torch.optim.Optimizer,
        parallel: Parallel,
    ) -> None:
        self.module, self.prepared = module, prepared
        self.optimizer, self.parallel = optimizer, parallel

    def forward_backward(self, micro: MicroBatch, first: bool, last: bool, mark: Mark) -> Tensor:
        """Add the gradients of `micro` to those of the step; returns its loss, which the next call
        may overwrite. `first`, `last`: of the step.
        """
        with self.parallel.accumulates(self.prepared, last):
            loss: Tensor = self.prepared.training_step(micro)
            mark("forward")
            self.parallel.backward(loss)
            mark("backward")
        return loss.detach()

    def clip(self) -> None:
        """Clip the gradients as the module does."""
        self.module.configure_gradient_clipping(self.optimizer)

    def update(self) -> None:
        """Update the weights."""
        self.optimizer.step()

    def zero_grad(self) -> None:
        """Let the next step begin without gradients."""
        self.optimizer.zero_grad()
