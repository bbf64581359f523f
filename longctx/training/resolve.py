"""From what is asked for to what is done: every decision of a training run, made once, in order.

`resolve` reads top to bottom: device, model, attention, length, vocabulary, layout, memory policy,
schedule, kernel lock, folder. Everything that can be wrong is found before the folder is made, so a
mistake leaves nothing behind. What follows reads the frozen `Run` (run.py).
"""

from __future__ import annotations

import math
import os
import shutil
import sys
from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from longctx import files, hub_snapshot
from longctx.config import presets
from longctx.config.data_config import DataConfig
from longctx.config.model_config import GPTConfig
from longctx.config.presets import Request
from longctx.config.train_config import TrainConfig, check_warmup
from longctx.data import load, sources
from longctx.distributed.devices import check_attention, choose_device
from longctx.distributed.launched import launched
from longctx.model.context_extension import extended
from longctx.planner import fitting, hardware, layouts
from longctx.planner.hardware import Machine
from longctx.planner.workload import Workload, with_vocabulary, workload_of
from longctx.runs import checkpoints, metrics_file, run_folder
from longctx.training import compile_ahead, initial, kernel_lock, longest, saver
from longctx.training.child import DryRun
from longctx.training.out_of_memory import check_fits
from longctx.training.run import Run
from longctx.training.sweep import VARIED_VARIABLE
from longctx.training.validation import check_facts, check_validation

SOME_LENGTH = 4096  # tokens per row, to open the data of seq_len=max before its length is known
STEPS = {"cuda": 300, "cpu": 40}  # at most, where max_steps is not given
FLOPS_ON_CPU = 8e12  # what two slow cores do in 4 to 5 minutes
TOKENS_PER_VALIDATION = {"cuda": 262144, "cpu": 32768}
Say = Callable[[str], None]


def resolve(request: Request[TrainConfig], machine: Machine, say: Say = print) -> Run:
    """Decide everything about the run that `request` asks for on `machine`, and make its folder.

    A resumed run keeps what its config.yaml says. Raises ValueError or OSError, one line that says
    what to do, for whatever is wrong with the request.
    """
    config, resumed = request.config, request.config.resume is not None

    # Device
    device = choose_device(config, machine)

    # Model: a preset, the weights of a folder, or what the run began with
    config, model, source = choose_model(request, device)
    if resumed and {"context.degree", "context.method"} & request.overrides.keys() == {
        "context.degree"
    }:  # the method of the run may not go with another degree
        config = replace(config, context=replace(config.context, method="auto"))
    config.check_fp8(model)
    check_attention(config, model, device)
    open_layouts = layouts.each(config, model)
    if resumed:
        open_layouts = with_steps_of_run(open_layouts, request.overrides)

    if not resumed:  # before the data is read: every process and every resume reads the same
        config = replace(config, data=sources.pinned(config.data))

    # Length of a row, its vocabulary with it where the length depends on memory
    seq_len = config.seq_len
    if seq_len == "max":
        config = replace(config, batch_size=config.batch_size or 1)
        tokens = load(data_config(config), SOME_LENGTH).tokenizer.vocab_size
        seq_len = longest_rows(
            config, check_vocabulary(model, tokens), tokens, machine, device, say
        )
    assert isinstance(seq_len, int)
    if config.init is not None and not resumed:
        model, rope = extended(model, config.rope, seq_len)
        source += f", rope {rope}" if rope else ""
    is_probed = config.seq_len == "max"
    if not is_probed:  # before the data is opened, with the smallest vocabulary
        least = [step_of(one, device, seq_len, model, tokens=1) for one in open_layouts]
        check_fits(least, machine)
    of_trained = config.data.vocab_size  # words of a tokenizer that is trained here
    work = step_of(open_layouts[0], device, seq_len, model, of_trained)
    wait_for_compilers = compile_ahead.begin(work)
    data = load(data_config(config), seq_len)
    tokens = data.tokenizer.vocab_size
    check_vocabulary(model, tokens)
    candidates = [step_of(one, device, seq_len, model, tokens) for one in open_layouts]

    # Layout, memory policy, and the rows of a micro-batch where neither is given
    merge = config.batch_size is None and config.accumulate is None
    several = len(candidates) > 1
    work, reason = candidates[0], "nothing is predicted on a CPU"
    if device == "cuda" and (merge or several or config.memory.policy == "auto"):
        assert machine.gpu is not None
        work, reason = layouts.choose(candidates, machine.gpu, machine.host_memory, merge)
    elif device == "cuda":
        work = fitting.with_policy(work, config.memory.policy)

    work.check_graphs()
    if not is_probed:
        check_fits([work], machine)

    # Schedule
    run = scheduled(config, work)
    if several:
        run = replace(run, layout_note=f"{layouts.name_of(work)} (auto: {reason})")
    check_schedule(run)
    check_facts(data, config, seq_len)
    check_validation(data, config, request.overrides)

    # Kernel lock and folder: the first thing that is written
    wait_for_compilers()
    run = replace(run, model_source=source, data=data)
    if resumed:
        return continued(run)
    lock = kernel_lock.of_workload(work) if config.kernel.lock != "off" else None
    if not len(data.train):
        raise ValueError(
            f"data={config.data.source}: no document is left to train on; "
            f"data.val_fraction={config.data.val_fraction}"
        )
    folder = run_folder.create(
        Path(config.runs),
        config.name,
        run_folder.stem(
            choices_of(request, device),
            seq_len,
            request.overrides,
            varied=os.environ.get(VARIED_VARIABLE, "").split(","),
        ),
    )
    run = replace(run, config=replace(config, name=folder.name), folder=folder, kernel_lock=lock)
    fill_folder(run)
    return run


