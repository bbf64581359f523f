"""Training: one loop, in which the order of events stands, and nowhere else."""

from __future__ import annotations

import gc
import math
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from longctx import files, stop_signal
from longctx.attention import kernels_run
from longctx.config.presets import Request
from longctx.config.train_config import TrainConfig
from longctx.data import Data, Mixture, load
from longctx.distributed.devices import is_out_of_memory, this_machine, within_memory
from longctx.distributed.heartbeat import go_on
from longctx.distributed.parallel import EXIT, Parallel, exit_within, parallel_of
from longctx.kernels import SelfTestFailed
from longctx.model.offload import HostBuffers
from longctx.planner.hardware import GIB
from longctx.planner.peak_memory import PARAMETERS, predict
from longctx.runs import checkpoint_folder, run_folder
from longctx.stop_signal import StopSignal
from longctx.training import context_check, out_of_memory
from longctx.training.batches import (
    StepBatch,
    is_lost_worker,
    lost_worker,
    read_ahead,
    train_loader,
)
from longctx.training.best import Best
from longctx.training.cuda_graphs import CaptureFailed
from longctx.training.learning_rate import learning_rate
from longctx.training.resolve import continue_folder, data_config, resolve
from longctx.training.run import Run, of_shared
from longctx.training.run_log import RunLog
from longctx.training.samples import sample
from longctx.training.saver import Saver
from longctx.training.schedule import Schedule
from longctx.training.spikes import Spikes
from longctx.training.sweep import RESULT_VARIABLE
from longctx.training.throughput import Meter, StepSplit, resident
from longctx.training.train_step import TrainState, optimizer_step
from longctx.training.validation import facts_found, validate


def train(request: Request[TrainConfig]) -> int:
    """Train as `request` says and return the exit code.

    Raises ValueError or OSError, one line, for whatever is wrong with the request.
    """
    sys.excepthook = without_lost_connections(sys.excepthook)
    machine = this_machine()
    parallel = parallel_of(request.config, machine)
    run: Run | None = None
    with stop_signal.caught() as stop, ExitStack() as held:
        stop.speaks = parallel.is_first
        try:
            request = request._replace(config=replace(request.config, devices=parallel.ranks))
            if request.config.resume and parallel.is_first:  # before its newest checkpoint is read
                held.enter_context(run_folder.locked(Path(request.config.resume)))
            run = resolve(request, machine) if parallel.is_first else None
            parallel.launch("" if run is None else str(run.folder))
            shared = parallel.broadcast({} if run is None else run.shared())
            if run is None:
                run = of_shared(shared)
            parallel.init_mesh(run.workload, str(run.folder))
            if run.checkpoint is None and parallel.is_first:
                held.enter_context(run_folder.locked(run.folder))
            if run.checkpoint is not None and parallel.is_first:
                continue_folder(run)
            if os.environ.get(RESULT_VARIABLE) and parallel.is_first:
                Path(os.environ[RESULT_VARIABLE]).write_text(str(run.folder), encoding="utf-8")
            return train_safely(run, parallel, stop)
        except KeyboardInterrupt:
            parallel.abandon()
            is_untrained = run is not None and run.checkpoint is None and not stop.waits
            if run is not None and is_untrained and parallel.is_first:
                shutil.rmtree(run.folder, ignore_errors=True)
            if parallel.ranks > 1:
                exit_within(EXIT, stop.code)
            raise
        except BaseException as error:
            parallel.fail(str(error), files.exit_code(error))
            raise


