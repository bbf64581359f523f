"""The command line: arguments → a checked dataclass → the command. Nothing here imports torch.

`parse` reads arguments, `commands` is the table of commands with their help and exit codes,
`early_checks` tells what is missing on this machine.
"""

from longctx.cli.commands import (
    COMMANDS,
    answer,
    check_backends,
    check_unused,
    help_text,
    key_lines,
    libraries,
    main,
)
from longctx.cli.parse import compose, from_file, jobs, options, split_own, with_model
from longctx.config.presets import CONFIGS, names

__all__ = [
    "COMMANDS",
    "CONFIGS",
    "answer",
    "check_backends",
    "check_unused",
    "compose",
    "from_file",
    "help_text",
    "jobs",
    "key_lines",
    "libraries",
    "main",
    "names",
    "options",
    "split_own",
    "with_model",
]
