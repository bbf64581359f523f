"""Descriptions of the attention backends, for planning, checking and locking a run. No torch here.

A backend's file computes; its description answers everything else: options, saved bytes, workspace,
speed. `register` adds the description of a user's backend, so no other file knows a backend by
name.

Letters: N tokens of a micro-batch on one device, T keys of a sequence, H and Hkv heads of D
channels, e bytes of an activation.
"""

from __future__ import annotations

import tomllib
from collections import ChainMap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from longctx.config.fields import Group, key
from longctx.kernels.attention import IMPLEMENTATIONS, hopper_size
from longctx.spec.parts import FP32, AttentionSpec, Pass

# Kernel, with `_on_ampere` for its rates there → head size → shares of the chip's peak
Rates = Mapping[str, Mapping[str, tuple[float, float]]]
RATES = tomllib.loads(Path(__file__).with_name("rates.toml").read_text(encoding="utf-8"))
ALL = ("out", "dq", "dk", "dv")
# The parts of `Scores` that not every backend has
WORDS = {"softcap": "softcap", "sinks": "gradient of its lse, with which sinks are trained"}
ALL_SCORES = frozenset(WORDS)


@dataclass(frozen=True)
class Description:
    """A fused kernel of others; the default of a backend from elsewhere."""

    # option → its allowed values, the default first
    options: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    # True if a mask may have free intervals, on every device; context.method=allgather needs it
    takes_intervals: bool = True
    # The parts of `Scores` that it has: "softcap" if `run`, and `backward` if there is one, compute
    # it; "sinks" if gradients flow through the lse, as training them needs
    scores: frozenset[str] = frozenset()
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
    # As in rates.toml; the default is that of torch's fused kernels
    rates: Rates = field(default_factory=lambda: RATES["sdpa"])
    # Speed on a CPU, as a multiple of sdpa's; attention=auto compares it there. Of ours: training's
    # passes of 512 to 4,096 tokens, causal, packed and windowed, on two cores.
    on_cpu: float = 0.0
    # Bytes moved per score, forward and backward, if the (N, T) scores are in memory
    score_bytes: tuple[int, int] | None = None

    def kernel_on(self, generation: str, part: AttentionSpec, p: Pass) -> str:
        """Return the kernel that a GPU of this `generation` runs, as rates.toml names it."""
        return "fused"

    def rates_on(self, generation: str, part: AttentionSpec, p: Pass) -> tuple[float, float]:
        """Return the shares of the chip's peak that forward and backward reach.

        `generation` is hopper, ampere (and later GPUs with its products), or other.
        """
        kernel = self.kernel_on(generation, part, p)
        rates = self.rates.get(f"{kernel}_on_{generation}", self.rates[kernel])
        sizes = [size for size in rates if part.model.head_size <= int(size)]
        return rates[(sizes or list(rates)[-1:])[0]]

    def saved(self, part: AttentionSpec, p: Pass) -> float:
        """Return the bytes that forward leaves for backward, if nothing of it is recomputed."""
        # rotated q and k; v is a part of the projection's output, which is saved whole
        inputs = p.activation * (2 * part.query_size + 3 * part.key_size)
        return (part.output_bytes(p) + inputs) * p.tokens

    def workspace(self, part: AttentionSpec, p: Pass) -> float:
        """Return the bytes that backward takes besides its inputs and outputs."""
        q_size = p.activation * part.query_size
        lse_and_delta = 2 * FP32 * part.model.heads
        sums_of_dq = FP32 * part.query_size
        again = q_size if p.recompute == "block" else 0
        # dk and dv of every query head, before they are summed
        repeated = 2 * q_size if part.model.heads != part.model.kv_heads else 0
        return (lse_and_delta + sums_of_dq + repeated + again) * p.tokens

    def forward_workspace(self, part: AttentionSpec, p: Pass) -> float:
        """Return the bytes that a forward without gradient takes besides inputs and output."""
        return 0.0

    def lacks(self, parts: frozenset[str]) -> str | None:
        """Return the parts of `Scores` that it lacks, with a backend for them, or None."""
        missing = " and no ".join(WORDS[part] for part in sorted(parts - self.scores))
        names = " or ".join(name for name, other in DESCRIPTIONS.items() if parts <= other.scores)
        return f"it has no {missing}; use attention={names}" if missing else None