def loop(run: Run, parallel: Parallel, log: RunLog, stop: StopSignal, saver: Saver) -> None:
    """Every step of `run`: forward and backward, clipping and update, log, validate, save, stop."""
    data = shared_data(run, parallel)
    if run.config.context.check:
        log.checked(context_check.compare_with_one(run, data, parallel))
    shorter = [data.at(seq_len) for seq_len, _ in run.config.seq_len_schedule or []]
    schedule = Schedule(run, [*shorter, data])
    state = TrainState(run, parallel)
    spikes = Spikes(run.config.spike, run.config.spike_budget)
    meter, split = Meter(run.workload, parallel, spikes), StepSplit(parallel.device)
    drops = spikes.drops if run.config.spike == "skip" else None
    best = Best(run.config.patience)
    if run.checkpoint is not None:
        state.restore(run.checkpoint, meter, parallel, best)
        log.spikes = spikes.found
    predicted = predicted_gib(run)
    vote = Vote(stop, parallel, run.steps_done)

    def validated(step: int) -> None:
        if len(data.val):
            row: dict[str, Any] = {"step": step, "tokens_seen": meter.tokens_seen}
            row |= validate(state.module, data, run, parallel)
            if run.config.passkey.enabled:
                row |= facts_found(state.module, data, run)
            log.record(row)
            require_finite("validation loss", row.get("val_loss", 0.0), step, run)
            best.add(step, row)

    saver.begin(state, data.fingerprint)
    log.begin()
    batches = step_batches(run, schedule, parallel)  # its workers read while the model validates
    if not run.steps_done:
        validated(0)
    stop.wait()
    meter.begin()
    for step, batch in zip(range(run.steps_done + 1, run.max_steps + 1), batches, strict=False):
        # Forward and backward, clipping, update, learning rate
        meter.batch_arrived()
        split.begin(wanted=run.logs(step))
        batch = batch.to(parallel.device)
        loss = optimizer_step(state, batch, parallel, split.mark, drops)
        meter.add(batch, loss)
        log.stepped(step)
        if step == run.steps_done + 1:
            freeze_garbage()
            saver.prepare(step)
        saver.check()

        # Log
        if run.logs(step):
            row = {"step": step} | meter.row(state.module.grad_norm) | split.row()
            row["memory_predicted_gib"] = predicted
            row["lr"] = learning_rate(step - 1, run)
            row["epoch"] = schedule.epoch(step)
            log.record(row)
            require_finite("loss", row.get("loss", 0.0), step, run)

        # Validate; wandb starts after the first step, before which it has nothing to show
        last = step == run.max_steps
        with meter.set_aside():
            log.start_wandb(kernels_run())
            if last or step % run.val_every == 0:
                validated(step)
            if run.samples(step):
                log.sample(step, meter.tokens_seen, sample(state.module, data, run, parallel))

        # Save
        stopped = vote.stops(step, waits_anyway=run.logs(step))
        is_best = run.config.keep_best and best.step == step
        ends = last or stopped or best.is_over
        if ends or is_best or step % run.config.checkpoint_every == 0:
            if not spikes.lost:
                require_finite("gradient norm", float(state.module.grad_norm), step, run)
            with meter.set_aside():
                require_finite_state(state, step, run, parallel)
                saver.save(meter, best, step, last=ends)
        if best.is_over:
            log.patience_ended(None if last else best.describe(step))
        if stopped or best.is_over:
            break
        meter.waits()


class DataDiffers(ValueError):
    """Ranks see different documents, or split or tokenize them differently."""


def shared_data(run: Run, parallel: Parallel) -> Data | Mixture:
    """Open the data of `run`; raise DataDiffers, on every rank, unless all ranks see the same.

    Each rank opens files of its own machine at a time of its own, so they may differ.
    """
    data = run.data or load(data_config(run.config), run.workload.seq_len)
    expected, *others = parallel.all_gather_objects(data.identity())
    for rank, found in enumerate(others, start=1):
        for name, value in expected.items():
            if found[name] != value:
                raise DataDiffers(
                    f"data={run.config.data.source}: ranks do not have the same {name}: "
                    f"rank 0 has {value}, rank {rank} has {found[name]}; give all ranks the same "
                    "files, and change none while the run starts"
                )
    return data


def step_batches(run: Run, schedule: Schedule, parallel: Parallel) -> Iterator[StepBatch]:
    """The batches of this rank, from the next step on, read ahead by worker processes."""
    order = schedule.order(parallel.data_rank, run.steps_done)
    return read_ahead(train_loader(run.workload, schedule.rows, order, run.config.workers))


def require_finite_state(state: TrainState, step: int, run: Run, parallel: Parallel) -> None:
    """Raise FloatingPointError, on every rank, where a weight or an average of any of them is not
    finite: such a state is never saved, so that no checkpoint before it goes.
    """
    name = parallel.first_problem(checkpoint_folder.not_finite(state.tensors()))
    if name is not None:
        raise FloatingPointError(
            f"{name} is not finite after step {step}, so that is not saved; {smaller_steps(run)}"
        )


def smaller_steps(run: Run) -> str:
    """What to try where training diverges."""
    return f"try a smaller lr or longer warm-up (lr={run.lr} warmup_steps={run.warmup_steps})"


def require_finite(name: str, value: float, step: int, run: Run) -> None:
    """Raise FloatingPointError unless `value` is finite."""
    if math.isfinite(value):
        return
    advice = smaller_steps(run)
    if not step:
        init = run.config.init
        cause = f"init={init}" if init else f"model.init_std={run.workload.model.init_std}"
        advice = f"the weights that the run begins with make it so ({cause})"
    raise FloatingPointError(f"the {name} is {value} at step {step}; {advice}")


def predicted_gib(run: Run) -> float:
    """Peak memory that is expected: of a GPU, or of this process, whose model is there already and
    which copies what it saves.
    """
    expected = predict(run.workload)
    if run.workload.device == "cuda":
        return expected.peak / GIB
    copy = expected.saved if run.saves_between(run.steps_done) else 0.0
    return (resident() + expected.peak - expected.gpu[PARAMETERS] + copy) / GIB


def freeze_garbage() -> None:
    """Leave what lives after the first step, libraries and compiled code, out of later collections.

    A full collection looks through all of torch for 0.2 to 0.4 s, at random, and on each rank at
    another step, for which all others wait.
    """
    gc.collect()
    gc.freeze()


