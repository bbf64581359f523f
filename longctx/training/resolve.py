"""From a request to a run: every decision, made once, in a pipeline of values.

    request → model → layouts → length → data → workload → schedule → kernel lock → folder → Run

Every mistake is found before the folder is made, so it leaves nothing behind. Nothing downstream
sees the request: it reads the frozen `Run` (run.py).
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from longctx.attention.context_parallel import padded
from longctx.attention.description import AUTO
from longctx.config import presets
from longctx.config.presets import Request
from longctx.config.train_config import TrainConfig, check_warmup
from longctx.data import Data, load
from longctx.data.sources.registry import pinned
from longctx.model import packed
from longctx.model.context_extension import extended
from longctx.parallel.devices import (
    able_backends,
    check_attention,
    choose_attention,
)
from longctx.parallel.launch import launched
from longctx.planner import fitting
from longctx.runs import run_folder
from longctx.spec import hardware
from longctx.spec.hardware import Machine
from longctx.spec.model_config import GPTConfig
from longctx.spec.step import Measured, Workload, with_vocabulary, workload_of
from longctx.training import compile_ahead, dry_run, kernel_lock, pretrained, resume
from longctx.training.batches import data_config
from longctx.training.callbacks import CALLBACKS
from longctx.training.layer_memory import measured_layers
from longctx.training.memory import check_fits
from longctx.training.run import Run, scheduled
from longctx.training.validation import check_validation

# Tokens, before the length of seq_len=max is known: to check the model, and to open the data, where
# any answers fit
SOME_LENGTH = 4096
ANY_LENGTH = 10**12
Say = Callable[[str], None]


@dataclass(frozen=True)
class Choice:
    """The decisions so far about a run: its model, and the layouts that are still open."""

    config: TrainConfig
    device: str
    model: GPTConfig
    model_name: str  # for the name of the folder
    source: str  # such as "tiny (model=auto)" or "weights of FOLDER"
    layouts: Sequence[TrainConfig]
    measured: Measured = field(default_factory=dict)  # layers that transformers computes

    def workload(self, layout: TrainConfig, seq_len: int, tokens: int) -> Workload:
        """Return the step of `layout`, with sequences of `seq_len` and a vocabulary of `tokens`."""
        workload = workload_of(layout, self.device, seq_len, self.model)
        workload = replace(workload, machines=launched(layout).nodes, measured=self.measured)
        return with_vocabulary(workload, tokens)

    def workloads(self, seq_len: int, tokens: int) -> list[Workload]:
        """Return the step of every open layout."""
        return [self.workload(layout, seq_len, tokens) for layout in self.layouts]


def resolve(request: Request[TrainConfig], machine: Machine, say: Say = print) -> Run:
    """Decide everything about the run that `request` asks for on `machine`, and make its folder.

    A resumed run keeps the choices in its config.yaml. Raises ValueError or OSError, one line with
    a remedy, for whatever is wrong with the request.
    """
    # Machine → model → layouts → length
    device = machine.device_for(request.config.device, request.config.precision)
    choice = choose_model(request, device, machine, say)
    seq_len = choose_length(choice, machine, say)
    choice = stretched(choice, seq_len)
    is_probed = choice.config.seq_len == "max"

    # Before the data is opened: refuse what fits no vocabulary, and start the compilers
    if not is_probed:
        check_fits(choice.workloads(seq_len, tokens=1), machine)
    tokens = choice.config.data.vocab_size  # of a tokenizer that is trained here
    wait_for_compilers = compile_ahead.begin(choice.workloads(seq_len, tokens)[0])
    data = open_data(choice, seq_len)

    # Layout, memory, schedule: the vocabulary is known now
    workload, layout_note = choose_workload(choice, seq_len, data, machine)
    if not is_probed:
        check_fits([workload], machine)
    run = scheduled(choice.config, workload)
    check_schedule(run)
    check_validation(data, run, request.overrides)
    for callback in CALLBACKS.values():
        callback.check(run, data)
    wait_for_compilers()
    if machine.gpu is not None and choice.device == "cuda":
        able = able_backends(choice.config, choice.model, "cuda")
        if line := fitting.faster_backend(workload, able, machine.gpu):
            say(line)
    run = replace(run, model_source=choice.source, layout_note=layout_note, data=data)
    if run.config.resume:
        return resume.continued(run)
    choices = request.choices | {"model": choice.model_name}
    if choices["attention"] == AUTO:
        choices["attention"] = choice.config.attention.backend
    return begun(run, choices, request.overrides)


def choose_model(request: Request[TrainConfig], device: str, machine: Machine, say: Say) -> Choice:
    """Choose the model: a preset, the weights of a folder, or the model of a resumed run; the
    backend of attention=auto; and the layouts that are open to them.
    """
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

    length = SOME_LENGTH if config.seq_len == "max" else int(config.seq_len)
    if model.transformers:
        from longctx.model import transformers_model

        config = config.for_transformers()
        # Ranks that share a sequence split documents, so layers must not mix tokens either
        packing = config.data.packing or config.context.degree != 1
        transformers_model.prove(model, device, length, packing)
    config.check_model(model)
    if config.lora.base == "nf4":
        packed.bitsandbytes()
    if config.attention.backend == AUTO:
        able = able_backends(config, model, device)
        chosen, line = choose_attention(able, config, model, device, machine, length)
        config = replace(config, attention=chosen)
        say(line)
    check_attention(config, model, device)
    open_layouts = fitting.each_layout(config, model)
    if config.resume:
        open_layouts = resume.with_steps_of_run(open_layouts, overrides)
    choice = Choice(config, device, model, name, source, open_layouts)
    if model.transformers:
        step = choice.workload(open_layouts[0], length, tokens=1)
        choice = replace(choice, measured=measured_layers(step, say))
    return choice


def choose_length(choice: Choice, machine: Machine, say: Say) -> int:
    """Return the tokens per sequence; for seq_len=max the longest that fit the GPU.

    Other programs share a CPU's memory: there is no such length.
    """
    config = choice.config
    if isinstance(config.seq_len, int):
        return config.seq_len
    if choice.device != "cuda" or machine.gpu is None:
        raise ValueError(hardware.NO_LONGEST)
    tokens = open_data(choice, ANY_LENGTH).tokenizer.vocab_size

    def at(layout: TrainConfig, seq_len: int) -> Workload:
        return choice.workload(layout, seq_len, tokens)

    return dry_run.longest_of(
        [partial(at, layout) for layout in choice.layouts],
        partial(scheduled, config),
        machine.gpu,
        machine.host_memory,
        say,
    )


def stretched(choice: Choice, seq_len: int) -> Choice:
    """Return `choice` with positions of trained weights stretched to `seq_len` as rope= says."""
    if choice.config.init is None or choice.config.resume:
        return choice
    model, rope = extended(choice.model, choice.config.rope, seq_len)
    source = choice.source + (f", rope {rope}" if rope else "")
    return replace(choice, model=model, source=source)


def open_data(choice: Choice, seq_len: int) -> Data:
    """Return the data; raise ValueError if the model's vocabulary is smaller than its tokenizer's,
    or no document is left to train on.
    """
    config, model = choice.config, choice.model
    data = load(data_config(config), seq_len)
    tokens = data.tokenizer.vocab_size
    # A resumed run tells of its documents if they are others
    if not config.resume and model.vocab_size is not None and model.vocab_size < tokens:
        raise ValueError(
            f"model.vocab_size={model.vocab_size}: the tokenizer has {tokens:,} tokens; "
            "use at least that, or null to follow it"
        )
    if not len(data.train):
        raise ValueError(
            f"data={config.data.source}: no document is left to train on; "
            f"data.val_fraction={config.data.val_fraction}"
        )
    return data


def choose_workload(
    choice: Choice, seq_len: int, data: Data, machine: Machine
) -> tuple[Workload, str]:
    """Choose layout, memory policy, and micro-batches if neither batch_size nor accumulate is
    given; return the step, and a note about the layout if it was open.
    """
    candidates = choice.workloads(seq_len, data.tokenizer.vocab_size)
    config, several = choice.config, len(candidates) > 1
    merge = config.batch_size is None and config.accumulate is None
    workload, reason = candidates[0], "nothing is predicted on a CPU"
    if choice.device == "cuda" and (merge or several or config.memory.policy == "auto"):
        gpu, host = machine.gpu, machine.host_memory
        assert gpu is not None
        workload, reason = fitting.choose_layout(candidates, gpu, host, merge)
    elif choice.device == "cuda":
        workload = fitting.with_policy(workload, config.memory.policy)
    workload.check_graphs()
    return workload, f"{fitting.name_of(workload)} (auto: {reason})" if several else ""


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
    """Return the new run with its kernel lock and its folder, the first thing that is written; the
    preset of each group is in `choices`. A dry run has neither.
    """
    config, workload = run.config, run.workload
    stem = run_folder.stem(choices, workload.seq_len, overrides)
    if config.dry_run:
        return replace(run, folder=Path(config.runs) / (config.name or stem))
    lock = kernel_lock.of_workload(workload) if config.kernel.lock != "off" else None
    folder = run_folder.create(Path(config.runs), config.name, stem)
    run = replace(run, config=replace(config, name=folder.name), folder=folder, kernel_lock=lock)
    assert run.data is not None
    # A folder that is not complete would look like a run
    try:
        run.data.tokenizer.save(folder / "tokenizer.json")
        pretrained.keep_for_export(config, folder)
        (folder / "checkpoints").mkdir()
        kernel_lock.write(folder, lock)
        run_folder.write_config(folder, run.settings())
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return run
