"""Mixers by name, and their answers to the planner. This module is torch-free.

A file of this folder, or a plugin, registers a subclass of `Mixer`. The class is asked for its
weights and costs when a model has such a layer, and only then its file, and torch, are imported.
"""

from __future__ import annotations

import importlib
import pkgutil
import sys
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import gcd, prod
from pathlib import Path
from typing import Any, NamedTuple

from longctx.config.fields import Group, key
from longctx.spec.parts import AttentionSpec, LinearSpec, Piece

SOFTMAX = "softmax"  # attention by the backend that attention= names


class Cost(NamedTuple):
    """What a mixer takes next to its matrices; bytes, but for the state, are of each token.

    flops: of a token's forward
    saved: bytes that forward leaves for backward, besides the layer's input
    backward: bytes alive in backward, besides those
    state: bytes of what decoding keeps of a text, however long it is
    """

    flops: float = 0.0
    saved: float = 0.0
    backward: float = 0.0
    state: float = 0.0


class Mixers(Collection[str]):
    """The names that model.mixer= takes."""

    def __init__(self) -> None:
        self._classes: dict[str, Any] = {}
        paths = [str(Path(__file__).parent)]
        files = {module.name for module in pkgutil.iter_modules(paths)}
        self._files = files - {Path(__file__).stem}

    def __iter__(self) -> Iterator[str]:
        return iter((SOFTMAX, *sorted(self._files | self._classes.keys())))

    def __len__(self) -> int:
        return len(list(iter(self)))

    def __contains__(self, name: object) -> bool:
        return name in (SOFTMAX, *self._files, *self._classes)

    def __getitem__(self, name: str) -> Any:
        """Return the class of that name."""
        if name not in self._classes:
            importlib.import_module(f"longctx.model.mixers.{name}")
        return self._classes[name]

    def register(self, name: str, mixer: Any) -> None:
        """Let model.mixer= have the value `name`; ValueError if the name is taken."""
        is_own = mixer.__module__ == f"longctx.model.mixers.{name}"
        if name in self._classes or (name in self and not is_own):
            raise ValueError(f"model.mixer={name}: is registered already; choose another name")
        self._classes[name] = mixer

    def remove(self, name: str) -> None:
        """Forget `name`, as a test does with its own."""
        del self._classes[name]


MIXERS = Mixers()
register = MIXERS.register


@dataclass(frozen=True)
class MixerSpec(AttentionSpec):
    """A layer that a registered class computes; it has the sizes of an attention layer in its
    place.
    """

    mixer: str = SOFTMAX

    @property
    def computed_by(self) -> Any:
        """The class, a `Mixer`."""
        return MIXERS[self.mixer]

    def build(self, *arguments: Any) -> Any:
        return self.computed_by(self, *arguments)

    @property
    def options(self) -> dict[str, Any]:
        """Its values of model.mixer_options.NAME, with defaults."""
        given = self.model.mixer_options.get(self.mixer) or {}
        return {**self.computed_by.options, **given}

    @cached_property
    def shapes(self) -> dict[str, tuple[Any, ...]]:
        """The shape of each weight."""
        return dict(self.computed_by.weights(self))

    @cached_property
    def linears(self) -> tuple[LinearSpec, ...]:
        linears = []
        for name, shape in self.shapes.items():
            if len(shape) == 2:
                rows = shape[0] if isinstance(shape[0], tuple) else (shape[0],)
                tensors = tuple(f"{name}.{n}" for n in range(len(rows)))
                linears.append(LinearSpec(name, tensors, rows, shape[1], False, name == "out"))
        return tuple(linears)

    @property
    def vectors(self) -> tuple[tuple[str, int], ...]:
        others = (name for name, shape in self.shapes.items() if len(shape) != 2)
        return tuple((name, prod(self.shapes[name])) for name in others)

    def pieces(self, theirs: str, ours: str) -> Iterator[Piece]:
        names: Mapping[str, Any] = self.computed_by.names
        for name, shape in self.shapes.items():
            rows = shape[0] if isinstance(shape[0], tuple) else (shape[0],)
            tensors = names[name] if isinstance(names[name], tuple) else (names[name],)
            rows = rows if len(rows) == len(tensors) else (sum(rows),)
            weight = f"{ours}.{self.name}.{name}{'.weight' if len(shape) == 2 else ''}"
            for n, tensor in enumerate(tensors):
                own = rows[n], *shape[1:]
                yield Piece(f"{theirs}.{tensor}", weight, sum(rows[:n]), own)

    @property
    def query_size(self) -> int:
        """Width of the output of its `forward`."""
        return int(self.computed_by.width(self))

    @property
    def gate_size(self) -> int:
        return 0

    @property
    def attends(self) -> int:
        """Count its calls of softmax attention."""
        return int(self.computed_by.attends)

    @property
    def softmax(self) -> AttentionSpec:
        """The attention layer of its sizes."""
        sizes = self.name, self.folder, self.size, self.model, self.window, self.rope
        return AttentionSpec(*sizes, self.rotates)

    @property
    def heads(self) -> int:
        """Number of heads that devices can divide among them."""
        return int(self.computed_by.heads(self)) if self.computed_by.share == "heads" else 1

    def cost(self, e: int) -> Cost:
        """Return its cost with activations of e bytes."""
        cost: Cost = self.computed_by.cost(self, e)
        return cost

    def flops(self, pairs: float) -> float:
        """Return the FLOPs of a token, which sees `pairs` keys, forward and backward."""
        return self.attends * super().flops(pairs) + 3 * self.cost(2).flops


