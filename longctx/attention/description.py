"""Descriptions of the attention backends, for planning, checking and locking a run. No torch here.

A backend's file computes; its description answers everything else: options, need of a GPU, saved
bytes, workspace, speed. `register` adds the description of a user's backend, so no other file knows
a backend by name.

Letters: N tokens of a micro-batch on one device, T keys of a sequence, H and Hkv heads of D
channels, e bytes of an activation.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from longctx.config.fields import Group, key
from longctx.kernels.attention import IMPLEMENTATIONS, hopper_size
from longctx.spec.parts import FP32, AttentionSpec

# Head size → share of the chip's peak that forward and backward reach on long sequences. A share
# holds up to its head size, the last one above it too (results/attention.json).
Rates = Mapping[int, tuple[float, float]]

# The same on Ampere, Ada and GeForce, whose products are mma.sync instructions; predicted, not
# measured. FlashAttention-2, which torch's kernels are there, reaches 50 to 73% of an A100
# (arXiv 2307.08691), less for causal masks. Ours for mma.sync reach these shares of it, forward and
# backward, run next to it on an H100: 64 channels 1.07 and 1.06, 96 0.95 and 0.98, 128 1.04 and
# 1.02, 256 0.95 and 1. The portable ones, compiled for sm_80: 64 channels 0.98 and 0.7, 96 0.39 and
# 0.44, 128 0.9 and 0.5, 256 0.61 and 0.32. Heads of 512, which FlashAttention-2 does not take, were
# timed as sm_80 on the same H100.
FLASH_ATTENTION_2: Rates = {64: (0.55, 0.48), 128: (0.64, 0.57)}
FLASH_ON_AMPERE: Rates = {64: (0.59, 0.51), 96: (0.61, 0.56), 128: (0.66, 0.58), 256: (0.61, 0.57)}
PORTABLE_ON_AMPERE: Rates = {
    64: (0.54, 0.33),
    96: (0.25, 0.25),
    128: (0.58, 0.29),
    256: (0.39, 0.18),
    512: (0.21, 0.1),
}


class AttentionLayer(NamedTuple):
    """Attention of one layer and micro-batch, as one device computes it."""

    tokens: int  # N
    keys: int  # T
    part: AttentionSpec
    itemsize: int  # e
    recompute: str  # none | mlp | block
    is_compiled: bool
    on_gpu: bool
    head_parts: int  # computed one after another, if ranks share sequences
    options: Mapping[str, Any]

    @property
    def q_size(self) -> int:
        """Bytes of q, or of the output."""
        return self.itemsize * self.part.query_size * self.tokens

    @property
    def kv_size(self) -> int:
        """Bytes of k, or of v."""
        return self.itemsize * self.part.key_size * self.tokens

    @property
    def scores(self) -> int:
        """Scores of all heads."""
        return self.part.model.heads * self.tokens * self.keys


@dataclass(frozen=True)
class Description:
    """A fused kernel of others; the default of a backend from elsewhere."""

    # option → its allowed values, the default first
    options: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)

    # why a CPU cannot run it, and what to use instead; the same by value of the option `kernel`
    needs_gpu: str | None = None
    kernels_need_gpu: Mapping[str, str] = field(default_factory=dict)

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

    # The default is that of torch's fused kernels
    rates: Rates = field(default_factory=lambda: {64: (0.297, 0.271), 128: (0.304, 0.296)})

    # The same by products of Ampere, see above
    rates_on_ampere: Rates = field(default_factory=lambda: FLASH_ATTENTION_2)

    # Speed on a CPU, as a multiple of sdpa's; attention=auto compares it there. Of ours: training's
    # passes of 512 to 4,096 tokens, causal, packed and windowed, on two cores.
    on_cpu: float = 0.0

    # Bytes moved per score, forward and backward, if the (N, T) scores are in memory
    score_bytes: tuple[int, int] | None = None

    def without_gpu(self, options: Mapping[str, Any]) -> str | None:
        """Return why a CPU cannot run it with these options and what to use instead, or None."""
        return self.needs_gpu or self.kernels_need_gpu.get(str(options.get("kernel")))

    def rates_for(self, layer: AttentionLayer, generation: str) -> tuple[float, float]:
        """Return the shares of the chip's peak that forward and backward reach.

        `generation` is hopper, ampere (and later GPUs with its products), or other.
        """
        rates = self.rates_on_ampere if generation == "ampere" else self.rates
        return _rates(rates, layer.part.model.head_size)

    def saved(self, layer: AttentionLayer) -> float:
        """Return the bytes that forward leaves for backward, if nothing of it is recomputed."""
        # rotated q and k; v is a part of the projection's output, which is saved whole
        inputs = 2 * layer.q_size + 3 * layer.kv_size
        return layer.q_size + FP32 * layer.part.model.heads * layer.tokens + inputs

    def workspace(self, layer: AttentionLayer) -> float:
        """Return the bytes that backward takes besides its inputs and outputs."""
        lse_and_delta = 2 * FP32 * layer.part.model.heads * layer.tokens
        sums_of_dq = FP32 * layer.part.query_size * layer.tokens
        again = layer.q_size if layer.recompute == "block" else 0
        # dk and dv of every query head, before they are summed
        repeated = 2 * layer.q_size if layer.part.model.heads != layer.part.model.kv_heads else 0
        return lse_and_delta + sums_of_dq + repeated + again

    def forward_workspace(self, layer: AttentionLayer) -> float:
        """Return the bytes that a forward without gradient takes besides inputs and output."""
        return 0.0

    def lacks(self, parts: frozenset[str]) -> str | None:
        """Return the parts of `Scores` that it lacks, with a backend for them, or None."""
        missing = " and no ".join(WORDS[part] for part in sorted(parts - self.scores))
        names = " or ".join(name for name, other in DESCRIPTIONS.items() if parts <= other.scores)
        return f"it has no {missing}; use attention={names}" if missing else None


class NaiveDescription(Description):
    """Scores and probabilities are in memory."""

    def saved(self, layer: AttentionLayer) -> float:
        inputs = layer.q_size + 2 * layer.kv_size
        output = layer.q_size + FP32 * layer.part.model.heads * layer.tokens
        return output + inputs + self._saved_of_score(layer) * layer.scores

    def workspace(self, layer: AttentionLayer) -> float:
        if layer.recompute == "block":
            each = self._saved_of_score(layer) + layer.itemsize + 2 * FP32
        else:  # probabilities make room for a part
            each = FP32 if layer.is_compiled else 2 * FP32 + layer.itemsize
        return each * layer.scores

    def forward_workspace(self, layer: AttentionLayer) -> float:
        # masked scores, their distance to the lse, and its exp
        return 3 * FP32 * layer.scores

    def _saved_of_score(self, layer: AttentionLayer) -> int:
        if layer.is_compiled and layer.recompute == "none":
            # raw scores and probabilities; the compiler computes the rest again
            return 2 * layer.itemsize
        # masked scores, exp of them, probabilities; tanh of the scores
        capped = 0 if layer.part.model.softcap is None else FP32
        return 2 * FP32 + layer.itemsize + capped


class FlashDescription(Description):
    """Our kernels; on Hopper GPUs those of its own."""

    def rates_for(self, layer: AttentionLayer, generation: str) -> tuple[float, float]:
        if generation != "other" and self._runs(generation, layer):
            return super().rates_for(layer, generation)
        rates = PORTABLE_ON_AMPERE if generation == "ampere" else PORTABLE
        return _rates(rates, layer.part.model.head_size)

    def workspace(self, layer: AttentionLayer) -> float:
        lse_and_delta = 2 * FP32 * layer.part.model.heads * layer.tokens
        # as if every GPU were a Hopper: on others it may be a sum of dq too much
        if not layer.on_gpu or not self._runs("hopper", layer):
            return lse_and_delta
        padded = hopper_size(layer.part.model.head_size)
        sums_of_dq = FP32 * layer.part.model.heads * padded * layer.tokens / layer.head_parts
        return lse_and_delta + sums_of_dq

    def _runs(self, kernel: str, layer: AttentionLayer) -> bool:
        """Return True if a GPU of its own kind runs `kernel`."""
        chosen = layer.options.get("kernel", "auto")
        takes = IMPLEMENTATIONS[f"triton-{kernel}"].takes
        fits = takes(layer.itemsize, layer.part.model.head_size)
        return fits if chosen == "auto" else chosen == kernel


PORTABLE: Rates = {64: (0.476, 0.397), 128: (0.495, 0.442), 256: (0.52, 0.25), 512: (0.22, 0.097)}


def _rates(rates: Rates, head_size: int) -> tuple[float, float]:
    return rates[next((size for size in rates if head_size <= size), max(rates))]


ALL = ("out", "dq", "dk", "dv")
WORDS = {"softcap": "softcap", "sinks": "gradient of its lse, with which sinks are trained"}
ALL_SCORES = frozenset(WORDS)
# Backend → its description; `register` adds those from elsewhere
DESCRIPTIONS: dict[str, Description] = {
    "flash": FlashDescription(
        options={"kernel": ("auto", "portable", "ampere", "hopper")},
        kernels_need_gpu={
            "ampere": "kernel=ampere needs a GPU; use attention.options.kernel=auto",
            "hopper": "kernel=hopper needs a Hopper GPU; use attention.options.kernel=portable",
        },
        scores=ALL_SCORES,
        has_backward=True,
        capturable=True,
        reproducible={name: kernel.reproducible for name, kernel in IMPLEMENTATIONS.items()},
        rates={
            64: (0.61, 0.595),
            96: (0.63, 0.57),
            128: (0.71, 0.6),
            192: (0.75, 0.44),
            256: (0.78, 0.47),
        },
        rates_on_ampere=FLASH_ON_AMPERE,
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
        kernels_need_gpu={"cudnn": "kernel=cudnn needs a GPU; leave attention.options.kernel=auto"},
        takes_intervals=False,
        # the backward of the GPU kernels adds up in any order
        reproducible={"torch CPU flash": ALL, "flash-attention-2": ("out",), "cudnn": ("out",)},
        on_cpu=1.0,
    ),
    "flex": Description(
        needs_gpu="FlexAttention has no backward on a CPU; use attention=flash",
        scores=ALL_SCORES,
        # a block mask has a part for each pair of tiles
        reuses_masks=False,
        rates={64: (0.18, 0.21), 128: (0.35, 0.28)},
        rates_on_ampere={64: (0.18, 0.21), 128: (0.35, 0.28)},
    ),
    "flash_attn": Description(
        options={"version": ("auto", 4, 3, 2)},
        needs_gpu="FlashAttention needs a CUDA GPU; use attention=flash",
        takes_intervals=False,
        # dq is added up in any order
        reproducible={f"flash-attention-{version}": ("out",) for version in (4, 3, 2)},
        rates={64: (0.565, 0.594), 128: (0.71, 0.68)},
    ),
}
UNKNOWN = Description()  # of a backend that no imported module has registered
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
        """The description of the backend."""
        return CHOICES.get(self.backend, UNKNOWN)

    def problems(self) -> Iterator[str]:
        """Yield a message for an option that the backend does not have."""
        check_options(self.backend, self.options)
        yield from ()

    def check_without_gpu(self) -> None:
        """Raise ValueError, with a remedy, if the backend or its options need a GPU."""
        if reason := self.description.without_gpu(self.options):
            raise ValueError(f"attention={self.backend} cannot run here: {reason}")


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
