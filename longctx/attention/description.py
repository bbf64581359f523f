"""Descriptions of the attention backends, for planning, checking and locking a run. No torch here.

A backend's file computes; its description answers everything else, also of memory and speed.
`register` adds the description of a user's backend, so no other file knows a backend by name.
"""

from __future__ import annotations

import tomllib
from collections import ChainMap
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

from longctx.config.fields import Group, key
from longctx.kernels.attention import ALL_SCORES, IMPLEMENTATIONS, Implementation

# attention.options.score=NAME → its score_mod, mask_mod and file, see `register_score`
SCORES: dict[str, Any] = {"none": (None, None, None)}
SCORED = {"score": SCORES}
# Kernel, with `_on_ampere` for its rates there → head size → shares of the chip's peak
RATES = tomllib.loads(Path(__file__).with_name("rates.toml").read_text(encoding="utf-8"))
ALL = ("out", "dq", "dk", "dv")
# Part of `Scores`, or score → what a backend without it lacks, if named otherwise
WORDS = {"sinks": "gradient of its lse, with which sinks are trained", "score": "score function"}


@dataclass(frozen=True)
class Description:
    """A fused kernel of others; the default of a backend from elsewhere."""

    # option → its allowed values, the default first
    options: Mapping[str, Collection[Any]] = field(default_factory=dict)
    # True if a mask may have free intervals, on every device; context.method=allgather needs it
    takes_intervals: bool = True
    # The parts of `Scores` that it has: "softcap" if `run`, and `backward` if there is one, compute
    # it, "key_bias" likewise; "sinks" if gradients flow through the lse, as training them needs
    scores: frozenset[str] = frozenset()
    # True if it computes sinks itself, in `backward` too; otherwise they join its out and lse
    fuses_sinks: bool = False
    # True if the backend's own `backward` takes the forward's out and lse, and if it computes the
    # formula and no variant; `register` sets both
    has_backward: bool = False
    exact: bool = True
    # True if its launches are the same for all documents in sequences of one length. Others count
    # documents, or build block masks, on the host, and no CUDA graph can hold that.
    capturable: bool = False
    # True if bound causal and full masks may be reused by later calls of the same lengths
    reuses_masks: bool = True
    # kernel → the results of "out", "dq", "dk", "dv" that have the same bits in every run of it on
    # one machine; the kernel lock of a run holds their hashes
    reproducible: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    # Such as {"fused": {"64": (0.3, 0.3)}}: shares of the peak; default: torch's fused kernels
    rates: Mapping[str, Mapping[str, tuple[float, float]]] = field(
        default_factory=lambda: RATES["sdpa"]
    )
    # Speed on a CPU, as a multiple of sdpa's; attention=auto compares it there. Of ours: training's
    # passes of 512 to 4,096 tokens, causal, packed and windowed, on two cores.
    on_cpu: float = 0.0
    # Our own kernels, of which the options choose one
    kernels: Mapping[str, Implementation] = field(default_factory=dict)
    # Bytes moved per score, forward and backward, if the (N, T) scores are in memory
    score_bytes: tuple[int, int] | None = None

    def lacks(self, parts: frozenset[str]) -> str | None:
        """Return what of `parts` of `Scores`, or options, it lacks, and who has it; else None."""
        lacking = sorted(parts - self.scores - {*self.options})
        missing = " and no ".join(WORDS.get(part, part.replace("_", " ")) for part in lacking)
        names = " or ".join(x for x, y in DESCRIPTIONS.items() if parts <= y.scores | {*y.options})
        return f"it has no {missing}; use attention={names}" if missing else None


