"""Training: one loop, which shows the order of a step.

The life cycle (life_cycle.py) owns what comes before and after; callbacks own what is optional.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from longctx.parallel.mesh import Parallel
from longctx.runs import checkpoints
from longctx.training import context_check, memory
from longctx.training.batches import Sequences, shared_data, step_batches
from longctx.training.callbacks import Callback, Callbacks, EarlyStopping, Parts, Spikes
from longctx.training.run import Run
from longctx.training.run_log import RunLog
from longctx.training.saver import Saver
from longctx.training.throughput import Meter, StepSplit
from longctx.training.train_step import TrainState, optimizer_step, require_finite
from longctx.training.validation import validate
from longctx.untrusted import opened

if TYPE_CHECKING:
    from longctx.training.life_cycle import LifeCycle


def loop(run: Run, parallel: Parallel, log: RunLog, life: LifeCycle, saver: Saver) -> None:
    """Train every step of `run`: forward and backward, clip, update, log, validate, save, stop."""
    data = shared_data(run, parallel)
    # A plugin may count on whole sequences, such as an objective that takes logits
    may_err = bool(run.config.plugins) and parallel.context.ranks.count > 1
    if run.config.context.check or (may_err and run.config.context.check is None):
        log.checked(context_check.compare_with_one(run, data, parallel))
    objective, state = run.config.objective.traits, TrainState(run, parallel)
    prepared: dict[str, Any] = {}  # checkpoints hold it
    if objective.prepare is not None:
        prepared = objective.prepare(run, data, state.module, parallel)
    sequences = Sequences(run, data)
    spikes, early_stopping = Spikes(run.config, log.say), EarlyStopping(run, log)
    meter = Meter(run.workload, parallel, objective.figures)
    callbacks = Callbacks([spikes, early_stopping], Parts(run, data, parallel, state, meter, log))
    drops = spikes.drops if run.config.spike == "skip" else None

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
    predicted = memory.predicted_gib(run)

    def validated(step: int) -> None:
        if not len(data.val):
            return
        row: dict[str, Any] = {"step": step, "tokens_seen": meter.tokens_seen}
        row |= validate(state.module, data, run, parallel)
        callbacks.each("validated", step, row)
        log.record(row)
        require_finite("validation loss", row.get("val_loss", 0.0), step, run)

    saver.begin(state, data.fingerprint)
    log.bar.start()
    batches = step_batches(run, sequences, parallel)  # its workers read while the model validates
    if not run.steps_done:
        validated(0)
    life.begin_steps()
    meter.begin()
    for step, batch in zip(range(run.steps_done + 1, run.max_steps + 1), batches, strict=False):
        # Forward and backward, clipping, update, learning rate
        meter.batch_arrived()
        split = StepSplit(parallel.device, measures=run.logs(step))
        batch = batch.to(parallel.device)
        loss = optimizer_step(state, batch, parallel, split.mark, drops)
        meter.add(batch, loss, state.module.taken_figures(), spikes.lost)
        log.stepped(step)
        if step == run.steps_done + 1:
            memory.freeze_garbage()
        saver.check()

        # Log
        if run.logs(step):
            row = {"step": step} | meter.row(state.module.grad_norm) | split.row()
            row |= state.module.model.figures()
            row["memory_predicted_gib"] = predicted
            row["lr"] = run.schedule.rate(step - 1)
            row["epoch"] = sequences.epoch(step)
            callbacks.each("logged", row)
            log.record(row)
            require_finite("loss", row.get("loss", 0.0), step, run)

        # Validate, and what callbacks do between two steps
        last = step == run.max_steps
        with meter.set_aside():
            if step == run.steps_done + 1:
                log.start_copies()
            if last or step % run.val_every == 0:
                validated(step)
            callbacks.each("stepped", step)

        # Save, stop
        stopped = life.stops(step - run.steps_done, waits_anyway=run.logs(step))
        ends = any([last, stopped, *callbacks.each("ends")])
        is_best = step == early_stopping.kept_step
        if ends or is_best or step % run.config.checkpoint_every == 0:
            if not spikes.lost:
                require_finite("gradient norm", float(state.module.grad_norm), step, run)
            with meter.set_aside():
                state.require_finite(step, parallel)
                content = {name: part.state() for name, part in stateful.items()}
                content["objective"] = prepared
                saver.save(content, step, ends, early_stopping.kept_step)
        if ends:
            break
        meter.waits()
    callbacks.each("ended")