def layer(mixer: str, *sizes: Any) -> AttentionSpec:
    """Return the layer that `mixer` names, with the `sizes` of an AttentionSpec."""
    return AttentionSpec(*sizes) if mixer == SOFTMAX else MixerSpec(*(*sizes, mixer))


@dataclass
class MixerKeys(Group):
    """The keys of a model that choose its mixers."""

    mixer: list[str] = key([SOFTMAX], "what mixes tokens in each layer, repeated", choices=MIXERS)
    mixer_options: dict[str, Any] = key({}, "model.mixer_options.NAME.KEY=value of a mixer's own")

    def mixer_of(self, layer: int) -> str:
        """Return the name of what mixes tokens in `layer`."""
        return self.mixer[layer % len(self.mixer)]

    def problems(self) -> Iterator[str]:
        """Yield a message for layers or options that no mixer has."""
        if not self.mixer:
            yield f"model.mixer=[]: no layer can be made; give one of {', '.join(MIXERS)}"
        for name, options in self.mixer_options.items():
            setting = f"model.mixer_options.{name}"
            if name == SOFTMAX or name not in self.mixer or not isinstance(options, dict):
                yield f"{setting}={options}: options of a layer of model.mixer; leave it out"
            elif unknown := set(options) - set(MIXERS[name].options):
                has = ", ".join(MIXERS[name].options) or "none"
                yield f"{setting}.{min(unknown)}: not an option of {name}; it has: {has}"
        for part in of_model(self):
            without = "" if part.linears else "its weights have no matrix; give it one"
            if problem := without or part.computed_by.problem(part):
                yield f"model.mixer={part.mixer}: {problem}"


def shared_heads(model: Any) -> int:
    """Return a number of heads: devices can share sequences if their number divides it."""
    return gcd(model.heads, *(part.heads for part in of_model(model)))


def check(model: Any, device: str, degree: int | str, method: str) -> None:
    """Raise ValueError if `device` cannot compute the mixers of `model`, or `degree` devices cannot
    share its sequences by this `method`.
    """
    for part in of_model(model):
        if reason := part.computed_by.refusal(device):
            raise ValueError(f"model.mixer={part.mixer}: {reason}")
    if isinstance(degree, str) or degree == 1:
        return
    for part in of_model(model):
        setting = f"context={degree}: model.mixer={part.mixer}"
        if part.heads % degree or model.heads % degree:
            possible = [n for n in range(1, degree) if shared_heads(model) % n == 0]
            raise ValueError(f"{setting} is not divided by so many devices; give {possible[-1]}")
        if method == "allgather":
            raise ValueError(f"{setting} is divided by heads; give context.method=ulysses")


def plugins_of(model: Any) -> list[Path]:
    """Return the files outside this package that compute layers of `model`."""
    modules = {sys.modules[part.computed_by.__module__] for part in of_model(model)}
    return [Path(x.__file__ or "") for x in modules if not x.__name__.startswith("longctx.")]


def attends(part: AttentionSpec) -> int:
    """Return how often the layer computes softmax attention."""
    return part.attends if isinstance(part, MixerSpec) else 1


def of_model(model: Any) -> list[MixerSpec]:
    """Return the layers of `model` that are no softmax attention, each sort once."""
    return [x.attention for x, _ in model.kinds if isinstance(x.attention, MixerSpec)]
