"""The command line: `compare PATH... [out=FILE]`, `watch PATH` and `dashboard --project NAME`."""

from __future__ import annotations

import os
from pathlib import Path

from longctx.options import answer

HELP = """See what runs show: compare and watch without an account and without a network.

  python -m longctx.report compare PATH... [out=compare.html]
      Prints what differs between the runs and what came out, and writes a page with their curves to out.
      PATH: folders of runs, such as runs/*; also of runs that still train or were killed.
  python -m longctx.report watch PATH
      Follows the run in the folder PATH, which another process trains, until it ends or Ctrl-C.
  python -m longctx.report dashboard --project NAME [--entity NAME] [--name NAME] [--dry-run]
      Makes a workspace at wandb for the runs of a project: context extension, throughput, memory, loss, evaluation.
      Without an API key, or with --dry-run, prints what it would show. Also as project=NAME ... dry_run=true."""

DASHBOARD = ("project", "entity", "name", "dry_run")


def main(argv: list[str]) -> int:
    """Exit code: 0 done, 2 a mistake in what was asked (one line on stderr), 130 stopped by Ctrl-C."""
    return answer(argv or ["help"], lambda: HELP, lambda words: run(*words))


def run(command: str, *words: str) -> None:
    """Do what the words say; raises ValueError or OSError, one line, for what is wrong with them."""
    if command == "dashboard":
        from longctx.report.dashboard import dashboard

        options = dashboard_options(words)
        dry = options.pop("dry_run", "false")
        if dry not in ("true", "false"):
            raise ValueError(f"dry_run={dry}: true or false")
        return dashboard(**options, dry_run=dry == "true")
    for word in words:
        if word.startswith("-"):
            raise ValueError(f"{word}: there is no such option; see --help")
    if command == "compare":
        out = [word.removeprefix("out=") for word in words if word.startswith("out=")]
        paths = [word for word in words if not word.startswith("out=")]
        for word in paths:
            if "=" in word and not os.path.lexists(word):
                raise ValueError(f"{word}: neither a folder nor out=FILE")
        if not paths:
            raise ValueError("compare: no runs given; give their folders, such as runs/*")
        if len(out) > 1:
            raise ValueError(f"out={out[-1]}: given {len(out)} times; give it once")
        from longctx.report.compare import compare

        compare([Path(path) for path in paths], Path(out[0] if out else "compare.html"))
    elif command == "watch":
        if len(words) != 1:
            raise ValueError(
                f"watch: give the folder of one run, such as runs/NAME (given: {len(words)})"
            )
        from longctx.report.watch import watch

        watch(Path(words[0]))
    else:
        raise ValueError(f"{command}: not a command; choose compare, watch or dashboard")


def dashboard_options(words: tuple[str, ...]) -> dict[str, str]:
    """`--project NAME`, `--project=NAME` and project=NAME alike; ValueError for what is none of the
    options.
    """
    found: dict[str, str] = {}
    waiting = list(words)
    while waiting:
        word = waiting.pop(0)
        key, equals, value = word.removeprefix("--").partition("=")
        key = key.replace("-", "_")
        if key not in DASHBOARD or not (equals or word.startswith("--")):
            raise ValueError(
                f"{word}: not an option of dashboard; there are --project, --entity, --name and --dry-run"
            )
        if key in found:
            raise ValueError(f"{word}: {key} is given twice")
        if not equals and key == "dry_run":
            value = "true"
        elif not equals:
            value = waiting.pop(0) if waiting and not waiting[0].startswith("--") else ""
        if not value:
            raise ValueError(f"{word}: needs a value, such as --{key} longctx")
        found[key] = value
    if "project" not in found:
        raise ValueError("dashboard: give the project at wandb, such as --project longctx")
    return found
