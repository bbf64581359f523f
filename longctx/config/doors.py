"""Doors: keys whose values are registered by name, each with one torch-free description beside its
code. Checks, help and the planner read it through the door, which imports the code's package when
it is first asked. Plugins register in the same way. Optimizers and objectives have keys of their
own.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, NamedTuple, Self, TypeVar

from longctx.config.fields import KEYS, Group, Key, foreign_keys, key, keys, refuse_all, shown

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

Description = TypeVar("Description")


class Door(Mapping[str, Description]):
    """Name → description, for each value that `key` may have."""

    def __init__(self, key: str, module: str) -> None:
        self.key, self.module = key, module
        self._descriptions: dict[str, Description] = {}

    def register(self, name: str, description: Description) -> None:
        """Let `key` have the value `name`; ValueError if the name is taken."""
        if name in self:
            raise ValueError(f"{self.key}={name} is already registered; choose another name")
        self._descriptions[name] = description
        KEYS.clear()  # it may have keys of its own

    def remove(self, name: str) -> None:
        """Forget `name`, as a test does with its own."""
        del self._descriptions[name]
        KEYS.clear()

    # Names register when their package is imported: no command pays for a door that it does not ask
    def __getitem__(self, name: str) -> Description:
        importlib.import_module(self.module)
        return self._descriptions[name]

    def __iter__(self) -> Iterator[str]:
        importlib.import_module(self.module)
        # Sorted: which module registers first depends on what was imported before
        return iter(sorted(self._descriptions))

    def __len__(self) -> int:
        return len(list(iter(self)))


class OptimizerTraits(NamedTuple):
    """Describe an optimizer to the planner, to the checks of a request, and to training."""

    # Makes the optimizer of a model and its run; None: `build` in the file of its name
    build: Callable[[nn.Module, Any], Optimizer] | None = None
    # Bytes of fp32 state for a weight in a matrix of the blocks, and for any other weight
    matrix_bytes: int = 8
    other_bytes: int = 8
    # Its own keys, declared in a subclass of OptimizerConfig
    keys: type[OptimizerConfig] | None = None
    # Values that memory.optimizer_state may have
    states: tuple[str, ...] = ("fp32",)
    # True if it can train the additions of LoRA
    lora: bool = True
    # True if it orthogonalizes matrices by Newton-Schulz, `iterations` times
    orthogonalizes: bool = False


class Objective(NamedTuple):
    """Describe what a step minimizes.

    loss: model, micro-batch and the keys `objective` → the () sum over the micro-batch, times its
        weight; with `figures` also their (2, figures) sums and counts.
    losses: the (B, T) loss of each target token, 0 for other tokens, by which cross entropies
        validate; objectives with `figures` validate by loss.
    metrics: the mean loss of a validation → keys of its row.
    collate: sequences, and layers by window → a micro-batch; None: `micro_batch` of batches.py. Its
        `scored` counts the targets, by which the loss of a step is divided.
    """

    loss: Callable[[Any, Any, Any], Any]
    losses: Callable[[Any, Any], Tensor] | None = None
    metrics: Callable[[float], dict[str, float]] = lambda loss: {"val_loss": loss}
    collate: Callable[[Any, Any], Any] | None = None
    # Metrics of the rows, besides the loss
    figures: tuple[str, ...] = ()
    # Its own keys, declared in a subclass of ObjectiveConfig
    keys: type[ObjectiveConfig] | None = None
    # What data.preferences is to it; None: it reads plain documents
    data: str | None = None
    # Called before the first step, with the weights that training begins with: run, data, module
    # and ranks → plain values that checkpoints hold
    prepare: Callable[[Any, Any, Any, Any], dict[str, Any]] | None = None
    # The default learning rate of cross entropy, as a multiple of its own
    slower: float = 1.0


class ScheduleTraits(NamedTuple):
    """Describe a learning-rate schedule.

    share: a step after the warm-up, counted from 0, and the run's steps and keys, a `Schedule` of
        longctx/training/learning_rate.py → the rate as a share of lr.
    """

    share: Callable[[int, Any], float]
    # Keys of TrainConfig that it reads, with their defaults; other schedules refuse them
    keys: Mapping[str, Any] = {}


class TrackerTraits(NamedTuple):
    """Describe a tracker, which gets a copy of the rows of a run.

    copy: the request of a copy and the commands that follow it → rows sent until a command has
        "finish"; called in a process of its own.
    opening: the keys `wandb` and the run's folder → lines that the run shows when it starts. If
        there are none, the tracker gets no copy.
    late: a command for rows that are not sent in time, with {folder} for the run's folder.
    reads: the keys of `wandb` that it reads; None: all.
    package: that it imports; None: none.
    """

    copy: Callable[[dict[str, Any], Iterator[dict[str, Any]]], None]
    opening: Callable[[Any, Path], list[str]]
    late: str = ""
    reads: Collection[str] | None = None
    package: str | None = None


OPTIMIZERS: Door[OptimizerTraits] = Door("optimizer", "longctx.training.optimizers")
OBJECTIVES: Door[Objective] = Door("objective", "longctx.training.objectives")
SCHEDULES: Door[ScheduleTraits] = Door("lr_schedule", "longctx.training.learning_rate")
TRACKERS: Door[TrackerTraits] = Door("tracker", "longctx.runs.trackers")

Traits = TypeVar("Traits", OptimizerTraits, Objective)


@dataclass
class NamedGroup(Group, Generic[Traits]):
    """A name from a door. Keys that a name has alone are a subclass of its group, beside its code:
    `keys` of its description.
    """

    door: ClassVar[Door[Any]]
    name: str = ""

    @classmethod
    def of(cls, name: str | None = None, **own: Any) -> Self:
        """Return the group with `name`, None: the default, and its `own` keys."""
        named = {} if name is None else {"name": name}
        return cls.kind(named)(**named, **own)

    @classmethod
    def kind(cls, values: Mapping[str, Any]) -> type[Self]:
        """Return the class for the name among `values`; ValueError for keys of other names."""
        name = values.get("name", keys(cls)["name"].default)
        kind: type[Self] = (cls.door[name].keys if name in cls.door else None) or cls
        of_any = cls.all_keys().keys() - {"name"}
        given = {f"{cls.prefix}{own}": shown(values[own]) for own in values if own in of_any}
        own = sorted(keys(kind).keys() - {"name"})
        refuse_all(foreign_keys(given, own, f"{cls.door.key}={name}"))
        return kind

    @classmethod
    def all_keys(cls) -> dict[str, Key]:
        """Return the keys of every name; the meaning of each begins with the names that have it."""
        found = dict(keys(cls))
        own = {name: keys(traits.keys) for name, traits in cls.door.items() if traits.keys}
        for name in dict.fromkeys(name for declared in own.values() for name in declared):
            owners = [owner for owner in own if name in own[owner]]
            first = own[owners[0]][name]
            meaning = f"{', '.join(owners)}: {first.meaning}"
            found.setdefault(name, first._replace(meaning=meaning))
        return found

    @property
    def traits(self) -> Traits:
        """Return the description of this name."""
        traits: Traits = self.door[self.name]
        return traits


@dataclass
class OptimizerConfig(NamedGroup[OptimizerTraits]):
    """Which optimizer trains, and its own keys."""

    prefix = "optimizer."
    door = OPTIMIZERS
    name: str = key("adamw", "set by optimizer=NAME", choices=OPTIMIZERS, short=True)


@dataclass
class ObjectiveConfig(NamedGroup[Objective]):
    """What a step minimizes, and its own keys."""

    prefix = "objective."
    door = OBJECTIVES
    name: str = key("cross_entropy", "set by objective=NAME", choices=OBJECTIVES, short=True)
