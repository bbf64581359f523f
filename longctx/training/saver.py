"""When a run is saved.

A checkpoint is copied to host memory and written while the next steps run. The copy takes as much
memory as the checkpoint, page-locked next to a GPU. If so much is not free, training waits for each
checkpoint. One checkpoint is written at a time, and a failure is raised at the next step.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import wait

import torch
from rich.filesize import decimal
from torch import Tensor

from longctx.model.offload import pinned
from longctx.parallel import sharding
from longctx.parallel.mesh import Parallel
from longctx.planner import fitting
from longctx.runs import checkpoints, run_folder
from longctx.runs.checkpoint_write import ALONE, Saving, Writers
from longctx.spec import hardware
from longctx.spec.hardware import GIB
from longctx.training.run import Run
from longctx.training.run_log import RunLog
from longctx.training.train_step import TrainState

REPORTED_AFTER = 1.0  # seconds of deleting at the end of a run before a line reports it


class Saver:
    """Saves a run, from `begin` on: each rank its share of the state, or rank 0 all of it.

    If its block raises, the checkpoint under way is completed, unless the cause is a signal.
    """

    state: TrainState
    fingerprint: str  # of the data

    def __init__(self, run: Run, parallel: Parallel, log: RunLog) -> None:
        self.run, self.parallel, self.log = run, parallel, log
        self.is_sharded = parallel.strategy.shards_weights
        self.writers = ALONE
        if self.is_sharded:
            self.writers = Writers(parallel.rank, parallel.ranks, parallel.barrier)
        self.memory: list[Tensor] = []  # on the host, for a copy of each part
        self.no_copy = ""  # why there is no memory for it
        self.step = 0  # of the newest checkpoint
        self.saving: Saving | None = None  # this rank's share of it
        self.is_agreed = True  # all ranks know that it is written
        self.is_logged = True
        self.warning: str | None = None  # the last one that was logged

    def __enter__(self) -> Saver:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, _: object) -> None:
        if kind is None or self.saving is None or self.is_agreed:
            return
        if issubclass(kind, KeyboardInterrupt):
            self.saving.cancel()
        elif problem := self.saving.problem:
            if problem != str(error):  # else the command ends with it
                self.log.say(problem)
        else:
            self._log()

    def begin(self, state: TrainState, fingerprint: str) -> None:
        """Set what is to be saved: `state`, and which data it was trained on."""
        self.state, self.fingerprint = state, fingerprint

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
            wait([self.saving.deleted])
            self._log_warning()
        self.step, self.saving = step, None
        has_copy = True
        if self.is_sharded or self.parallel.is_first:
            content = {"steps_done": step, **content, "random": checkpoints.random_state()}
            saving = self._saving(content, best_step)
            has_copy = self._has_copy(saving, last)
            saving.begin(self.memory if has_copy else None)
            self.saving = saving
        self.is_agreed = self.is_logged = False
        if not last and not all(self.parallel.all_gather_objects(has_copy)):
            self.finish()

    def check(self) -> None:
        """Log the checkpoint under way when it is written; OSError if it cannot be."""
        if self.saving is not None and self.saving.written.done() and not self.is_agreed:
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
        if wait([self.saving.deleted], REPORTED_AFTER).not_done:
            size = decimal(self.saving.deleted_bytes)
            self.log.say(f"deleting   {size} of older checkpoints")
            wait([self.saving.deleted])
        self._log_warning()

    def cancel_removal(self) -> None:
        """Leave checkpoints that are not deleted yet to the next run in the folder."""
        if self.saving is not None:
            self.saving.cancel()

    def _saving(self, content: dict[str, object], best_step: int) -> Saving:
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
        if [len(memory) for memory in self.memory] == saving.sizes:
            return True
        if last or self.no_copy:
            return False
        processes = self.parallel.launched.local_ranks if self.is_sharded else 1
        needed, free = processes * sum(saving.sizes), hardware.available_memory()
        copy = f"a copy to write from takes {needed / GIB:.1f} GiB of memory"
        is_cuda = self.parallel.device.type == "cuda"
        try:
            # Data workers and the cache of files need the rest
            if needed > fitting.COPY_SHARE * free:
                raise MemoryError(f"more than half of the {free / GIB:.1f} that are free")
            self.memory = [
                pinned(size, torch.uint8) if is_cuda else torch.empty(size, dtype=torch.uint8)
                for size in saving.sizes
            ]
        except (MemoryError, RuntimeError) as error:
            self.no_copy = f"{copy}: {' '.join(str(error).split())}"
            self.log.say(f"saving     training waits for each checkpoint: {self.no_copy}")
        return not self.no_copy

    def _log(self) -> None:
        if not self.is_logged and self.saving is not None and self.parallel.is_first:
            self.log.saved(self.saving.path, self.step, self.saving.bytes, self.saving.seconds)
        self.is_logged = True

    def _log_warning(self) -> None:
        warning = None if self.saving is None else self.saving.warning
        if warning is not None and warning != self.warning:
            self.log.say(f"warning: {warning}")
            self.warning = warning
