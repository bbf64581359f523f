"""What a checkpoint must hold to be continued: the weights and the optimizer's state of the run."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from longctx.model import restore
from longctx.runs import checkpoints
from longctx.training import optimizers
from longctx.training.optimizers.adamw import MOMENTS
from longctx.training.optimizers.muon import Muon
from longctx.training.run import Run


def check(run: Run, path: Path, checkpoint: dict[str, Any]) -> None:
    """Raise ValueError unless every tensor in the checkpoint at `path` is one of `run`, as written;
    Damaged where one is not finite. Nothing is computed with them before that.
    """
    work = run.workload
    model = restore.skeleton(work.model, work.attention, work.lora)
    restore.check_weights(path, checkpoint, model)
    optimizer = optimizers.build(model, run)
    trained = [p for group in optimizer.param_groups for p in group["params"]]
    expected = [(p.shape, states_of(p, optimizer)) for p in trained]
    checkpoints.check_states(path, checkpoint, expected)
    checkpoints.check_finite(path, checkpoint)


def states_of(p: Tensor, optimizer: torch.optim.Optimizer) -> Collection[str] | None:
    """The names of the states that `optimizer` keeps for p; None where that is not known."""
    if isinstance(optimizer, Muon) and p in optimizer.parts:
        return ("step", "momentum")
    return ("step", *MOMENTS) if isinstance(optimizer, torch.optim.AdamW) else None
