"""The step that the keys of a run ask for, and what they leave to the planner.

A resumed run continues with its sequences per step on other devices, too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path

from longctx.attention.description import AttentionConfig
from longctx.config import presets
from longctx.config.asked import divisions, with_vocabulary, workload_of
from longctx.config.fields import refuse
from longctx.config.train_config import TrainConfig
from longctx.parallel.launch import launched
from longctx.runs import run_folder
from longctx.spec.step import Division, Workload
from longctx.training.pretrained import Choice


def step_of(
    choice: Choice, tokens: int, overrides: Collection[str], say: Callable[[str], None]
) -> Workload:
    """Return the step that is asked for, with the choices that it leaves to the planner, for a
    tokenizer of so many `tokens`.
    """
    config, model, device = choice.config, choice.model, choice.device
    step = with_vocabulary(workload_of(config, device, choice.seq_len, model), tokens)
    possible = divisions(config, model)
    if config.resume:
        possible = with_steps_of_run(possible, config, overrides)
    step = replace(
        step,
        machines=launched(config).nodes,
        divisions=tuple(possible),
        backends=tuple(AttentionConfig(**presets.read("attention", name)) for name in choice.able),
        merges=config.batch_size is None and config.accumulate is None,
        is_longest=config.seq_len == "max",
    )
    return replace(step, measured=model.measured(step, say))


def with_steps_of_run(
    each: Sequence[Division], config: TrainConfig, overrides: Collection[str]
) -> list[Division]:
    """Return the divisions that keep the sequences per step of a resumed run, on the devices of
    this request. `batch_size` and `accumulate` are fixed if `overrides` names them. ValueError if
    there is no such division.
    """
    saved = run_folder.read_config(Path(config.resume or ""))
    total = run_folder.sequences_per_step(saved)
    possible: list[Division] = []
    for division in each:
        groups = config.devices // division.context
        batch_size = config.batch_size if "batch_size" in overrides else None
        accumulate = config.accumulate if "accumulate" in overrides else None
        # No larger micro-batch than the run's own, which is known to fit
        if batch_size is None and accumulate is None:
            batch_size = math.gcd(saved["batch_size"], total // groups)
        batch_size = batch_size or total // groups // (accumulate or 1)
        accumulate = accumulate or total // groups // batch_size
        if batch_size * accumulate * groups == total:
            possible += [division._replace(batch_size=batch_size, accumulate=accumulate)]
    names = ["devices", *(name for name in ("batch_size", "accumulate") if name in overrides)]
    asked = " ".join(f"{name}={getattr(config, name)}" for name in names)
    problem = f"{asked}: a step of the run has {total} sequences, which cannot be divided so; give "
    rule = f"numbers with groups of devices × batch_size × accumulate = {total}"
    refuse((not possible, problem + rule))
    return possible
