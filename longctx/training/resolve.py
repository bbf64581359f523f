"""From a request to a run: every decision, made once, in a pipeline of values.

    request → model → tokenizer → plan → data → schedule → kernel lock → folder → Run

Every mistake is found before the folder is made, so it leaves nothing behind. Nothing downstream
sees the request: it reads the frozen `Run` (run.py).
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from longctx import planner
from longctx.attention.context_parallel import padded
from longctx.attention.description import AUTO, AttentionConfig
from longctx.config import presets
from longctx.config.asked import divisions, with_vocabulary, workload_of
from longctx.config.data_config import DataConfig
from longctx.config.presets import Request
from longctx.config.train_config import TrainConfig, check_warmup
from longctx.data import load, open_tokenizer
from longctx.data.sources.registry import pinned
from longctx.model import packed
from longctx.model.context_extension import extended
from longctx.parallel.devices import able_backends, check_attention
from longctx.parallel.launch import launched
from longctx.runs import run_folder
from longctx.spec.hardware import Machine
from longctx.spec.model_config import GPTConfig
from longctx.spec.step import Workload, precision_of
from longctx.training import compile_ahead, dry_run, kernel_lock, pretrained, resume
from longctx.training.batches import data_config
from longctx.training.callbacks import CALLBACKS
from longctx.training.run import Run, scheduled

SOME_LENGTH = 4096  # tokens of seq_len=max, for choices that are made before the length is known
Say = Callable[[str], None]


@dataclass(frozen=True)
class Choice:
    """The model of a run, and its keys as the model decides them."""

    config: TrainConfig
    device: str
    model: GPTConfig
    data: DataConfig  # with the tokenizer that the run reads
    name: str  # for the name of the folder
    source: str  # such as "tiny (model=auto)" or "weights of FOLDER"


def resolve(request: Request[TrainConfig], machine: Machine, say: Say = print) -> Run:
    """Decide everything about the run that `request` asks for on `machine`, and make its folder.

    A resumed run keeps the choices in its config.yaml. Raises ValueError or OSError, one line with
    a remedy, for whatever is wrong with the request.
    """
    device = machine.device_for(request.config.device, request.config.precision)
    choice = choose_model(request, device)
    config = choice.config
    # What is unknown is opened first: the vocabulary decides much of the memory
    tokens = vocabulary(choice)
    choice = choice if config.seq_len == "max" else stretched(choice, int(config.seq_len))
    step = step_of(choice, tokens, request.overrides.keys(), say)
    plan = planner.plan(step, machine, say, partial(dry_run.longest_of, config, machine, say))
    step = plan.step
    choice.model.check_length(step.seq_len, "seq_len")
    # Only now the length is known by which positions of trained weights are stretched
    if config.seq_len == "max":
        choice = stretched(choice, step.seq_len)
        step = replace(step, model=replace(choice.model, vocab_size=step.model.vocab_size))
    config = replace(config, attention=step.attention)
    # Kernels compile while documents are read
    wait_for_compilers = compile_ahead.begin(step)
    data = load(choice.data, step.seq_len)
    if not len(data.train):
        raise ValueError(
            f"data={config.data.source}: no document is left to train on; "
            f"data.val_fraction={config.data.val_fraction}"
        )
    wait_for_compilers()

    run = scheduled(config, step)
    check_schedule(run)
    for callback in CALLBACKS.values():
        callback.check(run, data)
    locks = config.kernel.lock != "off" and not config.dry_run
    run = replace(
        run,
        model_source=choice.source,
        layout_note=plan.note,
        data=data,
        memory=plan.memory,
        seconds=plan.time,
        kernel_lock=kernel_lock.of_workload(step) if locks else None,
    )
    if config.resume:
        return resume.continued(run)
    choices = request.choices | {"model": choice.name}
    if choices["attention"] == AUTO:
        choices["attention"] = config.attention.backend
    return begun(run, choices, request.overrides)


def choose_model(request: Request[TrainConfig], device: str) -> Choice:
    """Choose the model: a preset, the weights of a folder, or the model of a resumed run."""
    config, overrides = request.config, request.overrides
    model, name = config.model, request.choices.get("model", "")
    source = name
    if config.resume:
        # The method of the run may not suit the new degree
        changed = {"context.degree", "context.method"} & overrides.keys()
        if changed == {"context.degree"}:
            config = replace(config, context=replace(config.context, method="auto"))
    else:
        # The Hub's commit, so that every process and every resume reads the same documents
        config = replace(config, data=pinned(data_config(config)))
        if config.seq_len == "max":
            config = replace(config, batch_size=config.batch_size or 1)
    if config.init is not None and not config.resume:
        config, model, name, source = pretrained.model_of(config, overrides)
    elif name == "auto":
        decided = presets.with_model(request, gpu=device == "cuda")
        model, name = decided.config.model, decided.choices["model"]
        source = f"{name} (model=auto)"
    config = model.accepted(config)
    # Ranks that share a sequence split documents, so layers must not mix tokens either
    packing = config.data.packing or config.context.degree != 1
    model.prove(device, precision_of(config.precision, device), length_of(config), packing)
    config.check_model(model)
    if config.lora.base is not None:
        packed.bitsandbytes()
    return Choice(config, device, model, data_config(config), name, source)


def length_of(config: TrainConfig) -> int:
    """Return the tokens per sequence, or SOME_LENGTH for seq_len=max."""
    return SOME_LENGTH if config.seq_len == "max" else int(config.seq_len)


def step_of(choice: Choice, tokens: int, overrides: Collection[str], say: Say) -> Workload:
    """Return the step that is asked for, with the choices that it leaves to the planner, for a
    tokenizer of so many `tokens`.
    """
    config, model, device = choice.config, choice.model, choice.device
    is_open = config.attention.backend == AUTO
    able = able_backends(config, model, device) if is_open or device == "cuda" else []
    if not is_open:
        check_attention(config, model, device)
    possible = divisions(config, model)
    if config.resume:
        possible = resume.with_steps_of_run(possible, config, overrides)
    step = workload_of(config, device, length_of(config), model)
    step = replace(
        with_vocabulary(step, tokens),
        machines=launched(config).nodes,
        divisions=tuple(possible),
        backends=tuple(AttentionConfig(**presets.read("attention", name)) for name in able),
        merges=config.batch_size is None and config.accumulate is None,
        is_longest=config.seq_len == "max",
    )
    return replace(step, measured=model.measured(step, say))


def stretched(choice: Choice, seq_len: int) -> Choice:
    """Return `choice` with positions of trained weights stretched to `seq_len` as rope= says."""
    if choice.config.init is None or choice.config.resume:
        return choice
    model, rope = extended(choice.model, choice.config.rope, seq_len)
    return replace(choice, model=model, source=choice.source + (f", rope {rope}" if rope else ""))


def vocabulary(choice: Choice) -> int:
    """Return the tokens of the tokenizer, which is trained here if none is given; raise ValueError
    if the model has fewer.
    """
    config, size = choice.config, choice.model.vocab_size
    tokens = open_tokenizer(choice.data).vocab_size
    # A resumed run tells of its documents if they are others
    if not config.resume and size is not None and size < tokens:
        raise ValueError(
            f"model.vocab_size={size}: the tokenizer has {tokens:,} tokens; use at least that, or "
            "null to follow it"
        )
    return tokens


def check_schedule(run: Run) -> None:
    """Raise ValueError if warm-up takes more than all steps, the rate would fall before it or after
    the run, seq_len_schedule leaves no step for seq_len itself, or experts would balance padding.
    """
    if run.config.resume is None:
        check_warmup(run.config.warmup_steps, run.max_steps)
    run.schedule.check()
    stages = run.config.seq_len_schedule or []
    if sum(steps for _, steps in stages) >= run.max_steps:
        raise ValueError(
            f"seq_len_schedule={stages}: takes all {run.max_steps:,} steps; leave some for seq_len"
        )
    workload = run.workload
    for length in (workload.seq_len, *(length for length, _ in stages)):
        whole = padded(length, workload.context, workload.context_method)
        if workload.model.experts.balance and whole != length:
            raise ValueError(
                f"model.experts.balance with context={workload.context} pads sequences of {length} "
                f"to {whole} tokens, which the experts would balance too; use {whole} tokens"
            )


def begun(run: Run, choices: dict[str, str], overrides: dict[str, str]) -> Run:
    """Return the new run with its folder, which the presets in `choices` name; a dry run makes
    none.
    """
    config = run.config
    stem = run_folder.stem(choices, run.workload.seq_len, overrides)
    if config.dry_run:
        return replace(run, folder=Path(config.runs) / (config.name or stem))
    folder = run_folder.create(Path(config.runs), config.name, stem)
    run = replace(run, config=replace(config, name=folder.name), folder=folder)
    assert run.data is not None
    # A folder that is not complete would look like a run
    try:
        run.data.tokenizer.save(folder / "tokenizer.json")
        pretrained.keep_for_export(config, run.data, folder)
        (folder / "checkpoints").mkdir()
        run.write()
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return run
