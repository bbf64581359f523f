"""Training: one loop, which shows the order of a step.

The life cycle (life_cycle.py) owns what comes before and after; callbacks own what is optional.
"""

from __future__ import annotations

import gc
import time
from typing import Any

import torch

from longctx import system
from longctx.parallel.mesh import Parallel
from longctx.runs import checkpoints
from longctx.system import StopSignal
from longctx.training import context_check, memory
from longctx.training.batches import Sequences, read_ahead, shared_data
from longctx.training.callbacks import Callback, Callbacks, EarlyStopping, Parts, Spikes
from longctx.training.run import Run
from longctx.training.run_log import RunLog
from longctx.training.saver import Saver
from longctx.training.throughput import Meter
from longctx.training.train_step import TrainState, optimizer_step, require_finite
from longctx.training.validation import validate
from longctx.untrusted import opened

AGREE_EVERY = 10.0  # seconds between two looks at the other ranks' signals; SLURM gives 60


class Stops:
    """Ask after each step whether the run stops because a signal has reached any rank."""

    def __init__(self, parallel: Parallel, stop: StopSignal) -> None:
        self.parallel, self.stop = parallel, stop

    def begin(self) -> None:
        """Let signals wait for the step's end from now on; raise KeyboardInterrupt if one came."""
        system.check()
        self.stop.waits = True
        self.asked_at, self.asked_after, self.next_question = time.monotonic(), 0, 1

    def after(self, steps: int, waits_anyway: bool) -> bool:
        """Return True, on every rank, if the run stops after these `steps` of this process."""
        # Agreeing makes ranks wait for one another: they agree if the step `waits_anyway`, and
        # otherwise every AGREE_EVERY seconds.
        if self.parallel.ranks == 1:
            return self.stop.number is not None
        if not waits_anyway and steps < self.next_question:
            return False
        now = time.monotonic()
        seconds = (now - self.asked_at) / (steps - self.asked_after)
        mine = torch.tensor([self.stop.number or 0, seconds], device=self.parallel.device)
        number, seconds = self.parallel.all_reduce_max(mine).tolist()
        self.asked_at, self.asked_after = now, steps
        self.next_question = steps + max(1, int(AGREE_EVERY / seconds))
        # A signal that came while the ranks agreed counts the next time
        if number:
            self.stop.number = int(number)
        return number > 0


def loop(run: Run, parallel: Parallel, log: RunLog, stops: Stops, saver: Saver) -> None:
    """Train every step of `run`: forward and backward, clip, update, log, validate, save, stop."""
    data = shared_data(run, parallel)
    # A plugin may expect whole sequences, such as an objective that takes logits
    may_err = bool(run.config.plugins) and parallel.context.ranks.count > 1
    if run.config.context.check or (may_err and run.config.context.check is None):
        log.checked(context_check.compare_with_one(run, data, parallel))
    objective, state = run.config.objective.traits, TrainState(run, parallel)
    prepared: dict[str, Any] = {}  # checkpoints hold it
    if objective.prepare is not None:
        prepared = objective.prepare(run, data, state.module, parallel)
    sequences = Sequences(run, data)
    meter = Meter(run.workload, parallel, objective.figures)
    parts = Parts(run, data, parallel, state, meter, log)
    spikes, early_stopping = Spikes(parts), EarlyStopping(parts)
    callbacks = Callbacks([spikes, early_stopping], parts)

    # Whatever has a state is registered here, by its name in checkpoints
    stateful: dict[str, Meter | Callback | Callbacks] = {
        "meter": meter,
        "spikes": spikes,
        "best": early_stopping,
        "callbacks": callbacks,
    }
    if run.checkpoint is not None:
        with opened(run.checkpoint):
            content = checkpoints.read(run.checkpoint)
            state.restore(content)
            for name, part in stateful.items():
                part.restore(content.get(name, {}))
            checkpoints.restore_random_state(content["random"])

    def validated(step: int) -> None:
        if not len(data.val):
            return
        row: dict[str, Any] = {"step": step, "tokens_seen": meter.tokens_seen}
        row |= {key: float(x) for key, x in validate(state.module, data, run, parallel).items()}
        callbacks.each("validated", step, row)
        log.record(row)
        require_finite("validation loss", row.get("val_loss", 0.0), step, run)

    log.bar.start()
    # Workers read the first batches while the model validates
    order = sequences.order(parallel.data_rank, run.steps_done)
    batches = read_ahead(run, sequences.dataset, order, run.config.workers)
    if not run.steps_done:
        validated(0)
    stops.begin()
    meter.begin()
    for step, batch in zip(range(run.steps_done + 1, run.max_steps + 1), batches, strict=False):
        # Forward and backward, clipping, update, learning rate
        meter.batch_arrived(measures=run.logs(step))
        loss = optimizer_step(state, batch, parallel, meter.mark)
        meter.add(batch, loss, state.module.taken_figures())
        log.stepped(step)
        # Objects of libraries and compiled code live on. A collection that scans them takes 0.2 to
        # 0.4 s, on each rank at another step, and all other ranks wait for it
        if step == run.steps_done + 1:
            gc.collect()
            gc.freeze()
        saver.check()

        # Log
        if run.logs(step):
            row = {"step": step} | meter.row(state.module.grad_norm)
            row |= state.module.model.figures() | memory.predicted(run)
            row["lr"] = run.schedule.rate(step - 1)
            row["epoch"] = sequences.epoch(step)
            callbacks.each("logged", row)
            log.record(row)
            require_finite("loss", row.get("loss", 0.0), step - meter.back, run)

        # Validate, and what callbacks do between two steps
        last = step == run.max_steps
        with meter.set_aside():
            if step == run.steps_done + 1:
                log.start_copies()
            if last or step % run.val_every == 0:
                validated(step)
            callbacks.each("stepped", step)

        # Save, stop
        stopped = stops.after(step - run.steps_done, waits_anyway=run.logs(step))
        ends = any([last, stopped, *callbacks.each("ends")])
        best = early_stopping.kept_step
        if ends or step == best or step % run.config.checkpoint_every == 0:
            require_finite("gradient norm", float(state.module.grad_norm), step, run)
            with meter.set_aside():
                state.require_finite(step, parallel)
                content = {name: part.state() for name, part in stateful.items()}
                content["objective"] = prepared
                saver.save(state, content, data.fingerprint, step, ends, best)
        if ends:
            break
        meter.waits()
    callbacks.each("ended")
    memory.free(run.workload.device)
