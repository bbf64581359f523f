"""The command line: parse.py reads arguments, commands.py runs them. Nothing here imports torch."""

from longctx.cli.commands import COMMANDS, main
from longctx.cli.parse import compose, jobs
from longctx.config.presets import with_model

__all__ = ["COMMANDS", "compose", "jobs", "main", "with_model"]
