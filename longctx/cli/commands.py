"""The commands of `longctx`, one table: name, what it does, examples, options, function.

Each imports its libraries when it is called. So mistakes and `--help` are answered before torch is
imported, which takes 5 to 30 s.
"""

from __future__ import annotations

import dataclasses
import difflib
import gc
import io
import os
import signal
import sys
import textwrap
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from longctx import files, system
from longctx.attention.description import AttentionConfig
from longctx.cli import early_checks, parse
from longctx.cli.parse import SCHEMAS, options
from longctx.config import command_config, fields, presets
from longctx.config.eval_config import EvalConfig, EvalRequest
from longctx.config.generate_config import GenerateConfig
from longctx.config.presets import Request
from longctx.config.train_config import TrainConfig
from longctx.parallel.launch import GRACE, Launched, launched, number_here, started
from longctx.planner import hardware
from longctx.runs import run_folder

NOT_UTF8 = "not text in UTF-8; give other characters, or rename the file or folder"
WIDTH = 80
COLUMN = 28  # at which the meanings of --help begin
EVERYTHING = 10**6  # a range that ends above this is shown as open


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
    """Run the command that `argv` (None: the process's arguments) names; return the exit code."""
    argv = sys.argv[1:] if argv is None else argv
    two = " ".join(argv[:2])
    name, arguments = (two, argv[2:]) if two in COMMANDS else ("".join(argv[:1]), argv[1:])
    return answer(argv or ["--help"], lambda: help_text(name), lambda _: _dispatch(name, arguments))