class NaiveDescription(Description):
    """Scores and probabilities are in memory."""

    def saved(self, part: AttentionSpec, p: Pass) -> float:
        inputs = p.activation * (part.query_size + 2 * part.key_size)
        scores = self._saved_of_score(part, p) * part.model.heads * p.keys
        return (part.output_bytes(p) + inputs + scores) * p.tokens

    def workspace(self, part: AttentionSpec, p: Pass) -> float:
        if p.recompute == "block":
            each = self._saved_of_score(part, p) + p.activation + 2 * FP32
        else:  # probabilities make room for a part
            each = FP32 if p.is_compiled else 2 * FP32 + p.activation
        return each * part.model.heads * p.tokens * p.keys

    def forward_workspace(self, part: AttentionSpec, p: Pass) -> float:
        # masked scores, their distance to the lse, and its exp
        return 3 * FP32 * part.model.heads * p.tokens * p.keys

    def _saved_of_score(self, part: AttentionSpec, p: Pass) -> int:
        if p.is_compiled and p.recompute == "none":
            # raw scores and probabilities; the compiler computes the rest again
            return 2 * p.activation
        # masked scores, exp of them, probabilities; tanh of the scores
        return 2 * FP32 + p.activation + (0 if part.model.softcap is None else FP32)


class FlashDescription(Description):
    """Our kernels; on Hopper GPUs those of its own."""

    def kernel_on(self, generation: str, part: AttentionSpec, p: Pass) -> str:
        own = IMPLEMENTATIONS.get(f"triton-{generation}")
        is_taken = own is not None and own.takes(p.activation, part.model.head_size)
        asked = p.options.get("kernel", "auto")
        is_run = is_taken if asked == "auto" else asked == generation
        return generation if is_run else "portable"

    def workspace(self, part: AttentionSpec, p: Pass) -> float:
        lse_and_delta = 2 * FP32 * part.model.heads * p.tokens
        # as if every GPU were a Hopper: on others it may be a sum of dq too much
        if not p.on_gpu or self.kernel_on("hopper", part, p) != "hopper":
            return lse_and_delta
        sums_of_dq = FP32 * part.model.heads * hopper_size(part.model.head_size) * p.tokens
        return lse_and_delta + sums_of_dq / p.head_parts


# Backend → its description; `register` adds those from elsewhere
DESCRIPTIONS: dict[str, Description] = {
    "flash": FlashDescription(
        options={"kernel": ("auto", "portable", "ampere", "hopper")},
        scores=ALL_SCORES,
        has_backward=True,
        capturable=True,
        reproducible={name: kernel.reproducible for name, kernel in IMPLEMENTATIONS.items()},
        rates=RATES["flash"],
        on_cpu=0.9,
    ),
    "naive": NaiveDescription(
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
    "flex": Description(scores=ALL_SCORES, reuses_masks=False, rates=RATES["flex"]),
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
        "flash", "set by attention=NAME; auto: the fastest here", choices=CHOICES, short=True
    )
    options: dict[str, Any] = key({}, "the backend's own: attention.options.kernel=cudnn of sdpa")

    @property
    def description(self) -> Description:
        """The description of the backend; of a fused kernel if no imported module has it."""
        return CHOICES.get(self.backend, Description())

    def problems(self) -> Iterator[str]:
        """Yield a message for an option that the backend does not have."""
        check_options(self.backend, self.options)
        yield from ()


def check_options(backend: str, options: Mapping[str, Any]) -> None:
    """Raise ValueError for an option that `backend` does not have, or for its value."""
    allowed = CHOICES[backend].options
    for name, value in options.items():
        if name not in allowed:
            names = ", ".join(allowed) or "none"
            if "causal" in name or "mask" in name:
                names += "; masks are mask=Mask.causal() or mask=Mask.full()"
            raise ValueError(
                f"attention.options.{name}={value} is not an option of {backend}; it has: {names}"
            )
        if value not in allowed[name]:
            choices = ", ".join(str(choice) for choice in allowed[name])
            raise ValueError(f"attention.options.{name}={value} must be one of {choices}")


def capturable_backends() -> list[str]:
    """Return the backends whose steps CUDA graphs can hold."""
    return [name for name, description in DESCRIPTIONS.items() if description.capturable]
