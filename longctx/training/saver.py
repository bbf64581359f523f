"""When a run is saved.

A checkpoint is copied to host memory and written while the next steps run. The copy takes as much
memory as the checkpoint, page-locked next to a GPU. If so much is not free, training waits for each
checkpoint. One checkpoint is written at a time, and a failure is raised at the next step.
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Any

import torch
from rich.filesize import decimal
from torch import Tensor

from longctx import files
from longctx.files import one_line
from longctx.model.offload import pinned
from longctx.parallel import sharding
from longctx.parallel.mesh import Parallel
from longctx.runs import checkpoints, run_folder
from longctx.runs.checkpoint_write import OTHERS, Saving
from longctx.spec import hardware
from longctx.spec.hardware import GIB
from longctx.training.run import Run
from longctx.training.run_log import RunLog
from longctx.training.train_step import TrainState


class Saver(AbstractContextManager["Saver"]):
    """Saves a run: each rank its share of the state, or rank 0 all of it.

    If its block raises, the checkpoint under way is completed, unless the cause is a signal.
    """

    def __init__(self, run: Run, parallel: Parallel, log: RunLog) -> None:
        self.run, self.parallel, self.log = run, parallel, log
        self.is_sharded = parallel.strategy.shards_weights
        self.thread = ThreadPoolExecutor(1, "checkpoint")
        self.memory: list[Tensor] = []  # on the host, for a copy of each file
        self.has_memory = True  # for it
        self.saving: Saving | None = None  # this rank's share of the newest, until it is logged
        self.warning: str | None = None  # the last one that was logged

    def __exit__(self, kind: type[BaseException] | None, error: object, _: object) -> None:
        self.thread.shutdown(wait=False)
        saving = self.saving
        if kind is None or saving is None or issubclass(kind, KeyboardInterrupt):
            return
        saving.until = time.monotonic() + OTHERS
        try:
            self._written(saving)
        except OSError as problem:
            files.remove(saving.partial)  # the disk may be full
            if str(problem) != str(error):  # else the command ends with it
                self.log.say(str(problem))

    def save(
        self, state: TrainState, plain: dict[str, Any], data: str, step: int, last: bool, best: int
    ) -> None:
        """Begin to write the checkpoint after `step`: weights and optimizer of `state`, with
        `plain` values and the fingerprint of the `data`; all ranks call it. Raises OSError if it,
        or the one before, cannot be written. Older ones are deleted, except that of step `best`.

        After the `last` one, which `finish` waits for, the state must not change any more.
        """
        # The disk then holds one checkpoint more than are kept, never two
        self.finish()
        run, has_copy = self.run, True
        if self.is_sharded or self.parallel.is_first:
            about = {"config": run.settings(), "data": data, "kernel_lock": run.kernel_lock}
            plain = {"longctx": about, "steps_done": step, **plain}
            plain["random"] = checkpoints.random_state()
            weights, optimizer = sharding.parts(state.module), state.optimizer.state_dict()
            trained = sharding.trained_names(state.module, state.optimizer)
            keep = run.config.keep_checkpoints
            saving = Saving(
                run_folder.checkpoint_path(run.folder, step),
                *checkpoints.contents(plain, weights, optimizer, trained),
                *((self.parallel.rank, self.parallel.ranks) if self.is_sharded else (0, 1)),
                replaced=lambda: checkpoints.tidy(run.folder, step, keep, best),
            )
            has_copy = self._has_copy(saving, last)
            saving.begin(self.thread, self.memory if has_copy else None)
            self.saving = saving
        if not last and not all(self.parallel.all_gather_objects(has_copy)):
            self.finish()

    def check(self) -> None:
        """Log the checkpoint under way if it is written; OSError if it cannot be."""
        if self.saving is not None and self.saving.written.done():
            self._written(self.saving)

    def finish(self) -> None:
        """Wait, on all ranks, until a checkpoint under way is on disk; OSError if it cannot be."""
        # Rank 0 waits in a collective, which times out if another rank is stopped
        for is_turn in (not self.parallel.is_first, self.parallel.is_first):
            if is_turn and self.saving is not None:
                self._written(self.saving)
            self.parallel.fabric.barrier()

    def _written(self, saving: Saving) -> None:
        """Wait for this rank's files, and on rank 0 for the whole folder, which it logs."""
        saving.written.result()
        self.saving = None
        if saving.bytes:
            saved = f"step {run_folder.step_of(saving.path):,}, {decimal(saving.bytes)}"
            self.log.say(f"saved      after {saved} in {saving.seconds:.1f} s")
        if saving.warning not in (None, self.warning):
            self.log.say(f"warning: {saving.warning}")
            self.warning = saving.warning

    def _has_copy(self, saving: Saving, last: bool) -> bool:
        """Return True if this rank has memory for the copy; the last checkpoint gets no new memory.
        Rank 0 logs once why there is none.
        """
        sizes = [shard.size for shard in saving.shards]
        if [len(memory) for memory in self.memory] == sizes:
            return True
        if last or not self.has_memory:
            return False
        processes = self.parallel.launched.local_ranks if self.is_sharded else 1
        needed, free = processes * sum(sizes), hardware.available_memory()
        is_cuda = self.parallel.device.type == "cuda"
        try:
            # Data workers and the cache of files need the rest
            if needed > hardware.COPY_SHARE * free:
                raise MemoryError(f"more than half of the {free / GIB:.1f} that are free")
            self.memory = [pinned(size, torch.uint8, is_cuda) for size in sizes]
        except (MemoryError, RuntimeError) as error:
            self.has_memory = False
            copy = f"a copy to write from takes {needed / GIB:.1f} GiB of memory: {one_line(error)}"
            self.log.say(f"saving     training waits for each checkpoint: {copy}")
        return self.has_memory
