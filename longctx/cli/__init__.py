"""The command line: parse.py reads arguments, commands.py runs them. Nothing here imports torch."""

from longctx.cli.commands import (
    COMMANDS,
    answer,
    checked_jobs,
    help_text,
    key_lines,
    main,
    meaning_of,
    summary_of,
)
from longctx.cli.parse import compose, jobs, split_own
from longctx.config.presets import names, with_model

__all__ = [
    "COMMANDS",
    "answer",
    "checked_jobs",
    "compose",
    "help_text",
    "jobs",
    "key_lines",
    "main",
    "meaning_of",
    "names",
    "split_own",
    "summary_of",
    "with_model",
]
