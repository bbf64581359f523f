"""Mixers by name, and their answers to the planner. This module is torch-free.

A file of this folder, or a plugin, registers a subclass of `Mixer`. The class is asked for its
weights and costs when a model has such a layer, and only then its file, and torch, are imported.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from inspect import getfile
from math import gcd, prod
from pathlib import Path
from traceback import extract_tb, walk_tb
from typing import Any, NamedTuple

from longctx.attention.description import AttentionConfig
from longctx.config.fields import Group, key, refuse
from longctx.spec.parts import AttentionSpec, LinearSpec, Piece

SOFTMAX = "softmax"  # attention by the backend that attention= names
# Keys of a model that only layers with softmax attention read
OF_SOFTMAX = ("window", "sinks", "softcap", "attention_scale", "attention_gate", "qkv_bias")
MODEL = str(Path(__file__).parents[1])  # where mixers are called, besides autograd
FILES = {module.name for module in pkgutil.iter_modules([str(Path(__file__).parent)])}
PLUGINS: set[str] = set()  # the files that plugins= names
# Name → class, None until its file is imported
MIXERS: dict[str, Any] = dict.fromkeys((SOFTMAX, *sorted(FILES - {Path(__file__).stem})))


class Cost(NamedTuple):
    """What a mixer takes next to its matrices, for each token.

    flops: of forward
    saved: bytes that forward leaves for backward, besides the layer's input
    backward: bytes alive in backward, besides those
    """

    flops: float = 0.0
    saved: float = 0.0
    backward: float = 0.0


def register(name: str, mixer: Any) -> None:
    """Let model.mixer= have the value `name`; ValueError if it is taken, or `mixer` no `Mixer`."""
    taken = MIXERS.get(name) or (name in MIXERS and mixer.__module__ != f"{__package__}.{name}")
    not_one = f"model.mixer={name}: give a class that derives from Mixer"
    again = f"model.mixer={name} is already registered; choose another name"
    refuse((not hasattr(mixer, "branch"), not_one), (taken, again))
    unknown = f"model.mixer={name}: needs={mixer.needs}: give a set of key_bias, score or both"
    own = {x for x in ("step", "prefill") if getattr(mixer, x).__module__ != "longctx.model.mixer"}
    no_state = f"model.mixer={name}: step has no state: write prefill, or cached = slice(1, 3)"
    refuse(({*mixer.needs} - {"key_bias", "score"}, unknown))
    refuse((own == {"step"} and mixer.cached is None, no_state))
    MIXERS[name] = mixer


def class_of(name: str) -> Any:
    """Return the class that computes the mixer `name`."""
    if MIXERS[name] is None:
        importlib.import_module(f"longctx.model.mixers.{name}")
    return MIXERS[name]


def mistake(error: BaseException) -> ValueError | None:
    """Return an error in a plugin as one line, with its place; None for others."""
    own = PLUGINS | {getfile(x) for name, x in MIXERS.items() if x and name not in FILES}
    calls, called = [(x.f_code, line) for x, line in walk_tb(error.__traceback__)], ""
    while calls and calls[-1][0].co_filename not in own:
        called += calls.pop()[0].co_filename
    is_of_mixer = any(place in x.co_filename for x, _ in calls for place in (MODEL, "/autograd/"))
    # If a plugin calls this package, or checks the request, its ValueError is about the request
    is_ours = f"{Path(MODEL).parent}" in called or any("check" in x.co_name for x, _ in calls[-1:])
    if not calls or (isinstance(error, ValueError | OSError) and is_ours and not is_of_mixer):
        return None
    code, line = calls[-1]
    problem = f"{code.co_name}: {type(error).__name__}: {' '.join(str(error).split())}"
    shown = ValueError(f"plugins={code.co_filename}: line {line}: {problem}")
    shown.__cause__ = error  # of a full disk, it has another exit code
    return shown


@dataclass(frozen=True)
class MixerSpec(AttentionSpec):
    """A layer that a `Mixer` computes; it has the sizes of an attention layer in its place."""

    mixer: str = SOFTMAX

    @property
    def computed_by(self) -> Any:
        return class_of(self.mixer)

    def build(self, *arguments: Any) -> Any:
        layer = self.computed_by(self, *arguments)
        wanted = {*(f"{x.name}.weight" for x in self.linears), *dict(self.vectors)}
        lists = {x: y if isinstance(y, list | tuple) else [y] for x, y in vars(layer).items()}
        others = [(x, each) for x, y in lists.items() for each in y if hasattr(each, "is_meta")]
        found = dict([*layer.named_parameters(), *layer.named_buffers(), *others])
        if wrong := ", ".join(sorted(wanted ^ found.keys())):  # no checkpoint would have it
            raise self.mistake(f"{wrong}: name each once in weights; make constants in forward")
        return layer

    @property
    def options(self) -> dict[str, Any]:
        """Return its values of model.mixer_options.NAME, with defaults."""
        return {**self.computed_by.options, **self.model.mixer_options.get(self.mixer, {})}

    def mistake(self, problem: str, place: str | None = None) -> ValueError:
        """Return the error for a `problem` of its class, in the class's file or at a `place`."""
        place = place or getfile(self.computed_by)
        return ValueError(f"model.mixer={self.mixer}: {place}: {problem}")

    def check_shape(self, methods: str, found: Any, wanted: Sequence[int]) -> None:
        """Raise ValueError if `found`, which `methods` return, has other first dimensions."""
        shape, wanted = tuple(getattr(found, "shape", ())), tuple(wanted)
        if shape[: len(wanted)] != wanted:
            raise self.mistake(f"{methods} {shape or type(found)}; give the input's {wanted}")

    def answer(self, question: str, form: Callable[[Any], Any], *arguments: Any) -> Any:
        """Return `form` of what its class answers; ValueError, with the place, if either fails."""
        try:
            return form(getattr(self.computed_by, question)(self, *arguments))
        except Exception as error:  # of a plugin
            frames = [x for x in extract_tb(error.__traceback__) if x.filename != __file__]
            places = [f"{x.filename}, line {x.lineno}" for x in frames]
            problem = f"{question}: {type(error).__name__}: {error}"
            raise self.mistake(problem, *places[-1:]) from error

    @cached_property
    def shapes(self) -> dict[str, tuple[Any, ...]]:
        """Return the shape of each weight."""
        return {**self.answer("weights", lambda x: {n: (x[n][0], *x[n][1:]) for n in x})}

    @cached_property
    def linears(self) -> tuple[LinearSpec, ...]:
        stacked = {name: (rows_of(x), x[1]) for name, x in self.shapes.items() if len(x) == 2}
        # `pieces` has the names of their tensors
        return tuple(
            LinearSpec(name, ("",) * len(rows), rows, columns, False, name.split(".")[-1] == "out")
            for name, (rows, columns) in stacked.items()
        )

    @property
    def vectors(self) -> tuple[tuple[str, int], ...]:
        others = {name: shape for name, shape in self.shapes.items() if len(shape) != 2}
        return tuple((name, sum(rows_of(x)) * prod(x[1:])) for name, x in others.items())

    def pieces(self, theirs: str, ours: str) -> Iterator[Piece]:
        for name, shape in self.shapes.items():
            # Families have names for these
            own, rows = f"{self.mixer}.{name}", rows_of(shape)
            numbered = tuple(f"{own}.{n}.weight" for n in range(len(rows)))
            tensors = numbered if len(rows) > 1 else f"{own}.weight"
            tensors = rows_of((self.computed_by.names.get(name, tensors),))
            rows = rows if len(rows) == len(tensors) else (sum(rows),)
            weight = f"{ours}.{self.name}.{name}{'.weight' if len(shape) == 2 else ''}"
            for n, tensor in enumerate(tensors):
                yield Piece(f"{theirs}.{tensor}", weight, sum(rows[:n]), (rows[n], *shape[1:]))

    @property
    def query_size(self) -> int:
        """Return the width of the output of its `forward`."""
        return sum(x.columns for x in self.linears if x.into_residual) or self.size

    @property
    def gate_size(self) -> int:
        gates = self.computed_by.reads_input is True
        return super().gate_size if self.softmax_calls else self.query_size if gates else 0

    @property
    def softmax_calls(self) -> int:
        return int(self.computed_by.softmax_calls)

    @cached_property
    def softmax(self) -> AttentionSpec:
        """Return the attention layer that has the sizes of its calls."""
        model = replace(self.model, **self.computed_by.called(self))
        sizes = self.name, self.folder, self.size, model, self.window, self.rope
        return AttentionSpec(*sizes, self.rotates)

    def cost(self, e: int) -> Cost:
        """Return its cost with activations of e bytes."""
        return Cost(*self.answer("cost", lambda numbers: [*map(float, numbers)], e))

    def flops(self, pairs: float) -> float:
        # A score of a pair has the channels of a query, the sum those of a value, at most as many
        channels = self.softmax.query_size + min(self.softmax.query_size, self.query_size)
        return 6 * self.softmax_calls * pairs * channels + 3 * self.cost(2).flops


