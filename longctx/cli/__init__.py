"""The command line: arguments → a checked dataclass → the command. The only parser of the project.

`overrides` sorts and checks arguments, `composition` applies them with Hydra, `usage` writes
`--help`, `commands` is the table of commands, `entry` the exit codes. Nothing here imports torch.
"""

from longctx.cli.commands import (
    COMMANDS,
    check_backends,
    check_unused,
    help_text,
    main,
    split_own,
)
from longctx.cli.composition import (
    compose,
    from_file,
    jobs,
    options,
    with_model,
)
from longctx.cli.entry import answer, libraries
from longctx.cli.overrides import groups, read
from longctx.cli.usage import key_lines
from longctx.config.presets import CONFIGS, names

__all__ = [
    "COMMANDS",
    "CONFIGS",
    "answer",
    "check_backends",
    "check_unused",
    "compose",
    "from_file",
    "groups",
    "help_text",
    "jobs",
    "key_lines",
    "libraries",
    "main",
    "names",
    "options",
    "read",
    "split_own",
    "with_model",
]
