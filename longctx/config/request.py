"""What the command line asks for, before anything is decided about it."""

from __future__ import annotations

from typing import Generic, NamedTuple, TypeVar

Config = TypeVar("Config")


class Request(NamedTuple, Generic[Config]):
    """A checked configuration, the preset chosen in each group, and the keys that were overridden.

    choices: group → name of its preset, "auto" for model= where the device will decide; {} for a
    resumed run. overrides: key → value as typed.
    """

    config: Config
    choices: dict[str, str]
    overrides: dict[str, str]
