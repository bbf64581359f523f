"""From a request to a run: every decision, made once, in a pipeline of values.

    request → model → tokenizer → plan → schedule → data → kernel lock → folder → Run

Every mistake is found before the folder is made, so it leaves nothing behind. Nothing downstream
sees the request: it reads the frozen `Run` (run.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from longctx import planner
from longctx.attention.context_parallel import padded
from longctx.attention.description import AUTO
from longctx.config.fields import refuse
from longctx.config.presets import Request
from longctx.config.train_config import TrainConfig
from longctx.data import load, open_tokenizer
from longctx.model.context_extension import extended
from longctx.runs import run_folder
from longctx.spec.hardware import Machine
from longctx.spec.step import Workload
from longctx.training import dry_run, kernel_lock, pretrained, resume
from longctx.training.asked_step import step_of
from longctx.training.callbacks import CALLBACKS
from longctx.training.model_choice import choose_model
from longctx.training.run import Run, scheduled


def resolve(
    request: Request[TrainConfig], machine: Machine, say: Callable[[str], None] = print
) -> Run:
    """Decide everything about the run that `request` asks for on `machine`, and make its folder.

    A resumed run keeps the choices in its config.yaml. Raises ValueError or OSError, one line with
    a remedy, for whatever is wrong with the request.
    """
    device = machine.device_for(request.config.device, request.config.precision)
    choice = choose_model(request, device)
    config, size = choice.config, choice.model.vocab_size
    # What is unknown is opened first: the vocabulary decides much of the memory
    tokens = open_tokenizer(choice.data).vocab_size
    # A resumed run tells of its documents if they are others
    is_too_small = not config.resume and size is not None and size < tokens
    given = f"model.vocab_size={size}: the tokenizer has {tokens:,} tokens"
    refuse((is_too_small, f"{given}; use at least that"))
    step = step_of(choice, tokens, request.overrides.keys(), say)
    plan = planner.plan(step, machine, say, partial(dry_run.longest_of, config, machine, say))
    step = plan.step
    choice.model.check_length(step.seq_len, "seq_len")
    # Only now the length is known by which positions of trained weights are stretched
    if config.seq_len == "max" and choice.weights is not None:
        model, rope = extended(choice.model, config.rope, step.seq_len)
        choice = replace(choice, rope=rope)
        step = replace(step, model=replace(model, vocab_size=step.model.vocab_size))
    run = scheduled(replace(config, attention=step.attention), step)
    run.schedule.check(config)
    check_balance(step, config)
    data = load(choice.data, step.seq_len)
    source, share = config.data.source, config.data.val_fraction
    empty = f"data={source}: no document is left to train on; data.val_fraction={share}"
    refuse((not len(data.train), empty))
    for callback in CALLBACKS.values():
        callback.check(run, data)
    source = ", rope ".join(filter(None, (choice.source, choice.rope)))
    run = replace(run, model_source=source, data=data, plan=plan, saved=run.settings())
    run = kernel_lock.locked(resume.continued(run) if config.resume else run)
    if config.resume:
        return run
    names = request.choices | {"model": choice.name}
    if names["attention"] == AUTO:
        names["attention"] = step.attention.label
    stem = run_folder.stem(names, step.seq_len, request.overrides)
    return in_new_folder(run, stem, pretrained.texts_for_export(data, choice.weights))


def check_balance(step: Workload, config: TrainConfig) -> None:
    """Raise ValueError if experts are balanced and ranks that share sequences pad them."""
    for length in (step.seq_len, *(length for length, _ in config.seq_len_schedule or [])):
        whole = padded(length, step.context, step.context_method)
        pads = f"model.experts.balance with context={step.context} pads sequences of {length} to"
        problem = f"{pads} {whole} tokens, which the experts would balance too; use {whole} tokens"
        refuse((step.model.experts.balance and whole != length, problem))


def in_new_folder(run: Run, stem: str, texts: dict[str, str]) -> Run:
    """Make the folder of `run`, called name= or by `stem`, with `texts`; a dry run makes none."""
    root, name = Path(run.config.runs), run.config.name
    if run.config.dry_run:
        return replace(run, folder=root / (name or stem))
    folder = run_folder.create(root, name, stem)
    config, saved = replace(run.config, name=folder.name), run.saved | {"name": folder.name}
    run_folder.fill(folder, texts, saved, run.kernel_lock)
    return replace(run, config=config, saved=saved, folder=folder)
