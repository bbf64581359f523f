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


class Training:
    """The changing parts of a run; between two steps they log a row, validate and save."""

    def __init__(self, run: Run, parallel: Parallel, log: RunLog) -> None:
        self.run, self.parallel, self.log = run, parallel, log
        data = self.data = shared_data(run, parallel)
        # A plugin may expect whole sequences, such as an objective that takes logits
        may_err = bool(run.config.plugins) and parallel.context.ranks.count > 1
        if run.config.context.check or (may_err and run.config.context.check is None):
            log.checked(context_check.compare_with_one(run, data, parallel))
        objective, self.state = run.config.objective.traits, TrainState(run, parallel)
        self.prepared: dict[str, Any] = {}  # checkpoints hold it
        if objective.prepare is not None:
            self.prepared = objective.prepare(run, data, self.state.module, parallel)
        self.sequences = Sequences(run, data)
        self.meter = Meter(run.workload, parallel, objective.figures)
        parts = Parts(run, data, parallel, self.state, self.meter, log)
        spikes, self.best = Spikes(parts), EarlyStopping(parts)
        self.callbacks = Callbacks([spikes, self.best], parts)
        # Whatever has a state is registered here, by its name in checkpoints
        self.stateful: dict[str, Meter | Callback | Callbacks] = {"meter": self.meter}
        self.stateful |= {"spikes": spikes, "best": self.best, "callbacks": self.callbacks}
        if run.checkpoint is not None:
            with opened(run.checkpoint):
                content = checkpoints.read(run.checkpoint)
                self.state.restore(content)
                for name, part in self.stateful.items():
                    part.restore(content.get(name, {}))
                checkpoints.restore_random_state(content["random"])

    def log_row(self, step: int) -> None:
        """Log the steps since the last row; FloatingPointError if their loss is not finite."""
        row = {"step": step} | self.meter.row(self.state.module.grad_norm)
        row |= self.state.module.model.figures() | memory.predicted(self.run)
        row["lr"] = self.run.schedule.rate(step - 1)
        row["epoch"] = self.sequences.epoch(step)
        self.callbacks.each("logged", row)
        self.log.record(row)
        require_finite("loss", row.get("loss", 0.0), step - self.meter.back, self.run)

    def validate(self, step: int) -> None:
        """Log the loss of data that validates, if there is any."""
        if not len(self.data.val):
            return
        row: dict[str, Any] = {"step": step, "tokens_seen": self.meter.tokens_seen}
        losses = validate(self.state.module, self.data, self.run, self.parallel)
        row |= {key: float(x) for key, x in losses.items()}
        self.callbacks.each("validated", step, row)
        self.log.record(row)
        require_finite("validation loss", row.get("val_loss", 0.0), step, self.run)

    def save(self, saver: Saver, step: int, last: bool) -> None:
        """Begin to write a checkpoint, unless a weight or a gradient is not finite."""
        require_finite("gradient norm", float(self.state.module.grad_norm), step, self.run)
        with self.meter.set_aside():
            self.state.require_finite(step, self.parallel)
            content = {name: part.state() for name, part in self.stateful.items()}
            content["objective"] = self.prepared
            best = self.best.kept_step
            saver.save(self.state, content, self.data.fingerprint, step, last, best)


def loop(run: Run, parallel: Parallel, log: RunLog, stops: Stops, saver: Saver) -> None:
    """Train every step of `run`: forward and backward, clip, update, log, validate, save, stop."""
    training, first = Training(run, parallel, log), run.steps_done + 1
    state, meter, callbacks = training.state, training.meter, training.callbacks
    log.bar.start()
    # Workers read the first batches while the model validates
    order = training.sequences.order(parallel.data_rank, run.steps_done)
    batches = read_ahead(run, training.sequences.dataset, order, run.config.workers)
    if first == 1:
        training.validate(0)
    stops.begin()
    meter.begin()
    for step, batch in zip(range(first, run.max_steps + 1), batches, strict=False):
        # Forward and backward, clipping, update, learning rate
        meter.batch_arrived(measures=run.logs(step))
        loss = optimizer_step(state, batch, parallel, meter.mark)
        meter.add(batch, loss, state.module.taken_figures())
        log.stepped(step)
        # Objects of libraries and compiled code live on. A collection that scans them takes 0.2 to
        # 0.4 s, on each rank at another step, and all other ranks wait for it
        if step == first:
            gc.collect()
            gc.freeze()
        saver.check()
        if run.logs(step):
            training.log_row(step)

        # Validate, and what callbacks do between two steps
        last = step == run.max_steps
        with meter.set_aside():
            if step == first:
                log.start_copies()
            if last or step % run.val_every == 0:
                training.validate(step)
            callbacks.each("stepped", step)

        # Save, stop
        stopped = stops.after(step - run.steps_done, waits_anyway=run.logs(step))
        ends = any([last, stopped, *callbacks.each("ends")])
        is_best = step == training.best.kept_step
        if ends or is_best or step % run.config.checkpoint_every == 0:
            training.save(saver, step, ends)
        if ends:
            break
        meter.waits()
    callbacks.each("ended")
    memory.free(run.workload.device)