def answer(
    argv: list[str], help_text: Callable[[], str], do: Callable[[list[str]], int | None]
) -> int:
    """Call `do(argv)` and return the exit code: its own (None: 0), 0 for help, 2 for a mistake,
    files.FULL_DISK, or 128 + the number of a signal, as 130 for Ctrl-C and 141 (SIGPIPE) if nobody
    reads stdout any more.

    A mistake is a ValueError or an OSError, one line on stderr; LONGCTX_TRACEBACK=1 shows where.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):  # an arrow must not end a run in latin-1
        sys.stdout.reconfigure(errors="replace")
    with system.caught() as stop:
        try:
            if any(argument in ("-h", "--help", "help") for argument in argv):
                print(help_text(), flush=True)
                return 0
            for argument in argv:
                files.check_utf8(argument, NOT_UTF8)
            check_home()
            code = do(argv) or 0
            sys.stdout.flush()
            return code
        except BrokenPipeError:  # the reader of our output, such as `head`, has closed it
            files.silence_stdout()
            return 128 + signal.SIGPIPE
        except (Exception, KeyboardInterrupt) as error:
            # A compiled module may raise another error for a signal, as numpy's import does.
            if isinstance(error, KeyboardInterrupt) or stop.has_raised:
                if number_here() == 0:
                    unsaved = ", unsaved since the last checkpoint" if stop.waits else ""
                    print(f"stopped by {stop.name}{unsaved}", file=sys.stderr)
                return stop.code
            if not isinstance(error, ValueError | OSError):
                raise
            # A mistake of the user: one line
            if os.environ.get("LONGCTX_TRACEBACK"):
                traceback.print_exception(error)
            # Rank 0 prints the problem; torchrun ends all ranks after the first end
            if number_here():
                time.sleep(GRACE)
                return files.exit_code(error)
            line = files.printable(" ".join(str(error).split()))
            print(f"error: {line}", file=sys.stderr)
            return files.exit_code(error)


def check_home() -> None:
    """Raise ValueError if this user has no home folder, which holds the caches."""
    if os.path.expanduser("~") == "~":
        raise ValueError(
            f"HOME: not set, and user {os.getuid()} has no entry in /etc/passwd; set HOME to a "
            "folder in which this user may write"
        )


@contextmanager
def libraries() -> Iterator[None]:
    """Import large libraries in this block: the garbage collector pauses, a terminal is told."""
    if "torch" not in sys.modules and sys.stderr.isatty() and number_here() == 0:
        print("loading torch ...", file=sys.stderr, flush=True)
    with system.no_garbage():
        yield
        gc.freeze()  # libraries stay: later collections leave them out
    system.check()


# Help


def help_text(name: str) -> str:
    """Return the keys of the command `name`, or else the commands that begin with it, or all."""
    if name not in COMMANDS:
        chosen = [one for one in COMMANDS if one.split()[0] == name] or COMMANDS
        lines = [f"  longctx {one:<14}{COMMANDS[one].summary}" for one in chosen]
        title = "Train GPTs on long documents, and see what runs show."
        more = "Each takes key=value and --help. Measurements: python -m benchmarks --help"
        return "\n".join([title, "", *lines, "", more])
    command = COMMANDS[name]
    lines = [f"{command.summary}.", "", *(f"  {example}" for example in command.examples)]
    if name in SCHEMAS:
        lines += ["", "Presets (group=name):"]
        for group in presets.groups(command.schema):
            names = " | ".join(sorted(presets.names(group)))
            head = f"  {group + '=':<12}"
            lines += textwrap.wrap(names, WIDTH, initial_indent=head, subsequent_indent=" " * 14)
    lines += ["", "Keys (key=default):", *key_lines(command.schema)]
    return "\n".join([*lines, *(["", "And every key of longctx train --help."] * command.trains)])


def key_lines(schema: Any, prefix: str = "") -> Iterator[str]:
    """Yield the keys of `schema`, then each group of keys under a heading of its own."""
    nested = []
    for item in dataclasses.fields(schema):
        default = item.default_factory() if callable(item.default_factory) else item.default
        if dataclasses.is_dataclass(default):
            nested.append((item.name, type(default)))
            continue
        head = f"{prefix}{item.name}={fields.shown(default)}"
        head = item.name.upper() if item.metadata.get("positional") else head
        lines = textwrap.wrap(_meaning(item.metadata), WIDTH - COLUMN, break_on_hyphens=False)
        has_room = len(head) + 4 <= COLUMN
        yield f"  {head:<{COLUMN - 2}}{lines.pop(0)}" if has_room else f"  {head}"
        yield from (" " * COLUMN + line for line in lines)
    for name, inner in nested:
        yield ""
        summary = " ".join((inner.__doc__ or "").split("\n\n")[0].split()).rstrip(".")
        yield from textwrap.wrap(f"{prefix}{name}: {summary}", WIDTH)
        yield from key_lines(inner, f"{prefix}{name}.")


def _meaning(metadata: Mapping[str, Any]) -> str:
    """Return a help text, with the choices and the range if the text does not tell them."""
    meaning, choices = metadata.get("help", ""), metadata.get("choices")
    if choices and not all(choice in meaning for choice in choices):
        meaning += f" ({' | '.join(choices)})"
    if metadata.get("between") is not None:
        least, most = metadata["between"]
        meaning += f" ({least:g} to {most:,g})" if most < EVERYTHING else f" (≥ {least:,g})"
    return meaning


# Commands


def _dispatch(name: str, arguments: list[str]) -> int | None:
    if name in COMMANDS:
        return COMMANDS[name].run(arguments)
    if [name, *arguments[:1]] == ["kernels", "tune"]:
        raise ValueError("kernels tune: is now `python -m benchmarks tune`, in a clone")
    if inner := [one for one in COMMANDS if one.startswith(f"{name} ")]:
        raise ValueError(f"{name}: is followed by a word, as in longctx {' or '.join(inner)}")
    close = difflib.get_close_matches(name, COMMANDS, n=1)
    advice = f"did you mean {close[0]}?" if close else f"choose one of {', '.join(COMMANDS)}"
    raise ValueError(f"{name}: not a command; {advice}")


def _train(argv: list[str]) -> int:
    """Train one run in this process, or each job of a sweep in a process of its own."""
    flags = [word for word in argv if word in ("-m", "--multirun")]
    words = parse.with_file(word for word in argv if word not in flags)
    if flags:
        sweep_jobs = checked_jobs(words)
        from longctx.training.sweep import sweep

        return sweep(sweep_jobs)
    request = _resumed(words) or parse.compose("train", words)
    early_checks.check_training(request.config)
    # The length "max" is found by processes of their own
    with _processes(request.config, uses_gpu=request.config.seq_len != "max") as processes:
        with libraries():
            from longctx.training.life_cycle import train
        return train(request, processes)


@contextmanager
def _processes(config: TrainConfig | EvalConfig, uses_gpu: bool = True) -> Iterator[Launched]:
    """Yield the processes of a run. They and CUDA's driver start while torch is imported."""
    processes = launched(config)
    if processes.ranks > 1:  # torch's warnings bury the line that names a lost process
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    with started(processes) as processes:
        if config.device != "cpu" and uses_gpu:
            hardware.start_gpu(processes.local_rank)
        yield processes


