"""The commands: arguments → a checked dataclass → the function. Nothing here imports torch.

One table has every command: its keys, examples and function. A command imports its libraries when
it runs: `--help` and wrong keys are answered before torch is imported, which takes 5 to 30 s.
"""

from __future__ import annotations

import inspect
import io
import os
import signal
import sys
import textwrap
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from functools import cache, partial
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, NamedTuple

import longctx
from longctx import files, hub_snapshot, plugins, system
from longctx.cli import options, parse
from longctx.cli.parse import compose, split_own
from longctx.cli.plan import PlanOptions, plan
from longctx.config import eval_config, fields, presets
from longctx.config.eval_config import ChatConfig, EvalConfig, GenerateConfig, SampleConfig
from longctx.config.presets import Request
from longctx.config.train_config import TrainConfig
from longctx.data.sources.registry import check_files
from longctx.model.mixers.description import mistake
from longctx.parallel.launch import GRACE, join, launched, number_here, supervise
from longctx.runs import run_folder

pinned = cache(hub_snapshot.pinned)  # all jobs of a sweep train from one commit
wrapped = partial(textwrap.wrap, width=80, break_on_hyphens=False)
COLUMN = 28  # at which the meanings of --help begin
EVERYTHING = 10**6  # a range that ends above this is shown as open, its counts with units


class Command(NamedTuple):
    """One command.

    schema: the dataclass of its keys. Its docstring is the head of --help.
    run: called with the request for the schema, and if it `trains` with the arguments of train that
        followed; it returns the exit code, None for 0.
    """

    schema: type
    run: Callable[..., int | None]
    trains: bool = False


def main(argv: list[str] | None = None) -> int:
    """Run the command that `argv` (None: the process's arguments) names; return the exit code."""
    return answer((sys.argv[1:] if argv is None else argv) or ["--help"], help_text, _run)


def _run(argv: list[str]) -> int | None:
    name, *arguments = argv
    if "--version" in argv:
        return print(f"longctx {longctx.__version__}")
    if name not in COMMANDS:
        advice = fields.closest(name, COMMANDS) or f"; choose one of {', '.join(COMMANDS)}"
        raise ValueError(f"{name}: not a command{advice}")
    own = [argument for argument in arguments if argument not in ("-m", "--multirun")]
    if name == "train" and own != arguments:
        jobs = checked_jobs(own)
        return int(resolve_name("longctx.training.sweep:sweep")(jobs))
    schema, run, trains = COMMANDS[name]
    if not trains:
        return run(compose(schema, arguments))
    own, training = split_own(schema, arguments)
    return run(compose(schema, own), training)


def answer(
    argv: list[str], help_text: Callable[[list[str]], str], run: Callable[[list[str]], int | None]
) -> int:
    """Call `run(argv)` and return the exit code: its own (None: 0), 0 for help, 2 for a mistake,
    files.FULL_DISK, or 128 + a signal's number: 130 for Ctrl-C, 141 if nobody reads stdout.

    A mistake is a ValueError, an OSError, or an error in a plugin: one line on stderr.
    LONGCTX_TRACEBACK=1 adds its traceback.
    """
    files.open_closed_streams()
    # An arrow must not end a run whose terminal is latin-1
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    system.let_segments_grow()
    with system.caught() as stop:
        try:
            if any(argument in ("-h", "--help", "help") for argument in argv):
                print(help_text(argv), flush=True)
                return 0
            Path.home()  # libraries would fail without one after a run has begun
            code = run(argv) or 0
            sys.stdout.flush()
            return code
        except BrokenPipeError:
            # The reader of our output, such as `head`, has closed it
            files.silence_stdout()
            return 128 + signal.SIGPIPE
        except (Exception, KeyboardInterrupt) as error:
            # A compiled module may raise another error for a signal, as numpy's import does
            if isinstance(error, KeyboardInterrupt) or stop.has_raised:
                if number_here() == 0:
                    unsaved = ", unsaved since the last checkpoint" if stop.waits else ""
                    print(f"stopped by {stop.name}{unsaved}", file=sys.stderr)
                return stop.code
            if isinstance(error, RuntimeError) and "home directory" in str(error):
                error = ValueError("HOME: not set, or ~USER is no user; set it, or write paths out")
            shown = mistake(error) or error
            if not isinstance(shown, ValueError | OSError):
                raise error
            if os.environ.get("LONGCTX_TRACEBACK"):
                traceback.print_exception(error)
            print_mistake(shown)
            return files.exit_code(shown)


