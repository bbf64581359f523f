"""A training run with nothing left to decide: `resolve` returns it, everything else reads it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from longctx.config.asked import workload_of
from longctx.config.fields import build
from longctx.config.train_config import TrainConfig
from longctx.data import Data
from longctx.planner import Plan
from longctx.spec.step import Workload
from longctx.training.learning_rate import Schedule, keys_of, schedule_of

TOKENS_PER_VALIDATION = {"cuda": 262144, "cpu": 32768}


@dataclass(frozen=True)
class Run:
    """One training run with nothing left to decide.

    Decisions of `resolve` are fields here or in `workload`; `config` has the keys as asked.
    """

    config: TrainConfig  # as asked, with absolute paths
    workload: Workload  # what a step computes: device, sizes, model, memory policy
    max_steps: int
    lr: float  # peak learning rate
    warmup_steps: int
    val_every: int
    val_rows: int  # 0: all
    model_source: str = ""  # such as "tiny (model=auto)" or "weights of FOLDER"
    folder: Path = Path()
    checkpoint: Path | None = None  # a resumed run continues from it
    damaged: dict[Path, str] = field(default_factory=dict)  # newer ones, and their damage
    steps_done: int = 0  # at that checkpoint
    kernel_lock: dict[str, Any] | None = None
    lock_note: str = ""  # about kernels that changed
    rate_note: str = ""  # about a resumed run's learning rate, if it jumps
    saved: dict[str, Any] = field(default_factory=dict)  # `settings`, as in config.yaml
    plan: Plan | None = None  # what was predicted of a step, and why its layout was chosen
    data: Data | None = field(default=None, compare=False, repr=False)

    @property
    def schedule(self) -> Schedule:
        """Return the rates of the steps."""
        config = self.config
        return Schedule(
            config.lr_schedule, self.lr, self.max_steps, self.warmup_steps, keys_of(config)
        )

    @property
    def caches_reference(self) -> bool:
        """Return True if the objective's reference is computed once for all answers."""
        with_lora = self.workload.lora.rank is not None
        asked = getattr(self.config.objective, "reference", None)
        return (asked or ("step" if with_lora else "cached")) == "cached"

    def logs(self, step: int) -> bool:
        """Return True if a row is logged after `step`: first, last, every few, if it validates."""
        every = step % self.config.log_every and step % self.val_every
        return step in (1, self.max_steps) or not every

    def settings(self) -> dict[str, Any]:
        """Return every key of the configuration as decided, for config.yaml."""
        workload, context = self.workload, self.config.context
        # Without sharing, the method stays open
        method = workload.context_method if workload.context > 1 else context.method
        decided = {
            "seq_len": workload.seq_len,
            "batch_size": workload.batch_size,
            "accumulate": workload.accumulate,
            "max_steps": self.max_steps,
            "max_tokens": None,
            "lr": self.lr,
            "warmup_steps": self.warmup_steps,
            "val_every": self.val_every,
            "val_rows": self.val_rows,
            "precision": workload.precision,
            "compile": str(workload.compile).lower(),
            "devices": workload.devices,
            # "none" is no word of the command line: one device shares nothing
            "strategy": {"name": "auto" if workload.strategy == "none" else workload.strategy},
            "context": asdict(replace(context, degree=workload.context, method=method)),
            "model": asdict(workload.model),
            "memory": asdict(workload.memory),
            "optimizer": asdict(workload.optimizer),
            "name": self.folder.name or self.config.name,
        }
        decided |= keys_of(self.config)
        if self.config.kernel.lock == "record":  # new kernels are accepted once, not for ever
            decided["kernel"] = {"lock": "auto"}
        return json.loads(json.dumps(asdict(self.config) | decided))


def scheduled(config: TrainConfig, workload: Workload) -> Run:
    """Return a run of `workload` with its steps, learning rate and validations, but no folder."""
    schedule = schedule_of(config, workload)
    sequences = max(1, TOKENS_PER_VALIDATION[workload.device] // workload.seq_len)
    return Run(
        config=config,
        workload=workload,
        max_steps=schedule.max_steps,
        lr=schedule.lr,
        warmup_steps=schedule.warmup_steps,
        val_every=config.val_every or max(20, -(-schedule.max_steps // 5)),
        val_rows=sequences if config.val_rows is None else config.val_rows,
    )


def run_of(settings: dict[str, Any], device: str) -> Run:
    """Return the run with these `settings` (see `Run.settings`) on "cuda" or "cpu"."""
    config = build(TrainConfig, settings)
    assert isinstance(config.seq_len, int)
    return scheduled(config, workload_of(config, device, config.seq_len))
