"""One optimizer step, on its devices: everything on which memory and speed depend. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from statistics import LinearRegression
from typing import NamedTuple

from longctx.attention.description import DESCRIPTIONS, AttentionConfig
from longctx.config.doors import OptimizerConfig
from longctx.config.layout_config import (
    STRATEGIES,
    MemoryConfig,
    Strategy,
    allgather_group,
    tile_size,
    ulysses_parts,
)
from longctx.model.mixers.description import of_model
from longctx.spec.model_config import GPTConfig, LoraConfig
from longctx.spec.parts import FP32, Pass

# Defaults by device, in tokens: a GPU is kept busy by 16,384 tokens at a time.
TOKENS_PER_MICRO_BATCH = {"cuda": 16384, "cpu": 4096}
TOKENS_PER_STEP = {"cuda": 65536, "cpu": 4096}
# FLOPs of a block and micro-batch, forward and backward, whose launches take the host about as long
# as an H200 computes: 5 to 7 ms.
HOST_BOUND = 3e12
LONGEST = 2**24  # tokens of a sequence, at most
SLICE = 2**26  # weights whose state is on the GPU at one time, if it is saved on the host
STACK = 2**24  # weights that Newton-Schulz takes in one batch, unless one matrix has more


class MeasuredLayer(NamedTuple):
    """A layer that transformers computes, with bytes as lines over the tokens."""

    weights: int  # of its matrices
    saved: LinearRegression  # for no tokens: copies of weights that autocast makes
    peak: LinearRegression  # of backward
    norm: LinearRegression  # the peak of the last norm's backward
    forward: LinearRegression  # the peak of forward


Measured = Mapping[str, Sequence[MeasuredLayer]]  # by memory.recompute


class Division(NamedTuple):
    """How devices divide the model, the sequences, and a step into micro-batches."""

    strategy: str  # none | ddp | fsdp
    context: int  # devices that share each sequence
    context_method: str  # ulysses | allgather
    batch_size: int | None = None  # null: as many sequences as fill a device
    accumulate: int | None = None  # null: as many micro-batches as fill a step


@dataclass(frozen=True)
class Workload:
    """One optimizer step of one run. Sizes are per process, and equal on all of them."""

    device: str  # cuda | cpu
    devices: int  # processes of the run, each with a device of its own
    strategy: str  # none | ddp | fsdp
    context: int  # devices that share each sequence
    context_method: str  # ulysses | allgather
    seq_len: int  # tokens in a sequence
    batch_size: int  # sequences in a micro-batch
    accumulate: int  # micro-batches in a step
    precision: str  # bf16 | fp8 | fp32
    compile: bool
    model: GPTConfig
    memory: MemoryConfig  # its policy may still be auto while the planner chooses one
    attention: AttentionConfig = field(default_factory=AttentionConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    validates: bool = True
    graphs: str = "auto"  # as asked: auto | true | false
    machines: int = 1  # with equal numbers of devices; ranks of a sequence are neighbours
    bf16_layers: tuple[int, ...] = ()  # that stay in bf16 under precision=fp8
    trains: bool = True  # False: an evaluation
    passkey_length: int = 0  # the longest of passkey.lengths; 0: none given
    measured: Measured = field(default_factory=dict)  # layers that transformers computes
    # Open to the planner, besides memory=auto; empty once it has decided
    divisions: tuple[Division, ...] = ()  # the plainest first
    backends: tuple[AttentionConfig, ...] = ()  # those that compute the step exactly
    merges: bool = False  # fewer, larger micro-batches of the same step
    is_longest: bool = False  # seq_len=max

    def divided(self, division: Division, seq_len: int) -> Workload:
        """Return the step in one division, with default sizes in place of nulls."""
        # a GPU wants many tokens at a time, and takes longer steps
        batch_size = division.batch_size or max(1, TOKENS_PER_MICRO_BATCH[self.device] // seq_len)
        micro_batch = batch_size * seq_len * self.devices // division.context
        accumulate = division.accumulate or max(1, TOKENS_PER_STEP[self.device] // micro_batch)
        sizes = division._replace(batch_size=batch_size, accumulate=accumulate)._asdict()
        return replace(self, seq_len=seq_len, divisions=(), **sizes)

    @cached_property
    def added(self) -> int:
        """Count the parameters that LoRA adds and trains alone; 0 without LoRA."""
        return self.lora.parameters(self.model)

    @property
    def sharing(self) -> Strategy:
        """Return how the devices share the model."""
        return STRATEGIES[self.strategy]

    @property
    def slices(self) -> int:
        """Count the slices of the weights; each device has one."""
        return self.devices if self.sharing.shards_weights else 1

    @property
    def devices_per_machine(self) -> int:
        """Count the devices of one machine."""
        return -(-self.devices // self.machines)

    @property
    def data_ranks(self) -> int:
        """Count the groups of devices with sequences of their own."""
        return self.devices // self.context

    @property
    def sequences_per_step(self) -> int:
        """Count the sequences of an optimizer step over all micro-batches and devices."""
        return self.batch_size * self.accumulate * self.data_ranks

    @property
    def tokens_per_step(self) -> int:
        """Count the tokens of an optimizer step over all devices, padding included."""
        return self.sequences_per_step * self.seq_len

    @property
    def activation_bytes(self) -> int:
        """Return the bytes of an activation, or of a weight as it is multiplied in bf16."""
        return FP32 if self.precision == "fp32" else 2

    @property
    def uses_kernels(self) -> bool:
        """Return True if our kernels take activations as they are, in 16 bits."""
        return self.device == "cuda" and self.activation_bytes < FP32 and self.model.has_kernels

    @property
    def head_parts(self) -> int:
        """Count the parts of the heads, computed one after another."""
        heads, ranks = self.model.kv_heads, self.context
        if ranks > 1 and self.context_method == "allgather":
            return -(-heads // allgather_group(heads, ranks))
        if ranks == 1 or heads % ranks:
            return 1
        return ulysses_parts(heads // ranks, self.batch_size * -(-self.seq_len // ranks))

    def pass_of(
        self, sequences: int, length: int, in_8_bits: bool = False, window: int | None = None
    ) -> Pass:
        """Return so many sequences of `length` tokens on their way through a block."""
        attention = self.attention.of_window(window)
        tokens, e = sequences * -(-length // self.context), self.activation_bytes
        adapted = tuple(self.lora.targets) if self.added else ()
        has_copies = e < FP32 and not adapted and not self.sharing.shards_weights and not in_8_bits
        return Pass(
            tokens=tokens,
            tile=tile_size(tokens, self.memory.mlp_tile or tokens),
            recompute=self.memory.recompute or "none",
            activation=e,
            fp8_input=1 if in_8_bits and not adapted else 0,
            weight_copy=e if has_copies else 0,
            gradient=0 if adapted else e if self.sharing.shards_weights else FP32,
            is_fused=self.uses_kernels and "down" not in adapted and self.lora.base is None,
            adapted=adapted,
            # With the codes, in 8 bits or 4, or those in the dtype of W
            unpacked=e + 1 if self.lora.base else 0,
            is_compiled=self.compile,
            on_gpu=self.device == "cuda",
            keys=length,
            backend=attention.description,
            options=attention.options,
            head_parts=self.head_parts,
            heads_at_once=self.memory.heads_at_once or 0,
        )

    @property
    def captured(self) -> bool:
        """Return True if the decided step runs as CUDA graphs."""
        if self.graphs == "auto":
            return self.is_host_bound and self.not_captured is None
        return self.graphs == "true"

    @property
    def is_host_bound(self) -> bool:
        """Return True if the GPU is predicted to wait for the launches of small kernels."""
        # all blocks are about equal: one of them decides
        tokens, model = self.batch_size * self.seq_len, self.model
        per_token = model.flops_per_token(self.seq_len / 2, self.lora.parameters(model, True))
        return self.device == "cuda" and tokens * per_token / model.layers < HOST_BOUND

    @property
    def not_captured(self) -> str | None:
        """Return why no CUDA graph can hold a step, with a remedy, or None."""
        model, attention, policy = self.model, self.attention, self.memory.policy
        several = self.devices > 1 or self.sharing != Strategy()
        rope, experts = model.rope_scaling.get("rope_type"), model.experts.count
        names = " or ".join(f"attention={name}" for name, x in DESCRIPTIONS.items() if x.capturable)
        counts = not all(x.description.capturable for x in attention.each)
        others = [x.mixer for x in of_model(model) if not x.computed_by.capturable]
        by_documents = "launches by the documents of a sequence"
        waits_for_router = experts is not None and self.precision == "fp32"
        follows_length = rope in ("dynamic", "longrope")
        filled = self.memory.filled(self.memory.policies()[0])
        offload = filled.offload or filled.offload_weights
        reasons = (
            (self.device != "cuda", f"they are for a GPU, not device={self.device}; use a GPU"),
            (several, "they are for one GPU alone; use devices=1 strategy=auto"),
            (others, f"model.mixer={', '.join(others)} {by_documents}"),
            (not model.has_kernels, "transformers computes the model, and waits for the GPU"),
            (counts, f"attention={attention.label} {by_documents}; use {names}"),
            (waits_for_router, f"model.experts.count={experts} waits in fp32; use precision=bf16"),
            (follows_length, f"rope_type={rope} follows the length of each document; use another"),
            (offload, f"memory={policy} copies to and from the host; use memory.offload=0"),
        )
        return next((reason for holds, reason in reasons if holds), None)

    def check_graphs(self) -> None:
        """Raise ValueError for graphs=true if no CUDA graph can hold a step."""
        if self.graphs == "true" and self.not_captured is not None:
            raise ValueError(f"graphs=true: {self.not_captured}, or leave graphs=auto")


def precision_of(precision: str, device: str) -> str:
    """Return "bf16", "fp8" or "fp32"; auto is the fastest of the device."""
    return {"cuda": "bf16", "cpu": "fp32"}[device] if precision == "auto" else precision
