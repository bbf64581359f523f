"""When a run is saved, and what a checkpoint must hold to be resumed.

A checkpoint is copied to host memory and written while the next steps run. The copy takes as much
memory as the checkpoint; next to a GPU it is page-locked, in the background after the first step.
If so much is not free, training waits for each checkpoint. One checkpoint is written at a time, and
a failure is raised at the next step. After the last one the run frees its memory while it waits.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from longctx.model import restore
from longctx.model.offload import pinned
from longctx.parallel import sharding
from longctx.parallel.mesh import Parallel
from longctx.planner import fitting, hardware
from longctx.planner.hardware import GIB
from longctx.runs import checkpoints, run_folder
from longctx.runs.checkpoint_write import ALONE, Saving, Writers, use_device
from longctx.training import optimizers
from longctx.training.optimizers.adamw import MOMENTS
from longctx.training.optimizers.muon import Muon
from longctx.training.run import Run
from longctx.training.run_log import RunLog
from longctx.training.train_step import TrainState

SAID_AFTER = 1.0  # seconds of deleting at the end of a run before a line says so


class Saver:
    """Saves a run, from `begin` on: each rank its share of the state, or rank 0 all of it.

    If its block raises, the checkpoint under way is completed, unless the cause is a signal.
    """

    state: TrainState
    fingerprint: str  # of the data

    def __init__(self, run: Run, parallel: Parallel, log: RunLog) -> None:
        self.run, self.parallel, self.log = run, parallel, log
        self.is_sharded = parallel.strategy == "fsdp"
        self.writers = ALONE
        if self.is_sharded:
            self.writers = Writers(parallel.rank, parallel.ranks, parallel.first_problem)
        self.memory: list[Tensor] = []  # on the host, for a copy of each part
        self.no_copy = ""  # why there is no memory for it
        # An event, since a thread's join returns too early after a signal (bpo-45274)
        self.is_reserved = threading.Event()
        self.is_reserved.set()
        self.step = 0  # of the newest checkpoint
        self.saving: Saving | None = None  # this rank's share of it
        self.is_agreed = True  # all ranks know that it is written
        self.is_logged = True
        self.warning: str | None = None  # the last one that was logged

    def __enter__(self) -> Saver:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.is_reserved.wait()
        if kind is None or self.saving is None or self.is_agreed:
            return
        if issubclass(kind, KeyboardInterrupt):
            self.saving.cancel()
            return
        self.saving.is_written.wait()
        if self.saving.problem is None:
            self._log()
        else:
            self.log.say(self.saving.problem)

    def begin(self, state: TrainState, fingerprint: str) -> None:
        """Set what is to be saved: `state`, and which data it was trained on."""
        self.state, self.fingerprint = state, fingerprint

    def prepare(self, step: int) -> None:
        """Reserve memory for the copy in the background, after the first step of this process; on a
        GPU, where that takes seconds, and if a checkpoint will come before the last step.
        """
        is_due = self._writes and self.run.saves_between(step)
        if self.parallel.device.type != "cuda" or not is_due:
            return
        saving = self._saving({"random": checkpoints.random_state()})
        self.is_reserved.clear()

        def reserve() -> None:
            try:
                self._reserve(saving)
            finally:
                self.is_reserved.set()

        threading.Thread(target=reserve, name="reserve").start()

    def save(
        self, content: Mapping[str, object], step: int, last: bool, best_step: int = 0
    ) -> None:
        """Begin to write the checkpoint after `step`, with `content` next to the weights and the
        optimizer's state; all ranks call it. Raises OSError if it, or the one before, cannot be
        written. Older ones go, except that of `best_step`.

        After the `last` one, which `finish` waits for, the state must not change any more.
        """
        self.finish()
        if self.saving is not None:
            # The disk then holds one checkpoint more than are kept, never two
            self.saving.is_over.wait()
            self._log_warning()
        content = {"steps_done": step, **content, "random": checkpoints.random_state()}
        self.step = step
        saving = self._saving(content, best_step) if self._writes else None
        has_copy = saving is None or self._has_copy(saving, last)
        if saving is not None:
            saving.begin(self.memory if has_copy else None, frees_memory=last)
        self.saving, self.is_agreed, self.is_logged = saving, False, False
        if last:
            del self.state
        elif self.parallel.max(int(not has_copy)):
            self.finish()

    def check(self) -> None:
        """Log the checkpoint under way when it is written; OSError if it cannot be."""
        if self.saving is not None and self.saving.is_written.is_set() and not self.is_agreed:
            self.saving.check()
            self._log()
        self._log_warning()

    def finish(self) -> None:
        """Wait until the checkpoint under way is on disk; all ranks call it. OSError if it cannot
        be written.
        """
        if self.is_agreed:
            return
        if self.saving is not None:
            self.saving.end()
        self.is_agreed = True
        self._log()
        self.parallel.barrier()

    def end_removal(self) -> None:
        """Wait until the checkpoints that the last one replaces are deleted; log it if that takes
        long.
        """
        if self.saving is None:
            return
        if not self.saving.is_over.wait(SAID_AFTER):
            self.log.deleting(self.saving.deleted_bytes)
            self.saving.is_over.wait()
        self._log_warning()

    def cancel_removal(self) -> None:
        """Leave checkpoints that are not deleted yet to the next run in the folder."""
        if self.saving is not None:
            self.saving.cancel()

    @property
    def _writes(self) -> bool:
        return self.is_sharded or self.parallel.is_first

    def _saving(self, content: dict[str, object], best_step: int = 0) -> Saving:
        run, state, optimizer = self.run, self.state, self.state.optimizer
        about = checkpoints.describe(
            run.settings(), self.fingerprint, self.parallel.ranks, run.kernel_lock
        )
        step, keep = self.step, run.config.keep_checkpoints
        return checkpoints.saving(
            run_folder.checkpoint_path(run.folder, step),
            about,
            content,
            sharding.parts(state.module),
            optimizer.state_dict(),
            sharding.trained_names(state.module, optimizer),
            self.writers,
            replaced=lambda: checkpoints.tidy(run.folder, step, keep, best_step),
        )

    def _has_copy(self, saving: Saving, last: bool) -> bool:
        """Return True if this rank has memory for the copy; the last checkpoint gets no new memory.
        Rank 0 logs once why there is none.
        """
        self.is_reserved.wait()
        if not last and not self.no_copy:
            self._reserve(saving)
            if self.no_copy:
                self.log.say(f"saving     training waits for each checkpoint: {self.no_copy}")
        return [len(memory) for memory in self.memory] == saving.sizes

    def _reserve(self, saving: Saving) -> None:
        """Have memory for a copy of `saving`, or the reason why not in `no_copy`."""
        if [len(memory) for memory in self.memory] == saving.sizes:
            return
        self.memory = []
        processes = self.parallel.launched.local_ranks if self.is_sharded else 1
        needed, free = processes * sum(saving.sizes), hardware.available_memory()
        copy = f"a copy to write from takes {needed / GIB:.1f} GiB of memory"
        if needed > fitting.COPY_SHARE * free:
            self.no_copy = f"{copy}, more than half of the {free / GIB:.1f} that are free"
            return
        use_device(self.parallel.device)
        is_cuda = self.parallel.device.type == "cuda"
        try:
            self.memory = [
                pinned(size, torch.uint8) if is_cuda else torch.empty(size, dtype=torch.uint8)
                for size in saving.sizes
            ]
        except (MemoryError, RuntimeError) as error:
            self.no_copy = f"{copy} ({' '.join(str(error).split())})"

    def _log(self) -> None:
        if not self.is_logged and self.saving is not None and self.parallel.is_first:
            self.log.saved(self.saving.path, self.step, self.saving.bytes, self.saving.seconds)
        self.is_logged = True

    def _log_warning(self) -> None:
        warning = None if self.saving is None else self.saving.warning
        if warning is not None and warning != self.warning:
            self.log.say(f"warning: {warning}")
            self.warning = warning


def check_state(run: Run, path: Path, checkpoint: dict[str, Any]) -> None:
    """Raise ValueError unless the tensors in the checkpoint at `path` are the weights and optimizer
    state of `run`; Damaged if one is not finite. Nothing is computed with them before.
    """
    workload = run.workload
    model = restore.skeleton(workload.model, workload.attention, workload.lora)
    restore.check_weights(path, checkpoint, model)
    optimizer = optimizers.build(model, run)
    trained = [p for group in optimizer.param_groups for p in group["params"]]
    expected = [(p.shape, state_names(p, optimizer)) for p in trained]
    checkpoints.check_states(path, checkpoint, expected)
    checkpoints.check_finite(path, checkpoint)


def state_names(p: Tensor, optimizer: torch.optim.Optimizer) -> Collection[str] | None:
    """Return the names of the states that `optimizer` keeps for p; None if that is not known."""
    if isinstance(optimizer, Muon) and p in optimizer.parts:
        return ("step", "momentum")
    return ("step", *MOMENTS) if isinstance(optimizer, torch.optim.AdamW) else None