def choose_model(request: Request[TrainConfig], device: str) -> tuple[TrainConfig, GPTConfig, str]:
    """The configuration with what the model decides, the model, and where that is from."""
    config, preset = request.config, request.choices.get("model", "")
    if config.lora.rank is not None and config.init is None:
        raise ValueError(
            f"lora.rank={config.lora.rank}: adds to trained weights, and init= names none; "
            "leave lora out"
        )
    if config.init is not None and config.resume is None:
        config, model = initial.model_of_folder(config, request.overrides)
        from_hub = hub_snapshot.model_name(request.config.init or "") is not None
        return config, model, f"weights of {config.init if from_hub else request.config.init}"
    if preset != "auto":
        return config, config.model, preset
    model = presets.auto_model(config.model, request.overrides, device)
    return config, model, f"{presets.AUTO_MODEL[device]} (model=auto)"


def choices_of(request: Request[TrainConfig], device: str) -> dict[str, str]:
    """The preset of each group, for the folder's name; weights of a folder go by its name."""
    choices = dict(request.choices)
    if request.config.init is not None:
        from_hub = hub_snapshot.model_name(request.config.init)
        path = Path(request.config.init if from_hub is None else from_hub.name)
        path = path.parent.parent if path.suffix == ".ckpt" else path
        choices["model"] = path.name.lstrip(".-") or "model"
    elif choices["model"] == "auto":
        choices["model"] = presets.AUTO_MODEL[device]
    return choices


def data_config(config: TrainConfig) -> DataConfig:
    """Where documents and tokenizer come from.

    A run that began with `init` has that folder's tokenizer in its own.
    """
    if config.init is None or config.resume is None:
        return config.data
    return replace(config.data, tokenizer=config.resume)


def check_vocabulary(model: GPTConfig, tokens: int) -> GPTConfig:
    """`model`; ValueError where its vocabulary is smaller than the tokenizer's `tokens`."""
    if model.vocab_size is not None and model.vocab_size < tokens:
        raise ValueError(
            f"model.vocab_size={model.vocab_size}: the tokenizer has {tokens:,} tokens; "
            "use at least that, or null to follow it"
        )
    return model


def longest_rows(
    config: TrainConfig, model: GPTConfig, tokens: int, machine: Machine, device: str, say: Say
) -> int:
    """Tokens per row for seq_len=max; ValueError on a CPU, whose memory others use too."""
    if device != "cuda" or machine.gpu is None:
        raise ValueError(hardware.NO_LONGEST)

    candidates = [
        partial(step_of, one, "cuda", model=model, tokens=tokens)
        for one in layouts.each(config, model)
    ]
    if config.devices > 1 and any(longest.is_shared(at(SOME_LENGTH)) for at in candidates):
        return longest.predicted(candidates, machine.gpu, machine.host_memory, say)

    def probe(work: Workload) -> DryRun:
        return longest.probe(scheduled(config, work))

    return longest.find(candidates[0], probe, machine.gpu, machine.host_memory, say)


