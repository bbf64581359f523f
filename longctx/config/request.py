"""What the command line asks for, before anything is decided about it."""

from __future__ import annotations

from typing import NamedTuple

from longctx.config.train_config import TrainConfig


class Request(NamedTuple):
    """A checked configuration, the preset chosen in each group, and the keys that were overridden.

    choices: group → name of its preset, {} for a resumed run. overrides: key → value as typed.
    """

    config: TrainConfig
    choices: dict[str, str]
    overrides: dict[str, str]
