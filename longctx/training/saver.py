"""When a run is saved: a checkpoint is copied to host memory and written while the next steps run.

The copy takes as much memory as the checkpoint; beside a GPU that is page-locked, in the background
after the first step. Where so much is not free the run waits until the checkpoint is written. One
checkpoint is written at a time, and what fails is raised at the next step.

While the last one is written, and those that it replaces are deleted, the run frees what it held.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from longctx.distributed import sharding
from longctx.distributed.parallel import Parallel
from longctx.model.offload import pinned
from longctx.planner import fitting, hardware
from longctx.planner.hardware import GIB
from longctx.runs import checkpoints, run_folder
from longctx.runs.checkpoint_write import ALONE, Saving, Snapshot, Writers, use_device
from longctx.runs.removal import Removal
from longctx.training.run import Run
from longctx.training.run_log import RunLog
from longctx.training.train_step import TrainState

SAID_AFTER = 1.0  # seconds for which the end of a run deletes checkpoints


class Saver:
    """Saves a run, from `begin` on: this rank its part of the state, or the first one all.

    A checkpoint that is under way when its block raises is written to its end, unless that is for
    a signal.
    """

    state: TrainState
    fingerprint: str  # of the data

    def __init__(self, run: Run, parallel: Parallel, log: RunLog) -> None:
        self.run, self.parallel, self.log = run, parallel, log
        self.is_sharded = parallel.strategy == "fsdp"
        self.writers = ALONE
        if self.is_sharded:
            self.writers = Writers(parallel.rank, parallel.ranks, parallel.first_problem)
        self.snapshot = Snapshot(self._allocate)
        # No thread reserves memory any more; after a signal, its join returns early (bpo-45274)
        self.is_reserved = threading.Event()
        self.is_reserved.set()
        self.problem = ""  # why there is no copy
        self.is_over = False
        self.step = 0  # that the newest checkpoint is after
        self.is_agreed = True  # all ranks know that it is written
        self.is_said = True
        self.saving: Saving | None = None  # what this rank has of it
        self.removal_problem: str | None = None  # the one that was said last

    def __enter__(self) -> Saver:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.is_over = True
        self.is_reserved.wait()
        if kind is None or self.saving is None or self.is_agreed:
            return
        if issubclass(kind, KeyboardInterrupt):
            self.saving.cancel()
            return
        self.saving.wait()
        if self.saving.problem is None:
            self._say()
        else:
            self.log.say(self.saving.problem)

    def begin(self, state: TrainState, fingerprint: str) -> None:
        """Name what is to be saved: `state`, and which data it was trained on."""
        self.state, self.fingerprint = state, fingerprint

    def prepare(self, step: int) -> None:
        """Get the memory for the copy in the background, after the first step of this process; on a
        GPU, where it takes long, and if a checkpoint will come before the last step.
        """
        comes = self._writes and self.run.saves_between(step)
        if self.parallel.device.type != "cuda" or not comes:
            return
        sizes = [part.size for part in self._saving({"random": checkpoints.random_state()}).parts]
        is_reserved = threading.Event()
        work = self._reserve_beside_steps
        threading.Thread(target=work, args=[sizes, is_reserved], name="reserve").start()
        self.is_reserved = is_reserved

    def save(
        self, content: Mapping[str, object], step: int, last: bool, best_step: int = 0
    ) -> None:
        """Begin to write the checkpoint after `step`, with `content` next to the weights and the
        optimizer's state; all ranks call it. Raises OSError if it, or the one before, cannot be
        written. The older ones of the run are deleted, but for that of `best_step`.

        After the `last` one, which `finish` waits for, the state is to change no more.
        """
        self.finish()
        if self.removal is not None:  # or there would be two on the disk beside those kept
            self.removal.wait()
            self._say_removal_problem()
        content = {"steps_done": step, **content, "random": checkpoints.random_state()}
        self.step = step
        saving = self._saving(content, best_step) if self._writes else None
        has_copy = saving is None or self._has_copy(saving, last)
        self.snapshot.is_last = last
        if saving is not None:
            saving.begin(self.snapshot if has_copy else None)
        self.saving, self.is_agreed, self.is_said = saving, False, False
        if last:
            del self.state
        elif self.parallel.max(int(not has_copy)):
            self.finish()

    def check(self) -> None:
        """Say that the checkpoint under way is written, once it is; OSError if it cannot be."""
        if self.saving is not None and self.saving.is_done and not self.is_agreed:
            self.saving.check()
            self._say()
        self._say_removal_problem()

    def finish(self) -> None:
        """Wait until the checkpoint under way is on disk; all ranks call it. OSError if it cannot
        be written.
        """
        if self.is_agreed:
            return
        if self.saving is not None:
            self.saving.end()
        self.is_agreed = True
        self._say()
        self.parallel.barrier()

    def end_removal(self) -> None:
        """Wait until what the last checkpoint has replaced is deleted; that is said where it takes
        long.
        """
        if self.removal is None:
            return
        if not self.removal.wait(SAID_AFTER):
            self.log.deleting(self.removal.bytes)
            self.removal.wait()
        self._say_removal_problem()

    def cancel_removal(self) -> None:
        """Leave what is not deleted yet to the next run in the folder."""
        if self.removal is not None:
            self.removal.cancel()

    @property
    def removal(self) -> Removal | None:
        """The deletion of what the newest checkpoint has replaced, on the first rank."""
        return None if self.saving is None else self.saving.removal

    @property
    def _writes(self) -> bool:
        return self.is_sharded or self.parallel.is_first

    def _saving(self, content: dict[str, object], best_step: int = 0) -> Saving:
        run, state, optimizer = self.run, self.state, self.state.optimizer
        about = checkpoints.describe(
            run.settings(), self.fingerprint, self.parallel.ranks, run.kernel_lock
        )
        saving = checkpoints.saving(
            run_folder.checkpoint_path(run.folder, self.step),
            about,
            content,
            sharding.parts(state.module),
            optimizer.state_dict(),
            sharding.trained_names(state.module, optimizer),
            self.writers,
        )
        step, keep = self.step, run.config.keep_checkpoints
        saving.then = lambda: checkpoints.tidy(run.folder, step, keep, best_step)
        return saving

    def _has_copy(self, saving: Saving, last: bool) -> bool:
        """Whether this rank has memory for the copy; the last checkpoint is copied only if there
        was one before it. Says once, on the first rank, why there is none.
        """
        self.is_reserved.wait()
        sizes = [part.size for part in saving.parts]
        if last or self.problem:
            return self.snapshot.holds(sizes)
        self._reserve(sizes)
        if self.problem:
            self.log.say(f"saving     holds up the steps: {self.problem}")
        return not self.problem

    def _reserve_beside_steps(self, sizes: Sequence[int], is_reserved: threading.Event) -> None:
        """What the thread of `prepare` does."""
        try:
            self._reserve(sizes)
        finally:
            is_reserved.set()

    def _reserve(self, sizes: Sequence[int]) -> None:
        """Have memory for a copy in parts of these sizes, or say in `problem` why not."""
        if self.snapshot.holds(sizes):
            return
        processes = self.parallel.launched.local_ranks if self.is_sharded else 1
        needed, free = processes * sum(sizes), hardware.available_memory()
        copy = f"a copy to write from takes {needed / GIB:.1f} GiB of memory"
        if needed > fitting.COPY_SHARE * free:
            self.problem = f"{copy}, more than half of the {free / GIB:.1f} that are free"
            return
        use_device(self.parallel.device)
        try:
            self.snapshot.reserve(sizes)
        except (MemoryError, RuntimeError) as error:
            self.problem = f"{copy} ({' '.join(str(error).split())})"

    def _allocate(self, size: int) -> Tensor:
        if self.is_over:
            raise MemoryError("the run ends")
        if self.parallel.device.type == "cuda":
            return pinned(size, torch.uint8)
        return torch.empty(size, dtype=torch.uint8)

    def _say(self) -> None:
        if not self.is_said and self.saving is not None and self.parallel.is_first:
            self.log.saved(self.saving.path, self.step, self.saving.bytes, self.saving.seconds)
        self.is_said = True

    def _say_removal_problem(self) -> None:
        problem = None if self.removal is None else self.removal.problem
        if problem is not None and problem != self.removal_problem:
            self.log.say(f"warning: {problem}")
            self.removal_problem = problem