def print_mistake(error: Exception) -> None:
    """Print a mistake of the user in one line, several in one line each; on rank 0 alone."""
    # torchrun ends all ranks after the first end, so the others wait until it has printed
    if number_here():
        return time.sleep(GRACE)
    text = str(error)
    for line in text.splitlines() if isinstance(error, fields.Mistakes) else [text]:
        print(f"error: {files.printable(' '.join(line.split()))}", file=sys.stderr)


# Help


def help_text(argv: list[str]) -> str:
    """Return the help of the command in `argv`, its plugins' names included, or of all commands."""
    if argv[0] not in COMMANDS:
        lines = [f"  longctx {name:<14}{summary_of(x.schema)}" for name, x in COMMANDS.items()]
        more = "Each takes key=value and --help. Also: --version, python -m benchmarks --help"
        return "\n".join(["Train GPTs on long documents.", "", *lines, "", more])
    command = COMMANDS[argv[0]]
    # The lists below have the names that plugins register
    own = [argument for argument in argv if argument.startswith("plugins=")]
    parse.given_values(TrainConfig if command.trains else command.schema, own)
    # Meanings of keys come after the examples
    summary, examples, *_ = [*inspect.cleandoc(command.schema.__doc__ or "").split("\n\n"), ""]
    lines = [summary, "", textwrap.indent(examples, "  ")]
    groups = presets.chosen(command.schema, {})
    lines += ["", "Presets (group=name):"] if groups else []
    for group in groups:
        choices = f"  {group + '=':<12}{' | '.join(presets.names(group))}"
        lines += wrapped(choices, subsequent_indent=" " * 14)
    lines += ["", "Keys (key=default):", *key_lines(command.schema)]
    return "\n".join([*lines, *(["", "And every key of longctx train --help."] * command.trains)])


def key_lines(schema: Any) -> Iterator[str]:
    """Yield the keys of `schema`, then each group of keys under a heading of its own."""
    known = fields.keys(schema)
    groups = [name for name, declared in known.items() if declared.is_group]
    # Plain keys first, so that each heading is followed by all keys of its group
    for group in ("", *groups):
        if group:
            yield ""
            yield from wrapped(f"{group}: {summary_of(known[group].type)}")
        for name, declared in known.items():
            if name.rpartition(".")[0] == group and not declared.is_group:
                shown = f"{name}={fields.shown(declared.default)}"
                head = name.upper() if declared.positional else shown
                line = f"  {head:<{COLUMN - 3}} {meaning_of(declared)}"
                yield from wrapped(line, subsequent_indent=" " * COLUMN)


def meaning_of(declared: fields.Key) -> str:
    """Return a help text, with the choices and the range if the text does not tell them."""
    meaning = declared.meaning
    if not all(choice in meaning for choice in declared.choices):
        meaning += f" ({' | '.join(declared.choices)})"
    if declared.between is not None:
        minimum, maximum = declared.between
        is_open = maximum >= EVERYTHING
        if declared.unit is not None and is_open:
            meaning += f"; 4k is {4 * declared.unit:,}"
        meaning += f" (≥ {minimum:,g})" if is_open else f" ({minimum:g} to {maximum:,g})"
    return meaning


def summary_of(schema: type) -> str:
    """Return the first paragraph of its docstring, without the full stop."""
    return " ".join((schema.__doc__ or "").split("\n\n")[0].split()).rstrip(".")


# Commands


def _train(request: Request[TrainConfig]) -> int:
    """Train one run in this process, or in processes that it starts."""
    check_paths(request.config)
    # Pass keys register a callback
    return _start(request, "longctx.evaluation.passkey:", "longctx.training.life_cycle:train")


def _resume(request: Request[options.ResumeOptions], training: list[str]) -> int:
    return _train(compose("train", [f"resume={request.config.run}", *training]))


def check_paths(config: TrainConfig) -> None:
    """Raise ValueError or OSError for a path that is missing, or exists already. A model of the Hub
    in `config.init` gets its commit.
    """
    config.runs = str(Path(config.runs).expanduser())
    if config.resume is None:
        fields.refuse_first(config.problems_of_new_run())
        # Other ranks may find the folder that rank 0 has made, and a dry run makes none
        if number_here() == 0 and not config.dry_run:
            run_folder.check_free(Path(config.runs), config.name)
        if number_here() == 0 and config.init is not None:
            config.init, _ = found(config.init, "init")
    check_files(config.data_as_read)