def _resumed(words: list[str]) -> Request[TrainConfig] | None:
    """Return the request of the run that resume= names, changed by `words`; None for a new run."""
    given = parse.overrides(TrainConfig, words)
    path = parse.value_of(given.pop("resume", "null"), fields.keys(TrainConfig)["resume"])
    if path is None:
        return None
    others = [f"{name}={text}" for name, text in given.items()]
    folder = run_folder.find(path)
    run_folder.check_resumable(folder, others)
    request = parse.from_file(folder / "config.yaml", others)
    request.config.resume = str(folder)
    run_folder.check_unfinished(folder, request.config.max_steps)
    return request


def checked_jobs(words: Iterable[str]) -> list[list[str]]:
    """Return the words of each job of a sweep, checked as far as that needs no torch.

    The commit of a model of the Hub is asked for once, for all jobs.
    """
    sweep_jobs = parse.jobs(words)
    for word in sweep_jobs[0] if len(sweep_jobs) > 1 else []:
        if word.startswith(("resume=", "name=")):
            raise ValueError(
                f"{word}: each job of a sweep is a new run with a name of its own; leave it out"
            )
    pinned: dict[str | None, str | None] = {}  # init as given → with its commit
    for job in sweep_jobs:
        config = parse.compose("train", job).config
        given = config.init
        config.init = pinned.get(given, given)
        early_checks.check_training(config)
        pinned[given] = config.init
        if config.init != given:
            job[:] = [f"init={config.init}" if word.startswith("init=") else word for word in job]
    return sweep_jobs


def _evaluate(argv: list[str]) -> int:
    """Run one evaluation, print its tables and write its files."""
    config, _, given = parse.compose("eval", _without_sweep("eval", argv))
    request = EvalRequest.of(config, given)
    early_checks.check_evaluation(request)
    with _processes(request.config) as processes:
        with libraries():
            from longctx.evaluation.evaluate import evaluate
        return evaluate(request, processes)


def _generate(argv: list[str]) -> int:
    chosen = options(GenerateConfig, argv)
    chosen.checkpoint = early_checks.with_commit(chosen.checkpoint)
    if chosen.device != "cpu":
        hardware.start_gpu(0)
    with libraries():
        from longctx.generation import generate
    return generate(chosen)


def _plan(argv: list[str]) -> None:
    own, training = parse.split_own(command_config.PlanOptions, _without_sweep("plan", argv))
    chosen = options(command_config.PlanOptions, own)
    check_backends(chosen.backends)
    check_unused(training, {"device": "it is a GPU"})
    request = parse.with_model(parse.compose("train", training), gpu=True)
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


def with_backend(request: Request[TrainConfig], backend: str) -> TrainConfig:
    """Return its configuration with another backend; overrides of attention.options stay."""
    prefix, attention = "attention.options.", AttentionConfig(**presets.read("attention", backend))
    overridden = [key.removeprefix(prefix) for key in request.overrides if key.startswith(prefix)]
    attention.options |= {key: request.config.attention.options[key] for key in overridden}
    return dataclasses.replace(request.config, attention=attention)


def check_backends(names: Iterable[str]) -> None:
    """Raise ValueError for a name that attention= does not have."""
    for name in names:
        if name not in presets.names("attention"):
            known = ", ".join(sorted(presets.names("attention")))
            raise ValueError(f"backends={name}: choose from {known}")


def check_unused(words: Iterable[str], set_here: Mapping[str, str]) -> None:
    """Raise ValueError for a word whose key is in `set_here`: key → what to use instead."""
    for word in words:
        name = word.partition("=")[0]
        if name in set_here:
            raise ValueError(f"{word}: is set for each point; {set_here[name]}")


def _without_sweep(command: str, argv: list[str]) -> list[str]:
    """Return `argv`; ValueError if it asks for a sweep."""
    for word in argv:
        if word in ("-m", "--multirun"):
            raise ValueError(f"{word}: only train sweeps; call {command} once for each")
    return argv


def _describe(argv: list[str]) -> int:
    config = parse.compose("data", _without_sweep("data", argv)).config
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
        from longctx.training.kernel_lock import show

    show(chosen)


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
            "    values: text as it is typed, null for none, lists as [a,b]",
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
