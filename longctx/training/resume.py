"""A resumed run: the layouts that keep its steps, and its newest intact checkpoint.

A run continues with its sequences per step on other devices, too. A damaged checkpoint is set
aside, and the one before it taken.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

from longctx import files
from longctx.config.train_config import TrainConfig
from longctx.model import saved_weights
from longctx.runs import checkpoints, metrics_file, run_folder
from longctx.spec.step import Division
from longctx.training import kernel_lock, optimizers
from longctx.training.run import Run, run_of
from longctx.training.schedule import Schedule
from longctx.untrusted import opened


def with_steps_of_run(
    each: list[Division], config: TrainConfig, overrides: Collection[str]
) -> list[Division]:
    """Return the divisions that keep the sequences per step of a resumed run, on the devices of
    this request. `batch_size` and `accumulate` are fixed if `overrides` names them. ValueError if
    there is no such division.
    """
    path = Path(config.resume or "")
    saved = run_folder.read_config(path, needed=("devices", "batch_size", "accumulate"))
    rows = run_folder.rows_per_step(saved)
    possible = []
    for division in each:
        groups = config.devices // division.context
        batch_size = config.batch_size if "batch_size" in overrides else None
        accumulate = config.accumulate if "accumulate" in overrides else None
        # No larger micro-batch than the run's own, which is known to fit
        if batch_size is None and accumulate is None:
            batch_size = math.gcd(saved["batch_size"], rows // groups)
        batch_size = batch_size or rows // groups // (accumulate or 1)
        accumulate = accumulate or rows // groups // batch_size
        if batch_size * accumulate * groups == rows:
            possible.append(division._replace(batch_size=batch_size, accumulate=accumulate))
    if not possible:
        names = ["devices", *(name for name in ("batch_size", "accumulate") if name in overrides)]
        asked = " ".join(f"{name}={getattr(config, name)}" for name in names)
        raise ValueError(
            f"{asked}: a step of the run has {rows} sequences, which cannot be divided so; give "
            f"numbers with groups of devices × batch_size × accumulate = {rows}"
        )
    return possible


def continued(run: Run) -> Run:
    """Return `run` from its newest intact checkpoint, after checking that data, model and kernels
    fit.
    """
    config, folder = run.config, Path(run.config.resume or "")
    path, checkpoint, damaged = newest_intact(run, folder)
    with opened(path, folder):
        about, steps_done = checkpoint["longctx"], checkpoint["steps_done"]
        validations = checkpoint["best"]["since"]
        if config.patience is not None and validations >= config.patience:
            raise ValueError(
                f"resume={folder}: the run has ended after {validations} validations without a "
                "lower loss; to go on, give a larger patience=, or patience=null"
            )
        if steps_done >= run.max_steps:
            raise ValueError(
                f"resume={folder}: the run has done its {steps_done:,} steps; to go on, give a "
                "larger max_steps="
            )
        before = run_of(about["config"], run.workload.device).schedule
        rate_note = changed_rate(run, before, steps_done)
        lock, note = kernel_lock.held(config, run.kernel_lock, about.get("kernel_lock"), steps_done)
    return replace(
        run,
        folder=folder,
        checkpoint=path,
        damaged=damaged,
        steps_done=steps_done,
        model_source="",
        kernel_lock=lock,
        lock_note=note or "",
        rate_note=rate_note,
    )


def changed_rate(run: Run, before: Schedule, steps_done: int) -> str:
    """Return a line about the next step's rate if another schedule or end has changed it; raise
    ValueError if the rate of `run` falls in its steps done, in which it did not.
    """
    now, stable = run.schedule, run.schedule.stable_steps()
    if stable < min(steps_done, before.stable_steps()):
        raise ValueError(
            f"resume={run.config.resume}: lr_schedule={run.config.lr_schedule} would have begun to "
            f"fall after step {stable:,}, but the run has {steps_done:,} at its peak; to begin "
            f"here, give lr_schedule=wsd lr_decay_from={steps_done}"
        )
    if now.rate(steps_done) == before.rate(steps_done):
        return ""
    rates = f"{before.rate(steps_done - 1):.3g} until now, {now.rate(steps_done):.3g} in the next"
    return f"{rates} step: max_steps or lr_schedule has changed"


def newest_intact(run: Run, folder: Path) -> tuple[Path, dict[str, Any], dict[Path, str]]:
    """Return the newest intact checkpoint in `folder`, its content, and the damage of each newer
    one. Raises ValueError if there is none, or if it is of another run than `run`.
    """
    damaged: dict[Path, str] = {}
    paths = run_folder.checkpoints(folder)
    for path in reversed(paths):
        try:
            return path, intact_checkpoint(run, folder, path), damaged
        except checkpoints.Damaged as error:
            if len(paths) == 1:
                raise
            damaged[path] = error.what
    listed = "; ".join(f"{path.name}: {what}" for path, what in damaged.items())
    raise ValueError(f"resume={folder}: none of its checkpoints is intact ({listed})")


def intact_checkpoint(run: Run, folder: Path, path: Path) -> dict[str, Any]:
    """Return the checkpoint at `path`, every part of it checked against `run`."""
    checkpoints.verify(path)
    checkpoint = checkpoints.read(path)
    assert run.data is not None
    with opened(path, folder):
        about = checkpoint["longctx"]
        if run.data.fingerprint != about["data"]:
            raise ValueError(
                f"resume={folder}: the documents, their split or the tokenizer are no longer those "
                "that the run began with"
            )
        run_folder.check_unedited(folder, about["config"], run.settings())
        check_state(run, path, checkpoint)
    return checkpoint


def check_state(run: Run, path: Path, checkpoint: dict[str, Any]) -> None:
    """Raise ValueError unless the tensors in the checkpoint at `path` are the weights and optimizer
    state of `run`. Nothing is computed with them before.
    """
    workload = run.workload
    model = saved_weights.skeleton(workload.model, workload.attention, workload.lora)
    saved_weights.check_weights(path, checkpoint, model)
    optimizer = optimizers.build(model, run)
    trained = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    # an optimizer that does not name its states may have any
    names = getattr(optimizer, "state_names", lambda _: None)
    expected = [(parameter.shape, names(parameter)) for parameter in trained]
    checkpoints.check_states(path, checkpoint, expected)


def continue_folder(run: Run) -> None:
    """Take the folder of a resumed run back to its checkpoint: set damaged newer ones aside, remove
    half-written files of killed processes, and later metrics.
    """
    for path in (run.folder, run.folder / "checkpoints"):
        files.remove_partial(path)
    for path, what in run.damaged.items():
        aside = path.with_name(f"{path.name}.damaged")
        files.remove(aside)
        path.rename(aside)
        print(
            f"{path}: {what}; set aside as {aside.name}, the run goes on from {run.checkpoint}",
            file=sys.stderr,
        )
    run.write()
    metrics_file.drop_after(run.folder, run.steps_done)
