"""The life of a training run: start, signals, last words, exit code.

Until the first step a signal ends the command, and a new run leaves no folder. Then a signal waits
for the step and its checkpoint; a second one ends the run unsaved.
"""

from __future__ import annotations

import gc
import os
import shutil
import sys
import traceback
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from longctx import files, system
from longctx.config.presets import Request
from longctx.config.train_config import TrainConfig
from longctx.kernels import SelfTestFailed
from longctx.model.mixers.description import mistake
from longctx.parallel.devices import is_out_of_memory, this_machine, within_memory
from longctx.parallel.launch import Launched, number_here, resuming
from longctx.parallel.mesh import Parallel, parallel_of
from longctx.runs import run_folder
from longctx.spec.hardware import Machine
from longctx.system import StopSignal
from longctx.training import memory
from longctx.training.batches import DataDiffers, lost_worker
from longctx.training.context_check import CheckFailed
from longctx.training.cuda_graphs import CaptureFailed
from longctx.training.loop import Stops, loop
from longctx.training.resolve import resolve
from longctx.training.run import Run
from longctx.training.run_log import RunLog, opening
from longctx.training.saver import Saver
from longctx.training.sweep import RESULT_VARIABLE

REFUSED = (CheckFailed, DataDiffers)  # every rank raises it, before the first step
TOLD = (*REFUSED, SelfTestFailed, CaptureFailed, FloatingPointError)  # the message says it all


def train(request: Request[TrainConfig], processes: Launched) -> int:
    """Train as `request` says, on these `processes`, and return the exit code.

    Raises ValueError or OSError, one line, if the request cannot be trained.
    """
    machine = this_machine()
    # torchrun and srun decide the number of processes; devices= may be left out
    request = request._replace(config=replace(request.config, devices=processes.ranks))
    if not request.config.dry_run:
        parallel = parallel_of(request.config, machine, processes)
        with system.caught() as stop:
            return LifeCycle(parallel, stop).live(request, machine)
    if number_here() == 0:
        print(*opening(resolve(request, machine), machine), sep="\n")
    return 0


class LifeCycle:
    """Lead one run from its start to its exit code; every rank has one."""

    def __init__(self, parallel: Parallel, stop: StopSignal) -> None:
        self.parallel, self.stop = parallel, stop
        self.run: Run | None = None
        stop.speaks = parallel.is_first

    def live(self, request: Request[TrainConfig], machine: Machine) -> int:
        """Start, train and report; return the exit code."""
        with ExitStack() as locks:
            try:
                run = self.start(request, machine, locks)
                return self.train(run, machine)
            except KeyboardInterrupt:
                self.parallel.fail(f"stopped by {self.stop.name}", self.stop.code)
                # An untrained run leaves no folder
                is_untrained = not self.stop.waits and self.run and self.run.checkpoint is None
                if self.run and is_untrained and self.parallel.is_first:
                    shutil.rmtree(self.run.folder, ignore_errors=True)
                raise
            except BaseException as error:
                shown = mistake(error) or error
                self.parallel.fail(str(shown), files.exit_code(shown))
                raise

    def start(self, request: Request[TrainConfig], machine: Machine, locks: ExitStack) -> Run:
        """Return the run that rank 0 decided, once all ranks have met and its folder is locked."""
        parallel, resumed = self.parallel, request.config.resume
        # A resumed run is locked before its newest checkpoint is read
        if resumed and parallel.is_first:
            locks.enter_context(run_folder.locked(Path(resumed)))
        self.run = resolve(request, machine) if parallel.is_first else None
        parallel.launch()
        # Every rank opens the data itself
        mine = None if self.run is None else replace(self.run, data=None)
        of_rank_0, *_ = parallel.all_gather_objects(mine)
        run = self.run = self.run or of_rank_0
        assert run is not None
        self.parallel = parallel.with_mesh(run.workload, run.workload.attention, run.folder)
        if parallel.is_first:
            if run.checkpoint is None:
                locks.enter_context(run_folder.locked(run.folder))
            else:
                texts = run_folder.texts_of(run.saved, run.kernel_lock)
                if run.data and not (run.folder / "tokenizer.json").exists():
                    texts |= run.data.tokenizer.texts()
                run_folder.go_back(run.checkpoint, run.damaged, texts)
            # A sweep shows the results of its jobs
            if result := os.environ.get(RESULT_VARIABLE):
                Path(result).write_text(str(run.folder), encoding="utf-8")
        return run

    def train(self, run: Run, machine: Machine) -> int:
        """Run the loop, print how the run ended; return the exit code."""
        parallel, code = self.parallel, 1
        problem: str | None = None
        is_refused = False
        log = RunLog(run, parallel)
        log.open(machine)
        saver = Saver(run, parallel, log)
        # The Saver's block writes a checkpoint that is under way to its end, also if the loop fails
        try:
            with within_memory(run.workload.device), saver:
                loop(run, parallel, log, Stops(parallel, self.stop), saver)
                saver.finish()
            parallel.shut_down()
            has_stopped = self.stop.number is not None and log.steps_done < run.max_steps
            code = self.stop.code if has_stopped else 0
        except KeyboardInterrupt:
            parallel.fail(f"stopped by {self.stop.name}", self.stop.code)
            code = self.stop.code
            raise
        except Exception as error:
            is_refused = isinstance(error, REFUSED)
            problem = self._last_words(error, log, machine)
            # A failed save holds its error, which holds the loop's frame and so its data workers.
            # They survive the one SIGTERM of Python's exit, which then waits for them without end
            traceback.clear_frames(error.__traceback__)
            if problem is None:
                raise
            code = files.exit_code(error)
        finally:
            # A notebook continues in this process: the run's garbage must not stay for ever
            gc.unfreeze()
            log.end(code)

        # All ranks refuse together: they part in peace, and rank 0 speaks for them
        if is_refused:
            parallel.shut_down()
            if not parallel.is_first:
                return 0
        # A run refused before its first step leaves no folder, so the same command starts it again
        if is_refused and run.checkpoint is None:
            shutil.rmtree(run.folder, ignore_errors=True)
        else:
            log.summary(code, self.stop.name if code and problem is None else None)
        if problem is not None:
            if parallel.is_first:
                print(f"error: {problem}", file=sys.stderr, flush=True)
            parallel.fail(problem, code)
        return code

    def _last_words(self, error: Exception, log: RunLog, machine: Machine) -> str | None:
        """Return the line about `error`; None if it is to be raised."""
        if isinstance(error, TOLD):
            return str(error)
        if not isinstance(error, RuntimeError | MemoryError):
            return None
        if is_out_of_memory(error):
            return memory.explain(log.run.workload, log.steps_done, machine)
        if self.parallel.is_lost_connection(error):
            reason = str(error).splitlines()[0].partition(". ")[0]
            return f"a process of the run does not answer ({reason}); {resuming(log.run.folder)}"
        worker = lost_worker(error)
        return None if worker is None else f"{worker}; {resuming(log.run.folder)}"