def step_of(
    config: TrainConfig, device: str, seq_len: int, model: GPTConfig, tokens: int
) -> Workload:
    """The step of `config`, its layout decided, with rows of `seq_len` and a vocabulary of
    `tokens`, on the machines that there are.
    """
    work = with_vocabulary(workload_of(config, device, seq_len, model), tokens)
    return replace(work, machines=launched(config).nodes)


def scheduled(config: TrainConfig, work: Workload) -> Run:
    """A run of `work` with its number of steps, learning rate and validations, but no folder."""
    if config.max_tokens is not None:
        steps = math.ceil(config.max_tokens / work.tokens_per_step)
    else:
        steps = config.max_steps or default_steps(work)
    rows = max(1, TOKENS_PER_VALIDATION[work.device] // work.seq_len)
    return Run(
        config=config,
        workload=work,
        max_steps=steps,
        lr=default_learning_rate(config, work.model) if config.lr is None else config.lr,
        warmup_steps=min(200, steps // 10) if config.warmup_steps is None else config.warmup_steps,
        val_every=config.val_every or max(20, math.ceil(steps / 5)),
        val_rows=rows if config.val_rows is None else config.val_rows,
    )


def default_steps(work: Workload) -> int:
    """Steps of a run that names none; on a CPU as many as it does in minutes."""
    if work.device == "cuda" or work.model.vocab_size is None:
        return STEPS[work.device]
    flops = work.tokens_per_step * work.model.flops_per_token(work.seq_len / 2)
    return max(3, min(STEPS["cpu"], int(FLOPS_ON_CPU / flops)))


def default_learning_rate(config: TrainConfig, model: GPTConfig) -> float:
    """The peak rate where none is given.

    From random weights near GPT-3's table of sizes; for trained ones as in YaRN (arXiv 2309.00071);
    ten times that for LoRA, whose additions begin at zero (arXiv 2405.09673).
    """
    if config.lora.rank is not None:
        return 2e-4
    return 2e-5 if config.init is not None else 0.5 / model.channels


def check_schedule(run: Run) -> None:
    """Raise ValueError where warm-up takes more than all steps, or seq_len_schedule leaves none for
    seq_len itself.
    """
    if run.config.resume is None:
        check_warmup(run.config.warmup_steps, run.max_steps)
    stages = run.config.seq_len_schedule or []
    if sum(steps for _, steps in stages) >= run.max_steps:
        raise ValueError(
            f"seq_len_schedule={stages}: takes all {run.max_steps:,} steps; leave some for seq_len"
        )


def with_steps_of_run(open_layouts: list[TrainConfig], given: Collection[str]) -> list[TrainConfig]:
    """Return the layouts in which a resumed run can continue with its sequences per step, split
    over the devices that are here, and into the batch_size and accumulate that are `given`.

    Raises ValueError if none can.
    """
    path = Path(open_layouts[0].resume or "")
    saved = run_folder.read_config(path)
    of_layout = {name: saved.get(name, 1) for name in ("devices", "context.degree")}
    numbers = of_layout | {name: saved.get(name) for name in ("batch_size", "accumulate")}
    devices, degree, *of_batch = numbers.values()
    is_count = [isinstance(number, int) and number > 0 for number in numbers.values()]
    if not all(is_count) or degree > devices:
        listed = ", ".join(f"{name}={number}" for name, number in numbers.items())
        raise ValueError(
            f"resume={path}: its config.yaml says {listed}, which no run writes; put back the "
            "numbers it trained with"
        )
    rows = math.prod(of_batch) * (devices // degree)
    possible = []
    for config in open_layouts:
        assert isinstance(config.context.degree, int)
        groups = config.devices // config.context.degree
        batch_size = config.batch_size if "batch_size" in given else None
        accumulate = config.accumulate if "accumulate" in given else None
        if batch_size is None and accumulate is None:
            batch_size = math.gcd(of_batch[0], rows // groups)
        batch_size = batch_size or rows // groups // (accumulate or 1)
        accumulate = accumulate or rows // groups // batch_size
        if batch_size * accumulate * groups == rows:
            possible.append(replace(config, batch_size=batch_size, accumulate=accumulate))
    if not possible:
        names = ["devices", *(name for name in ("batch_size", "accumulate") if name in given)]
        asked = " ".join(f"{name}={getattr(open_layouts[0], name)}" for name in names)
        raise ValueError(
            f"{asked}: a step of the run has {rows} sequences, which cannot be divided so; give "
            f"numbers with groups of devices × batch_size × accumulate = {rows}"
        )
    return possible


def continued(run: Run) -> Run:
    """`run` from its newest intact checkpoint, after checking that data, model
    and kernels fit.
    """
    config, folder = run.config, Path(run.config.resume or "")
    path, checkpoint, damaged = newest_whole(run, folder)
    about, steps_done = checkpoint["longctx"], checkpoint["steps_done"]
    best = checkpoint["best"]
    if config.patience is not None and best["since"] >= config.patience:
        raise ValueError(
            f"resume={folder}: the run has ended after {best['since']} validations without a lower "
            "loss; to go on, give a larger patience=, or patience=null"
        )
    if steps_done >= run.max_steps:
        raise ValueError(
            f"resume={folder}: the run has done its {steps_done:,} steps; to go on, give a larger "
            "max_steps="
        )
    now = kernel_lock.of_workload(run.workload) if config.kernel.lock != "off" else None
    lock, note = kernel_lock.held(config, now, about.get("kernel_lock"), steps_done)
    return replace(
        run,
        folder=folder,
        checkpoint=path,
        damaged=damaged,
        steps_done=steps_done,
        model_source="",
        kernel_lock=lock,
        lock_note=note or "",
    )


def newest_whole(run: Run, folder: Path) -> tuple[Path, dict[str, Any], dict[Path, str]]:
    """The newest intact checkpoint in `folder`, its content, and what is wrong
    with each newer one.

    ValueError where there is none, or where it is of another run than `run`.
    """
    damaged: dict[Path, str] = {}
    paths = run_folder.checkpoints(folder)
    for path in reversed(paths):
        try:
            return path, whole_checkpoint(run, folder, path), damaged
        except checkpoints.Damaged as error:
            if len(paths) == 1:
                raise
            damaged[path] = error.what
    listed = "; ".join(f"{path.name}: {what}" for path, what in damaged.items())
    raise ValueError(f"resume={folder}: none of its checkpoints is intact ({listed})")


def whole_checkpoint(run: Run, folder: Path, path: Path) -> dict[str, Any]:
    """The checkpoint at `path`, every part of it checked against `run`, which goes on from it."""
    checkpoints.verify(path)
    checkpoint = checkpoints.read(path)
    about = checkpoint["longctx"]
    assert run.data is not None
    if run.data.fingerprint != about["data"]:
        raise ValueError(
            f"resume={folder}: the documents, their split or the tokenizer are no longer those "
            "that the run began with"
        )
    run_folder.check_unedited(folder, about["config"], run.settings())
    saver.check_state(run, path, checkpoint)
    return checkpoint


def fill_folder(run: Run) -> None:
    """Write what a run's folder begins with; the folder goes again if that fails."""
    assert run.data is not None
    try:
        run.data.tokenizer.save(run.folder / "tokenizer.json")
        initial.keep_for_export(run.config, run.folder)
        (run.folder / "checkpoints").mkdir()
        kernel_lock.write(run.folder, run.kernel_lock)
        run_folder.write_config(run.folder, run.settings())
    except BaseException as error:
        shutil.rmtree(run.folder, ignore_errors=True)
        if isinstance(error, OSError):
            raise OSError(f"{run.folder}: cannot be written: {error.strerror or error}") from error
        raise


def continue_folder(run: Run) -> None:
    """Make the folder of a resumed run that of its checkpoint: damaged newer ones are set aside,
    what killed processes left half-written goes, and so do later metrics.
    """
    for place in (run.folder, run.folder / "checkpoints"):
        files.remove_partial(place)
    for path, what in run.damaged.items():
        aside = path.with_name(f"{path.name}.damaged")
        files.remove(aside)
        path.rename(aside)
        print(
            f"{path}: {what}; set aside as {aside.name}, the run goes on from {run.checkpoint}",
            file=sys.stderr,
        )
    kernel_lock.write(run.folder, run.kernel_lock)
    run_folder.write_config(run.folder, run.settings() | {"resume": None})
    metrics_file.drop_after(run.folder, run.steps_done)