def free_memory(device: str) -> None:
    """Give back what the steps held of a GPU's memory, and of page-locked memory, while the last
    checkpoint is written: else the exit of the process would take that long.
    """
    if device == "cuda":
        torch.cuda.synchronize()  # copies from and to page-locked memory may be under way
        HostBuffers.free()
        torch.cuda.empty_cache()


def without_lost_connections(show: Callable[..., Any]) -> Callable[..., Any]:
    """`show`, an excepthook, but for threads that served a data worker which is gone: the run says
    that in a line of its own.
    """

    def hook(kind: type[BaseException], error: BaseException, trace: Any) -> None:
        in_thread = threading.current_thread() is not threading.main_thread()
        if not (in_thread and isinstance(error, ConnectionError | EOFError)):
            show(kind, error, trace)

    return hook


class Vote:
    """Whether a run stops: a signal that has reached any rank, agreed on by all of them.

    Ranks wait for one another to agree, so they ask where they wait anyway, and some seconds after
    they last did: SLURM leaves a minute.
    """

    EVERY = 10.0  # seconds

    def __init__(self, stop: StopSignal, parallel: Parallel, steps_done: int) -> None:
        self.stop, self.parallel = stop, parallel
        self.asked_at, self.asked_after = time.monotonic(), steps_done
        self.next_step = steps_done + 1

    def stops(self, step: int, waits_anyway: bool) -> bool:
        """Whether the run stops after `step`."""
        if self.parallel.ranks == 1:
            return self.stop.number is not None
        if not waits_anyway and step < self.next_step:
            return False
        now = time.monotonic()
        seconds = (now - self.asked_at) / (step - self.asked_after)
        mine = torch.tensor([self.stop.number or 0, seconds], device=self.parallel.device)
        number, seconds = self.parallel.all_reduce_max(mine).tolist()
        self.asked_at, self.asked_after = now, step
        self.next_step = step + max(1, int(self.EVERY / seconds))
        if number:  # else keep one that came while the ranks spoke, for the next time they do
            self.stop.number = int(number)
        return number > 0


def train_safely(run: Run, parallel: Parallel, stop: StopSignal) -> int:
    """Train and report; return the exit code once what the last checkpoint replaces is deleted. A
    signal ends the deletion and changes no code: all is saved.
    """
    log = RunLog(run, parallel)
    saver = Saver(run, parallel, log)
    try:
        code = train_and_report(run, parallel, log, stop, saver)
    except KeyboardInterrupt:
        saver.cancel_removal()
        raise
    has_begun = stop.waits
    try:
        stop.waits = False
        saver.end_removal()
    except KeyboardInterrupt:
        saver.cancel_removal()
        log.say("stopped    deleting older checkpoints; the next resume deletes the rest")
    finally:
        stop.waits = has_begun  # `train` takes away a new run that a signal ends before it begins
    return code


def train_and_report(
    run: Run, parallel: Parallel, log: RunLog, stop: StopSignal, saver: Saver
) -> int:
    """Run `loop`; print how the run begins and ends; return the exit code of each outcome."""
    work = run.workload
    state_of_gc = gc.get_freeze_count()
    code: int = 1
    problem: str | None = None
    stopped = False
    untrained = False  # a new run that ends before its first step leaves no folder
    try:
        with within_memory(work.device), saver:
            loop(run, parallel, log, stop, saver)
            free_memory(work.device)
            saver.finish()
        parallel.shut_down()
        stopped = stop.number is not None and log.steps_done < run.max_steps
        code = stop.code if stopped else 0
    except KeyboardInterrupt:
        parallel.abandon()
        code = stop.code
        raise
    except (context_check.CheckFailed, DataDiffers) as error:  # on every rank
        code = files.exit_code(error)
        parallel.shut_down()
        if not parallel.is_first:
            return 0  # the first says it for all
        problem, untrained = str(error), run.checkpoint is None
    except (SelfTestFailed, CaptureFailed, FloatingPointError) as error:
        problem = str(error)
    except (RuntimeError, MemoryError) as error:
        if is_out_of_memory(error):
            problem = out_of_memory.explain(work, log.steps_done)
        elif parallel.is_lost_connection(error):
            first = str(error).splitlines()[0].partition(". ")[0]
            problem = f"a process of the run is gone ({first}); {go_on()}"
        elif is_lost_worker(error):
            problem = f"{lost_worker(error)}; {go_on()}"
        else:
            raise
    finally:
        if gc.get_freeze_count() > state_of_gc:
            gc.unfreeze()
        log.end(code)
    if untrained:
        shutil.rmtree(run.folder, ignore_errors=True)
    else:
        log.summary(code, stop.name if stopped else None)
    if problem:
        if parallel.is_first:
            print(f"error: {problem}", file=sys.stderr, flush=True)
        parallel.fail(problem, code)
    return code
