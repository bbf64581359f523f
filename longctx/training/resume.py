"""A resumed run: its newest intact checkpoint, and the checks that the run is still the same.

A damaged checkpoint is set aside, and the one before it taken.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from longctx.config.fields import build, refuse
from longctx.config.train_config import TrainConfig
from longctx.model import saved_weights
from longctx.runs import checkpoints, run_folder
from longctx.training import optimizers
from longctx.training.learning_rate import schedule_of
from longctx.training.run import Run
from longctx.untrusted import opened


def continued(run: Run) -> Run:
    """Return `run` from its newest intact checkpoint, with the kernel lock in it, after checking
    that the data, the keys and the model fit.
    """
    config, folder = run.config, Path(run.config.resume or "")
    path, checkpoint, damaged = newest_intact(folder)
    with opened(path, folder):
        about, steps_done = checkpoint["longctx"], checkpoint["steps_done"]
        assert run.data is not None
        changed = f"resume={folder}: the documents, their split or the tokenizer are no longer"
        changed += " those that the run began with; restore them, or train anew with init"
        refuse((run.data.fingerprint != about["data"], f"{changed}={folder}"))
        run_folder.check_unedited(folder, about["config"], run.saved)
        # The tensors, before anything computes with them
        workload = run.workload
        model = saved_weights.checked_skeleton(path, checkpoint, workload.model, workload.lora)
        optimizer = optimizers.build(model, run)
        trained = [weight for group in optimizer.param_groups for weight in group["params"]]
        # An optimizer that does not name its states may have any
        names = getattr(optimizer, "state_names", lambda _: None)
        expected = [(weight.shape, names(weight)) for weight in trained]
        checkpoints.check_states(path, checkpoint, expected)
        # A run that has ended says so; else it would train one step more
        best, larger = checkpoint["best"], "to continue, give a larger"
        # Losses of other sequences are not compared
        validations = best["since"] if best.get("val_rows") == run.val_rows else 0
        is_over = config.patience is not None and validations >= config.patience
        ended = f"resume={folder}: the run has ended after {validations} validations without"
        patience = f"{ended} a lower loss; {larger} patience=, or patience=null"
        done = f"resume={folder}: the run is done after step {steps_done:,}; {larger} max_steps="
        refuse((is_over, patience), (steps_done >= run.max_steps, done))
        before = schedule_of(build(TrainConfig, about["config"]), workload)
        rate_note = run.schedule.change(before, steps_done, f"resume={folder}")
    return replace(
        run,
        folder=folder,
        checkpoint=path,
        damaged=damaged,
        steps_done=steps_done,
        model_source="",
        kernel_lock=about.get("kernel_lock"),
        rate_note=rate_note,
        saved=run.saved | {"name": folder.name},
    )


def newest_intact(folder: Path) -> tuple[Path, dict[str, Any], dict[Path, str]]:
    """Return the newest intact checkpoint in `folder`, its content, and the damage of each newer
    one; ValueError if there is none.
    """
    damaged: dict[Path, str] = {}
    for path in reversed(run_folder.checkpoints(folder)):
        try:
            checkpoints.verify(path)
            return path, checkpoints.read(path), damaged
        except checkpoints.Damaged as error:
            damaged[path] = error.what
    listed = "; ".join(f"{path.name}: {what}" for path, what in damaged.items())
    raise ValueError(f"resume={folder}: none of its checkpoints is intact ({listed})")
