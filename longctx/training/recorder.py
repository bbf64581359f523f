"""What happens around the steps: logging, validation, checkpoints, signals. Nothing here changes
gradients.
"""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist

from longctx.attention import kernels_run
from longctx.config.train_config import CompleteConfig
from longctx.data import Data, Mixture
from longctx.planner.hardware import GIB
from longctx.planner.peak_memory import PARAMETERS, predict
from longctx.runs import checkpoints
from longctx.runs.tracking import Tracker
from longctx.training.batches import StepBatch
from longctx.training.console import Display
from longctx.training.lr_schedule import learning_rate
from longctx.training.module import TrainingModule
from longctx.training.split import StepSplit
from longctx.training.throughput import Meter, resident
from longctx.training.validation import facts_found, validate


class Recorder(pl.Callback):
    """Logs to `tracker` and `display` (None on ranks other than the first), validates on `data`,
    saves to `folder`.

    A row is logged after the first step, after every `log_every`, and before each validation and
    the end. SIGTERM and Ctrl-C end the run after the step at hand (on several devices, after the
    next logged one), with a checkpoint; a second one ends it at once.
    """

    def __init__(
        self,
        config: CompleteConfig,
        folder: Path,
        data: Data | Mixture,
        tracker: Tracker | None,
        display: Display,
        facts: dict[str, Any],
        epoch: Callable[[int], float],
    ) -> None:
        self.config, self.folder, self.data, self.tracker, self.display = (
            config,
            folder,
            data,
            tracker,
            display,
        )
        self.facts, self.epoch = facts, epoch
        self.stopped_by: int | None = None
        self.meter: Meter
        self.split: StepSplit
        self._handlers: dict[int, Any] = {}
        self._idle_since = 0.0
        self._predicted = 0.0

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self.meter = Meter(
            self.config.model,
            trainer.strategy.root_device,
            self.config.lora.parameters(self.config.model),
        )
        self.split = StepSplit(trainer.strategy.root_device)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        assert isinstance(pl_module, TrainingModule)
        for number in (signal.SIGINT, signal.SIGTERM):
            self._handlers[number] = signal.signal(number, self._on_signal)
        self._predicted = self._predicted_peak()
        self.display.start()
        if pl_module.steps_done == 0:
            self._validate(pl_module)
        self.meter.begin()
        self._idle_since = self.meter.started

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        assert isinstance(pl_module, TrainingModule)
        self.meter.waited += time.perf_counter() - self._idle_since
        self.split.begin(wanted=self._logs(pl_module.steps_done + 1))

    def on_before_backward(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: torch.Tensor
    ) -> None:
        self.split.mark("forward")

    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.split.mark("backward")

    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: StepBatch,
        batch_idx: int,
    ) -> None:
        assert isinstance(pl_module, TrainingModule)
        config, step = self.config, pl_module.steps_done
        self.split.mark("optimizer")
        self.meter.add(batch, outputs["loss"])
        self.display.stepped(step)
        last = step == config.max_steps
        validates, logs = last or step % config.val_every == 0, self._logs(step)
        if logs:
            self._log_step(pl_module)
        with self.meter.set_aside():
            if self.tracker is not None:
                problem = self.tracker.start_wandb(self.facts | {"kernels": kernels_run()})
                if problem:
                    self.display.say(problem)
            if validates:
                self._validate(pl_module)
        # Several ranks wait for one another to agree, so they ask only where they wait anyway.
        stop = (logs or trainer.world_size == 1) and self._stop_wanted(trainer)
        if last or stop or step % config.checkpoint_every == 0:
            self._require_finite("gradient norm", float(pl_module.grad_norm), step)
            with self.meter.set_aside():
                self._save(trainer, step)
        if stop:
            trainer.should_stop = True
        self._idle_since = time.perf_counter()

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._handlers.clear()
        self.display.stop()

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        checkpoint["longctx"] = checkpoints.describe(
            self.config, self.data.fingerprint, trainer.world_size, self.facts["kernel_lock"]
        )
        checkpoint["meter"] = self.meter.state()
        checkpoint["random"] = checkpoints.random_state()

    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        self.meter.restore(checkpoint["meter"], trainer.is_global_zero)
        checkpoints.restore_random_state(checkpoint["random"])

    def _log_step(self, module: TrainingModule) -> None:
        step = module.steps_done
        row = {"step": step} | self.meter.row(module.grad_norm) | self.split.row()
        row["memory_predicted_gib"] = self._predicted
        row["lr"] = learning_rate(step - 1, self.config)
        row["epoch"] = self.epoch(step)
        self._record(row)
        self._require_finite("loss", row.get("loss", 0.0), step)

    def _logs(self, step: int) -> bool:
        """Whether there is a row after `step`; one is before each validation and at the end."""
        config = self.config
        return step in (1, config.max_steps) or not (
            step % config.log_every and step % config.val_every
        )

    def _predicted_peak(self) -> float:
        """GiB that `longctx.planner.peak_memory` expects: of a GPU, or of this process, whose model
        is there already.
        """
        predicted = predict(self.config, self.meter.device.type)
        if self.meter.device.type == "cuda":
            return predicted.peak / GIB
        return (resident() + predicted.peak - predicted.gpu[PARAMETERS]) / GIB

    def _require_finite(self, name: str, value: float, step: int) -> None:
        """Raise FloatingPointError otherwise, so that no checkpoint holds weights that are no
        numbers.
        """
        if not math.isfinite(value):
            config = self.config
            advice = f"try a smaller lr or longer warm-up (lr={config.lr} warmup_steps={config.warmup_steps})"
            if not step:
                began = (
                    f"init={config.init}"
                    if config.init
                    else f"model.init_std={config.model.init_std}"
                )
                advice = f"the weights that the run begins with make it so ({began})"
            raise FloatingPointError(f"the {name} is {value} at step {step}; {advice}")

    def _validate(self, module: TrainingModule) -> None:
        if len(self.data.val):
            row: dict[str, Any] = {"step": module.steps_done, "tokens_seen": self.meter.tokens_seen}
            row |= validate(module, self.data, self.config)
            if self.config.passkey.enabled:
                row |= facts_found(module, self.data, self.config)
            self._record(row)
            self._require_finite("validation loss", row.get("val_loss", 0.0), module.steps_done)

    def _record(self, row: dict[str, Any]) -> None:
        if self.tracker is not None:
            self.tracker.log(row)
        self.display.show(row)

    def _save(self, trainer: pl.Trainer, step: int) -> None:
        trainer.save_checkpoint(checkpoints.path_of(self.folder, step))
        if trainer.is_global_zero:
            checkpoints.tidy(self.folder, self.config.keep_checkpoints)
        if self.tracker is not None:
            self.tracker.checkpoint(checkpoints.path_of(self.folder, step), step)

    def _stop_wanted(self, trainer: pl.Trainer) -> bool:
        """Whether a signal reached any rank, agreed on by all of them."""
        if trainer.world_size == 1:
            return self.stopped_by is not None
        number = torch.tensor(self.stopped_by or 0, device=trainer.strategy.root_device)
        dist.all_reduce(number, op=dist.ReduceOp.MAX)
        agreed = int(number)
        if agreed:  # else keep one that came while the ranks spoke, for the next time they do
            self.stopped_by = agreed
        return agreed > 0

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.stopped_by is not None:
            raise KeyboardInterrupt
        self.stopped_by = number