def rows_of(shape: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the first item of `shape` as a tuple: the rows of each matrix that a weight stacks."""
    return tuple(shape[0]) if isinstance(shape[0], tuple | list) else shape[:1]


@dataclass
class MixerKeys(Group):
    """The keys of a model that choose its mixers."""

    mixer: list[str] = key([SOFTMAX], "what mixes tokens in each layer, repeated", choices=MIXERS)
    mixer_options: dict[str, Any] = key({}, "of mixers: model.mixer_options.NAME.KEY=value")

    def mixer_of(self, layer: int) -> str:
        """Return the name of what mixes tokens in `layer`."""
        return self.mixer[layer % len(self.mixer)]

    @property
    def largest_attention(self: Any) -> AttentionSpec:
        """Return the softmax attention with the largest heads, as layers call it."""
        called = [getattr(x.attention, "softmax", x.attention) for x, _ in self.kinds]
        return max(called, key=lambda part: part.model.head_size)

    @property
    def plugin_files(self) -> list[Path]:
        """Return the files outside this package that compute layers."""
        classes = {part.computed_by for part in of_model(self)}
        return [Path(getfile(x)) for x in classes if not x.__module__.startswith("longctx.")]

    def norms_around(self: Any, layer: int) -> tuple[bool, bool]:
        """Return True if `layer` has norms before its branches, and if it has norms after them."""
        mixed = "post" if self.mixer_of(layer) == SOFTMAX else "pre"
        norms = mixed if self.norms == "mixed" else self.norms
        return norms != "post", norms in ("post", "sandwich")

    def problems(self) -> Iterator[str]:
        """Yield a message for layers or options that no mixer has."""
        model: Any = self
        if not 0 < len(self.mixer) <= model.layers:
            given = f"model.mixer=[{','.join(self.mixer)}] model.layers={model.layers}"
            yield f"{given}: give one to {model.layers} of {', '.join(MIXERS)}"
        layers = {part.mixer: part for part in of_model(model)}
        for name, given in self.mixer_options.items():
            has = layers[name].computed_by.options if name in layers else {}
            if not has or not isinstance(given, dict) or given.keys() - has:
                options = f"options of {name} in model.mixer=[{','.join(self.mixer)}]"
                yield f"model.mixer_options.{name}={given}: {options}: {', '.join(has) or 'none'}"
            for option, value in given.items():
                default = has[option]
                is_number = isinstance(default, float) and type(value) is int
                if not (default is None or is_number or type(value) is type(default)):
                    yield f"model.mixer_options.{name}.{option}={value}: its default is {default}"
        for name, part in layers.items():
            problem = part.computed_by.problem(part)
            if not problem and (unknown := {*part.computed_by.exact} - part.shapes.keys()):
                problem = f"exact={sorted(unknown)}: its weights are {', '.join(part.shapes)}"
            if problem or not part.linears:
                yield f"model.mixer={name}: {problem or 'its weights have no matrix; give it one'}"
        has_softmax = SOFTMAX in self.mixer or any(x.softmax_calls for x in layers.values())
        for name in () if has_softmax else OF_SOFTMAX:
            if (value := getattr(model, name)) not in (None, False, "none"):
                yield f"model.{name}={value}: no layer has softmax attention; leave it out"


def layer(mixer: str, *sizes: Any) -> AttentionSpec:
    """Return the layer that `mixer` names, with the `sizes` of an AttentionSpec."""
    return AttentionSpec(*sizes) if mixer == SOFTMAX else MixerSpec(*(*sizes, mixer))


def of_model(model: Any) -> list[MixerSpec]:
    """Return the layers of `model` that a `Mixer` computes, each kind once."""
    return [x.attention for x, _ in model.kinds if isinstance(x.attention, MixerSpec)]


def shared_heads(model: Any) -> int:
    """Return the number of heads that a number of devices must divide to share sequences."""
    classes = [(part, part.computed_by) for part in of_model(model)]
    return gcd(model.heads, *(x.heads(part) if x.share else 1 for part, x in classes))


def check(model: Any, chosen: AttentionConfig, device: str, degree: Any, method: str) -> None:
    """Refuse mixers of `model` that attention, `device` or context=`degree` cannot compute."""
    heads, ranks = shared_heads(model), 1 if degree == "auto" else degree
    whole = ",".join(part.mixer for part in of_model(model) if not part.computed_by.share)
    refuse((whole and ranks > 1, f'model.mixer={whole}: has no share = "heads"; give context=1'))
    for part in of_model(model):
        setting, own = f"model.mixer={part.mixer}", chosen.of_window(part.window)
        needs, given = frozenset(part.computed_by.needs), chosen.variant
        has_own = given and "score" in needs and f"{given}: the mixer has its own; leave it out"
        lack = own.description.lacks(needs) or has_own
        reason, odd = part.computed_by.refusal(device), heads % ranks
        give = f"one that divides {heads}" if odd else "context.method=ulysses"
        wrong = ranks > 1 and (odd or method == "allgather")
        shared = f"{setting}: context={ranks} shares its heads; give {give}"
        lacking = f"{setting} attention={own.backend}: {lack}"
        refuse((lack, lacking), (reason, f"{setting}: {reason}"), (wrong, shared))


def check_windows(model: Any, backend: str | None) -> None:
    """Raise ValueError if attention.window names a `backend`, and no layer of `model` has one."""
    lacks = "model.window=null" if model.has_kernels else "transformers computes the model"
    if backend and (model.window is None or not model.has_kernels):
        raise ValueError(f"attention.window={backend}: {lacks}; give one backend for all layers")