# Backend → its description; `register` adds those from elsewhere
DESCRIPTIONS: dict[str, Description] = {
    "flash": Description(
        options={"kernel": ("auto", "portable", "ampere", "hopper"), "prune": (False, True)},
        scores=ALL_SCORES,
        fuses_sinks=True,
        has_backward=True,
        capturable=True,
        reproducible={name: kernel.reproducible for name, kernel in IMPLEMENTATIONS.items()},
        rates=RATES["flash"],
        kernels=IMPLEMENTATIONS,
        on_cpu=0.9,
    ),
    "naive": Description(
        SCORED,
        scores=ALL_SCORES,
        capturable=True,
        reproducible={"torch matmul and softmax": ALL},
        on_cpu=0.15,
        score_bytes=(22, 40),
    ),
    "sdpa": Description(
        options={"kernel": ("auto", "flash", "cudnn")},
        takes_intervals=False,
        # the backward of the GPU kernels adds up in any order
        reproducible={"torch CPU flash": ALL, "flash-attention-2": ("out",), "cudnn": ("out",)},
        on_cpu=1.0,
    ),
    # a block mask has a part for each pair of tiles
    "flex": Description(SCORED, scores=ALL_SCORES, reuses_masks=False, rates=RATES["flex"]),
    "flash_attn": Description(
        options={"version": ("auto", 4, 3, 2)},
        takes_intervals=False,
        # dq is added up in any order
        reproducible={f"flash-attention-{version}": ("out",) for version in (4, 3, 2)},
        rates=RATES["flash_attn"],
    ),
}
AUTO = "auto"  # the fastest backend that is exact here; a run decides it before anything else
# Words of attention=. An undecided auto passes each check that a backend could pass.
CHOICES = ChainMap(DESCRIPTIONS, {AUTO: Description(capturable=True)})


@dataclass
class AttentionConfig(Group):
    """Which backend computes attention, and how."""

    prefix = "attention."
    backend: str = key(
        "flash", "set by attention=NAME; auto: the fastest here", choices=CHOICES, short="full"
    )
    options: dict[str, Any] = key({}, "the backend's own: attention.options.kernel=cudnn of sdpa")
    window: str | None = key(None, "of layers with a window: attention={window: sdpa, full: flash}")

    @property
    def description(self) -> Description:
        """Return the description of the backend; of a fused kernel if no imported module has it."""
        return CHOICES.get(self.backend, Description())

    def of_window(self, window: int | None) -> AttentionConfig:
        """Return the attention of layers with this window, with the options that it has."""
        if self.window is None:
            return self
        own = AttentionConfig(self.backend if window is None else self.window)
        allowed = own.description.options
        own.options = {x: y for x, y in self.options.items() if y in [*allowed.get(x, ())]}
        return own

    @property
    def each(self) -> list[AttentionConfig]:
        """Return the attention of each kind of layer."""
        return [self] if self.window is None else [self.of_window(None), self.of_window(1)]

    @property
    def label(self) -> str:
        """Return the names of its backends."""
        return "+".join(x.backend for x in self.each[::-1])

    @property
    def variant(self) -> str | None:
        """Return the setting by which it is no plain softmax attention, or may be none, or None."""
        if not all(x.backend in CHOICES and x.description.exact for x in self.each):
            return f"attention={self.label}"
        score = self.options.get("score", "none")
        return None if score == "none" else f"attention.options.score={score}"

    def problems(self) -> Iterator[str]:
        """Yield a message for an option that the backend does not have, or for its value."""
        if self.window is not None and not {self.backend, self.window} <= DESCRIPTIONS.keys():
            yield f"attention={self.label}: name two of {', '.join(DESCRIPTIONS)}"
        options = [x.description.options for x in self.each]
        for name, value in self.options.items():
            given, has = f"attention.options.{name}={value}", [x for x in options if name in x]
            allowed = [*dict.fromkeys(value for x in has for value in x[name])]
            # A model has one function of scores
            if not has or (name == "score" and len(has) < len(options)):
                names = ", ".join(dict.fromkeys(chain(*options))) or "none"
                if "causal" in name or "mask" in name:
                    names += "; masks are mask=Mask.causal() or mask=Mask.full()"
                of = " and ".join(x for x, each in DESCRIPTIONS.items() if name in each.options)
                yield f"{given} is not an option of {self.label} ({names}) but of {of or 'none'}"
            elif value not in allowed:
                others = "; others need plugins=[FILE.py]" if name == "score" else ""
                yield f"{given}: one of {', '.join(map(str, allowed))}{others}"