def _start(request: Request[Any], *names: str) -> int:
    """Import `names` in each process of the `request`, and call the last one, a function."""
    processes, strategy = launched(request.config), request.config.strategy.name
    why = "several devices share the model, and there is one; give devices=N or strategy=auto"
    fields.refuse((processes.ranks == 1 and strategy != "auto", f"strategy={strategy}: {why}"))
    if processes.are_to_start:
        return supervise(processes)
    join(processes)
    with system.libraries():
        *_, run = map(resolve_name, names)
    return int(run(request, processes))


def checked_jobs(arguments: Iterable[str]) -> list[list[str]]:
    """Return the arguments of each job of a sweep, checked as far as that needs no torch."""
    sweep_jobs = parse.jobs(arguments)
    # The commit of a model of the Hub is asked for once, for all jobs
    for job in sweep_jobs:
        # A mistake in the last job is reported before the first one trains
        config = compose("train", job).config
        why = "each job of a sweep is a new run with a name of its own; leave it out"
        one_run = {"resume": config.resume, "name": config.name} if len(sweep_jobs) > 1 else {}
        fields.refuse_first(f"{x}={value}: {why}" for x, value in one_run.items() if value)
        given = config.init
        check_paths(config)
        # The command line wins over a file that names the model
        if config.init != given:
            job[:] = [f"init={config.init}", *(x for x in job if not x.startswith("init="))]
    return sweep_jobs


def _evaluate(request: Request[EvalConfig]) -> int:
    """Run one evaluation, print its tables and write its files."""
    config = request.config
    eval_config.check_overrides(config, request.overrides)
    open_checkpoint(config)
    if request.names_data:
        check_files(config.data)
    return _start(request, "longctx.evaluation.evaluate:evaluate")


def found(model: str, key: str) -> tuple[str, Path | None]:
    """Return `model`, given as `key`, if it is of the Hub with its commit; and the checkpoint if it
    is a run's. ValueError or OSError if it is no run, checkpoint or Hugging Face folder.
    """
    model = str(Path(model).expanduser()) if model.startswith("~") else model
    # Other ranks take the model of rank 0
    if number_here() == 0:
        model = pinned(model, key)
    if hub_snapshot.model_name(model) is not None or run_folder.is_hugging_face(Path(model)):
        return model, None
    return model, run_folder.checkpoint_of(Path(model), key)


def open_checkpoint(config: EvalConfig | SampleConfig) -> None:
    """Find the checkpoint of `config`; ValueError if its run has plugins and none are named."""
    config.checkpoint, of_run = found(config.checkpoint or "", "checkpoint")
    if of_run is not None:
        plugins.check_checkpoint(of_run, config.plugins)


def _sample(function: str, request: Request[SampleConfig]) -> int:
    """Call `function` of longctx.generation with the configuration."""
    open_checkpoint(request.config)
    with system.libraries():
        run: Callable[[SampleConfig], int] = resolve_name(f"longctx.generation:{function}")
    return run(request.config)


def _export(request: Request[options.ExportOptions]) -> None:
    config = request.config
    file = run_folder.checkpoint_of(config.run, "run")
    plugins.check_checkpoint(file, config.plugins)
    with system.libraries():
        from longctx.hf.export import run
    run(file, config.out, config.dtype, config.shard_gb, config.adapter)


def _data(request: Request[options.DataOptions], training: list[str]) -> int:
    config: TrainConfig = compose("train", training).config
    fields.refuse((config.seq_len == "max", "seq_len=max: give a number of tokens"))
    describe = resolve_name("longctx.data.describe:describe")
    return int(describe(config.seq_len, config.init, config.data_as_read))


def _call(function: str, request: Request[Any]) -> Any:
    """Import the `function` of that path in longctx, and call it with the values of the keys."""
    return resolve_name(f"longctx.{function}")(**vars(request.config))


COMMANDS: dict[str, Command] = {
    "train": Command(TrainConfig, _train),
    "resume": Command(options.ResumeOptions, _resume, trains=True),
    "eval": Command(EvalConfig, _evaluate),
    "score": Command(eval_config.ScoreConfig, _evaluate),
    "generate": Command(GenerateConfig, partial(_sample, "run")),
    "chat": Command(ChatConfig, partial(_sample, "chat")),
    "plan": Command(PlanOptions, plan, trains=True),
    "data": Command(options.DataOptions, _data, trains=True),
    "check": Command(options.CheckOptions, partial(_call, "hf.check:check")),
    "convert": Command(options.ConvertOptions, partial(_call, "cli.convert:convert")),
    "compare": Command(options.CompareOptions, partial(_call, "report.compare:compare")),
    "dashboard": Command(options.DashboardOptions, partial(_call, "report.dashboard:dashboard")),
    "export": Command(options.ExportOptions, _export),
}
