"""The commands of `longctx`, one table: name, what it does, examples, options, function.

Each imports what it needs when it is called, so that mistakes and `--help` are answered before
torch is.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from longctx.cli import early_checks
from longctx.cli.composition import compose, from_file, jobs, options, with_model
from longctx.cli.entry import answer, libraries
from longctx.cli.overrides import SCHEMAS, is_literal, key_and_value, keys, read, unquoted
from longctx.cli.own_file import with_file, written
from longctx.cli.usage import choices_lines, key_lines
from longctx.config import command_config, presets
from longctx.config.eval_config import EvalRequest
from longctx.config.generate_config import GenerateConfig
from longctx.config.model_config import AttentionConfig
from longctx.config.request import Request
from longctx.config.train_config import TrainConfig
from longctx.distributed.launched import Launched, launched, leave_to_first
from longctx.planner import hardware
from longctx.runs import run_folder


class Command(NamedTuple):
    """One command.

    schema: the dataclass of its options.
    run: called with the arguments after the name; returns the exit code, None for 0.
    trains: every key of train may follow its own.
    """

    summary: str
    examples: tuple[str, ...]
    schema: type
    run: Callable[[list[str]], int | None]
    trains: bool = False


def main(argv: list[str] | None = None) -> int:
    """Run the command that `argv` (None: the process's arguments) names; returns the exit code."""
    argv = sys.argv[1:] if argv is None else argv
    name, arguments = _split(argv)
    return answer(argv or ["--help"], lambda: help_text(name), lambda _: _dispatch(name, arguments))


def help_text(name: str) -> str:
    """The keys of the command `name`; of another name the commands that begin with it, or all."""
    if name not in COMMANDS:
        chosen = [one for one in COMMANDS if one.split()[0] == name] or COMMANDS
        lines = [f"  longctx {one:<14}{COMMANDS[one].summary}" for one in chosen]
        return "\n".join(
            [
                "Train GPTs on long documents, and see what runs show.",
                "",
                *lines,
                "",
                "Each takes key=value and --help. Measurements: python -m benchmarks --help",
            ]
        )
    command = COMMANDS[name]
    lines = [f"{command.summary}.", "", *(f"  {example}" for example in command.examples)]
    if name in SCHEMAS:
        lines += ["", "Presets (group=name):", *choices_lines(name)]
    lines += ["", "Keys (key=default):", *key_lines(command.schema)]
    if command.trains:
        lines += ["", "And every key of longctx train --help."]
    return "\n".join(lines)


def split_own(schema: type, argv: list[str]) -> tuple[list[str], list[str]]:
    """Separate overrides of `schema` from those of train, which are checked too."""
    own = [word for word in argv if word.partition("=")[0] in keys(schema)]
    arguments = read("train", [word for word in argv if word not in own])
    if arguments.sweep:
        raise ValueError("-m: only train sweeps; call this once for each")
    return own, arguments.overrides


def check_unused(overrides: Iterable[str], set_here: Mapping[str, str]) -> None:
    """Raise ValueError for an override whose key is in `set_here`: key → what to use instead."""
    for override in overrides:
        key, value = key_and_value(override)
        if key in set_here:
            raise ValueError(f"{key}={value}: is set for each point; {set_here[key]}")


def check_backends(names: Iterable[str]) -> None:
    """Raise ValueError for a name that attention= does not have."""
    for name in names:
        if name not in presets.names("attention"):
            known = ", ".join(sorted(presets.names("attention")))
            raise ValueError(f"backends={name}: choose from {known}")


def with_backend(request: Request[TrainConfig], backend: str) -> TrainConfig:
    """Its configuration with another attention backend; overrides of attention.options stay."""
    prefix, attention = "attention.options.", AttentionConfig(**presets.read("attention", backend))
    overridden = [key.removeprefix(prefix) for key in request.overrides if key.startswith(prefix)]
    attention.options |= {key: request.config.attention.options[key] for key in overridden}
    return dataclasses.replace(request.config, attention=attention)


def quiet_torch(processes: Launched) -> None:
    """Silence, before torch is imported, its warnings about a process of several that is gone: they
    bury the line that names it.
    """
    if processes.ranks > 1:
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")


def _split(argv: list[str]) -> tuple[str, list[str]]:
    """The name of a command, of two words where there is one such, and what follows it."""
    two = " ".join(argv[:2])
    return (two, argv[2:]) if two in COMMANDS else ("".join(argv[:1]), argv[1:])


def _dispatch(name: str, arguments: list[str]) -> int | None:
    if name not in COMMANDS:
        if [name, *arguments[:1]] == ["kernels", "tune"]:
            raise ValueError("kernels tune: is now `python -m benchmarks tune`, in a clone")
        inner = [one.split()[1] for one in COMMANDS if one.startswith(f"{name} ")]
        if inner:
            raise ValueError(f"{name}: say what, as in longctx {name} {' or '.join(inner)}")
        close = difflib.get_close_matches(name, COMMANDS, n=1)
        advice = f"did you mean {close[0]}?" if close else f"choose one of {', '.join(COMMANDS)}"
        raise ValueError(f"{name}: not a command; {advice}")
    return COMMANDS[name].run(arguments)


def _train(argv: list[str]) -> int:
    """One run in this process, or a sweep, whose jobs are processes of their own."""
    arguments = read("train", with_file(argv))
    if arguments.sweep:
        return _sweep(arguments.overrides)
    try:
        request = _resumed(arguments.overrides) or compose("train", arguments.overrides)
        processes = launched(request.config)
        early_checks.check_training(request.config)
        quiet_torch(processes)
        if request.config.device != "cpu" and request.config.seq_len != "max":
            hardware.start_gpu(processes.local_rank)  # "max" is found by processes of their own
        with libraries():
            from longctx.training.life_cycle import train
        return train(request)
    except (ValueError, OSError):
        leave_to_first()
        raise


def _resumed(overrides: list[str]) -> Request[Any] | None:
    """The configuration of the run that resume= names, with the other overrides; None for a new
    run.
    """
    paths = [
        unquoted(override.removeprefix("resume="))
        for override in overrides
        if override.startswith("resume=")
    ]
    if not paths or paths[-1] in ("", "null"):
        return None
    others = [override for override in overrides if not override.startswith("resume=")]
    folder = run_folder.find(paths[-1])
    run_folder.check_resumable(folder, others)
    request = from_file("train", folder / "config.yaml", others)
    request.config.resume = str(folder)
    run_folder.check_unfinished(folder, request.config.max_steps)
    return request


def _sweep(overrides: list[str]) -> int:
    """Train every combination of the choices in `overrides`, once all of them are checked."""
    sweep_jobs = checked_jobs(overrides)
    from longctx.training.sweep import sweep

    return sweep(sweep_jobs)


def checked_jobs(overrides: list[str]) -> list[list[str]]:
    """The overrides of each job of a sweep, none of which has a mistake that shows without torch;
    the commit of a model of the Hub is asked for once, for all of them.
    """
    sweep_jobs = jobs("train", overrides)
    for override in overrides:
        if override.startswith(("resume=", "name=")) and len(sweep_jobs) > 1:
            raise ValueError(
                f"{override}: each job of a sweep is a new run with a name of its own; leave it out"
            )
    pinned: dict[str | None, str | None] = {}  # init as given → with its commit
    for job in sweep_jobs:
        config = compose("train", job).config
        given = config.init
        config.init = pinned.get(given, given)
        early_checks.check_training(config)
        pinned[given] = config.init
        job[:] = [_as_argument(override, config) for override in job]
    return sweep_jobs


def _as_argument(override: str, config: TrainConfig) -> str:
    """A checked override of a job, which has `config`, as an argument of a command."""
    key, value = key_and_value(override)
    if key == "init" and config.init is not None:
        return f"init={written(config.init)}"
    if is_literal(TrainConfig, key) and value != "null":
        return f"{key}={getattr(config, key)}"  # its text was quoted when it was checked
    return override


def _evaluate(argv: list[str]) -> int:
    """Run one evaluation, print its tables and write its files."""
    config, _, overrides = compose("eval", read("eval", argv).overrides)
    request = EvalRequest.of(config, overrides)
    try:
        processes = launched(request.config)
        early_checks.check_evaluation(request)
        quiet_torch(processes)
    except (ValueError, OSError):
        leave_to_first()
        raise
    if request.config.device != "cpu":
        hardware.start_gpu(processes.local_rank)
    with libraries():
        from longctx.evaluation.evaluate import evaluate
    return evaluate(request)


def _generate(argv: list[str]) -> int:
    chosen = options(GenerateConfig, argv)
    chosen.checkpoint = early_checks.with_commit(chosen.checkpoint)
    if chosen.device != "cpu":
        hardware.start_gpu(0)
    with libraries():
        from longctx.generation.generate import generate
    return generate(chosen)


def _plan(argv: list[str]) -> None:
    own, training = split_own(command_config.PlanOptions, argv)
    chosen = options(command_config.PlanOptions, own)
    check_backends(chosen.backends)
    check_unused(training, {"device": "it is a GPU"})
    request = with_model(compose("train", training), gpu=True)
    if "context.degree" not in request.overrides:
        request.config.context.degree = "auto"  # all are shown
    backends, attention = chosen.backends, request.overrides.get("attention")
    if attention is not None:
        if backends != command_config.PlanOptions.backends:
            raise ValueError(
                f"attention={attention}: backends={','.join(backends)} is given too; "
                "leave one of them out"
            )
        backends = (attention,)
    from longctx.planner.overview import run

    run(chosen, {backend: with_backend(request, backend) for backend in backends})


def _describe(argv: list[str]) -> int:
    config = compose("data", read("data", argv).overrides).config
    from longctx.data.describe import describe

    return describe(config)


def _compare(argv: list[str]) -> None:
    chosen = options(command_config.CompareOptions, argv)
    from longctx.report.compare import compare

    compare([Path(path) for path in chosen.runs], Path(chosen.out))


def _watch(argv: list[str]) -> None:
    chosen = options(command_config.WatchOptions, argv)
    from longctx.report.watch import watch

    watch(Path(chosen.run))


def _dashboard(argv: list[str]) -> None:
    chosen = options(command_config.DashboardOptions, argv)
    from longctx.report.dashboard import dashboard

    dashboard(**vars(chosen))


def _export(argv: list[str]) -> None:
    chosen = options(command_config.ExportOptions, argv)
    run_folder.checkpoint_of(Path(chosen.run), "run")
    with libraries():
        from longctx.model.export_checkpoint import run

    run(chosen)


def _show_kernels(argv: list[str]) -> None:
    chosen = options(command_config.ShowOptions, argv)
    with libraries():
        from longctx.kernels.show import run

    run(chosen)


COMMANDS: dict[str, Command] = {
    "train": Command(
        "Train a GPT on long documents",
        (
            "python train.py attention=flash seq_len=16384",
            "python train.py -m attention=naive,sdpa,flash seq_len=4096,8192",
            "    -m: a sweep, every combination, one process each",
            "python train.py resume=runs/NAME",
            "python train.py my.yaml key=value ...",
            "    my.yaml: keys as below, or a run's config.yaml",
            "The same: longctx train key=value ...",
        ),
        SCHEMAS["train"],
        _train,
    ),
    "eval": Command(
        "Evaluate a run, a checkpoint or a Hugging Face folder",
        (
            "python eval.py checkpoint=runs/NAME seq_len=16384",
            "python eval.py checkpoint=OWNER/NAME data=text data.path=docs/",
            "The same: longctx eval key=value ...",
        ),
        SCHEMAS["eval"],
        _evaluate,
    ),
    "generate": Command(
        "Generate text from a run or a Hugging Face folder",
        (
            "longctx generate runs/NAME prompt='Once upon a time'",
            "longctx generate FOLDER prompt='Who are you?' chat=true temperature=0",
            "longctx generate OWNER/NAME@REVISION prompt='Once upon a time'",
            "longctx generate runs/NAME prompts=questions.jsonl out=answers.jsonl",
        ),
        GenerateConfig,
        _generate,
    ),
    "plan": Command(
        "Predict memory, time and the longest context that fits",
        (
            "longctx plan model=1b seq_len=262144",
            "longctx plan model=1b seq_len=262144 gpu=H200 gpu_memory=139",
            "longctx plan model=8b seq_len=262144 devices=64",
        ),
        command_config.PlanOptions,
        _plan,
        trains=True,
    ),
    "data": Command(
        "Describe a data set: documents, tokens, lengths, packing",
        ("longctx data seq_len=16384", "longctx data data=text data.path=docs/ out=docs.png"),
        SCHEMAS["data"],
        _describe,
    ),
    "compare": Command(
        "Compare runs: what differs, what came out, their curves",
        ("longctx compare runs/*", "longctx compare runs/a runs/b out=page.html"),
        command_config.CompareOptions,
        _compare,
    ),
    "watch": Command(
        "Follow a run that another process trains",
        ("longctx watch runs/NAME",),
        command_config.WatchOptions,
        _watch,
    ),
    "dashboard": Command(
        "Make a workspace at wandb for the runs of a project",
        ("longctx dashboard project=longctx", "longctx dashboard project=longctx dry_run=true"),
        command_config.DashboardOptions,
        _dashboard,
    ),
    "export": Command(
        "Write a trained model as a Hugging Face folder",
        ("longctx export runs/NAME out/",),
        command_config.ExportOptions,
        _export,
    ),
    "kernels show": Command(
        "Show the kernels that attention=flash runs here, tested",
        ("longctx kernels show", "longctx kernels show head_size=128 dtype=bf16"),
        command_config.ShowOptions,
        _show_kernels,
    ),
}
