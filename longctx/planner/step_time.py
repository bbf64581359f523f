"""How long a step takes: a model of time. No torch.

It is a sum: products at a share of the chip's peak, attention at the rate of its backend,
elementwise kernels at a share of the bandwidth, and waiting for other devices. Copies to the host
count only beyond the computation that hides them.

Ranks that share a sequence are neighbours, so they use the link of one machine alone if they fit on
it. Between machines every device has a network adapter of its own:

    all-to-all        a device sends a part to each other one, by its adapter if that is elsewhere
    gather, reduce    rings (NCCL): each passes on the part received last, and a machine's rings
                      leave it by all its adapters together

Letters of exchanges: P ranks of B sequences of N tokens, n = N/P; H and Hkv heads of D channels; e
bytes of an activation.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import ceil

from longctx.config.layout_config import kv_copies
from longctx.model.mixers.description import MixerSpec
from longctx.planner.block_memory import kernel_on
from longctx.planner.peak_memory import (
    KEPT,
    OPTIMIZER,
    attends_again,
    exchanges_halo,
    frozen_on_host,
    optimizer_state,
    predict,
    read_from_host,
    trained_weights,
)
from longctx.spec.hardware import Chip
from longctx.spec.parts import FP32, AttentionSpec, BlockSpec, Pass
from longctx.spec.step import Workload

LINK = 55e9  # bytes per second between a GPU and pinned memory
PRODUCTS = 0.68  # share of the peak of a large product, times C / (C + SMALL) for narrow ones
SMALL = 160
# Of products in FP8, times C / (C + SMALL_FP8): 1.8 times bf16 at 2,048 channels. At 4,096, 1.95:
# there power holds bf16 back.
FP8 = 1.43
SMALL_FP8 = 500
MIXED = 0.15  # share of the peak that the small products of recurrent layers reach; a guess
STREAM = 0.8  # share of the bandwidth that elementwise kernels reach
EAGER = 3.1  # times as many bytes for each score, if torch.compile fuses nothing
IMBALANCE = 1.02  # pairs of the busiest rank to the mean, if sequences are dealt out in chunks
# Seconds from one rank of a ring to the next, inside a machine and to another, as NCCL assumes to
# choose an algorithm (its tuning.cc, ring, simple protocol)
HOP, HOP_OUTSIDE = 3.4e-6, 14e-6
CLAMPED = 11  # times the bytes of experts with a clamped gate: no kernel is fused
UNPACKED = 10  # bytes of elementwise kernels that take as long as unpacking a weight of nf4
ADDED = 6  # times that LoRA reads or writes the inputs and outputs of a matrix more
BEHIND = 0.8  # share of computing time that hides communication, and copies to the host


@dataclass(frozen=True)
class Seconds:
    """Predicted time of one optimizer step by part, and its model FLOPs' share of the peak."""

    parts: dict[str, float]
    tokens: int
    mfu: float

    @property
    def total(self) -> float:
        return sum(self.parts.values())


def seconds(workload: Workload, chip: Chip) -> Seconds | None:
    """Return the time of a step on `chip`, each sequence one document; None for an unknown chip."""
    if chip.flops is None or chip.bandwidth is None:
        return None
    workload = replace(workload, memory=workload.memory.filled(workload.memory.policy))
    micro, model, T = _MicroBatch(workload, chip), workload.model, workload.seq_len
    per_micro = {
        "attention": attention_seconds(workload, chip) + mixer_seconds(workload, chip),
        "projections and MLP": micro.products(),
        "loss": micro.each * micro.N * int(model.vocab_size or 0) * model.channels / micro.rate,
        "norm, rope and copies": micro.moved() / micro.stream,
    }
    compute = sum(per_micro.values())
    per_micro["waiting for the host"] = micro.waiting_for_host(compute)
    parts = {name: workload.accumulate * time for name, time in per_micro.items()}
    parts[OPTIMIZER] = update_seconds(workload, chip)
    if workload.devices > 1:
        exchanged = workload.accumulate * attention_exchange(workload, chip)
        weights = waiting_for_weights(workload, chip, compute)
        parts["waiting for other devices"] = exchanged + weights
    tokens = micro.N * workload.accumulate
    pairs = sum(count * pairs_of(block.attention, T) for block, count in model.kinds) / micro.L
    flops = tokens * model.flops_per_token(pairs / T, micro.added)
    return Seconds(parts, tokens * workload.devices, flops / sum(parts.values()) / chip.flops)


class _MicroBatch:
    """The computation of a micro-batch on one device, attention apart."""

    def __init__(self, workload: Workload, chip: Chip) -> None:
        assert chip.flops is not None and chip.bandwidth is not None
        self.workload, self.model, self.memory = workload, workload.model, workload.memory
        self.e, self.C, self.L = workload.activation_bytes, self.model.channels, self.model.layers
        self.N = -(-workload.batch_size * workload.seq_len // workload.context)
        self.link, self.stream = min(LINK, chip.link), STREAM * chip.bandwidth
        self.peak = chip.flops * (1.0 if self.e == 2 else 0.5)
        self.rate = PRODUCTS * self.C / (self.C + SMALL) * self.peak
        # Weights of products before and after attention, in the mean over the blocks
        blocks = self.model.blocks
        self.before = sum(block.attention.linears[0].weights for block in blocks) / self.L
        self.after = sum(block.multiplied for block in blocks) / self.L - self.before
        # A block makes its input again, by those from the last saved one on
        self.more = sum(n % (self.memory.keep_every or 1) for n in range(self.L)) / self.L
        # A group of heads projects all of them, in both passes and for an output made again
        self.groups = ceil(self.model.kv_heads / (self.memory.heads_at_once or self.model.kv_heads))
        self.projected = self.groups * (2 + (self.memory.attention_again or 0.0)) - 2
        self.added = workload.lora.parameters(self.model, of_token=True)
        self.each = 4 if self.added else 6  # FLOPs of a weight: frozen ones have no gradient
        self.fp8_layers = self.L - len(workload.bf16_layers) if workload.precision == "fp8" else 0

    def products(self) -> float:
        """Return the time of projections and MLP."""
        again = self.memory.again * (self.before + self.after * (self.more + 1))
        again += self.before * self.projected
        in_8_bits = self.fp8_layers / self.L
        each_flop = (1 - in_8_bits) / self.rate
        each_flop += in_8_bits / (FP8 * self.C / (self.C + SMALL_FP8) * self.peak)
        flops = self.N * self.L * (self.each * (self.before + self.after) + 2 * again)
        return flops * each_flop + 6 * self.N * self.added / self.rate

    def moved(self) -> float:
        """Return the bytes that elementwise kernels read and write."""
        e, N, C, L = self.e, self.N, self.C, self.L
        model, lora, before = self.model, self.workload.lora, self.before
        inner = sum(block.mlp.moved for block in model.blocks) / L
        inner *= 1 if model.experts.clamp is None else CLAMPED
        widths = ADDED * self.added / (lora.rank or 1)
        moved = e * N * (L * (32 * C + 9 * inner) + widths) * (1 + 0.3 * self.memory.again)
        moved += e * N * L * self.projected * 3 * (C + before / C)
        if lora.base:  # unpacked for each tile, for forward, again, and for gradients
            whole = sum(block.weights for block in model.blocks)
            passes = (3 + self.more) * whole + L * before * self.projected
            moved += UNPACKED * -(-N // (self.memory.mlp_tile or N)) * passes
        # FP8: inputs and gradients of products, read for their scale, again, and written both ways
        ends = 4 * C + 2 * (model.heads + model.kv_heads) * model.head_size + 3 * model.ffn
        # weights are read for their scale and for each copy
        of_weights: float = (3 * (e if self.added else 4) + 2) * (before + self.after)
        return moved + self.fp8_layers * (N * (6 * ends + 3 * model.ffn) + of_weights)

    def waiting_for_host(self, compute: float) -> float:
        """Return the time of copies to the host and back beyond `compute`, which hides them."""
        memory, before = self.memory, self.before
        away = predict(self.workload, 0).host[KEPT] if memory.offload else 0.0
        # Weights come for forward and backward, and for each block that makes an input again
        weights, _ = frozen_on_host(self.workload)
        copied = (1 if memory.heads_at_once else 2) * away + weights * (self.more + 2)
        # For each group of heads tiles come from the host, each while the one before is projected:
        # the inputs of attention that runs again, then inputs and outputs for its backward
        projecting = 2 * before / self.rate + 3 * self.e * (self.C + before / self.C) / self.stream
        tiled = 0.0
        for block, (x, out) in zip(self.model.blocks, read_from_host(self.workload), strict=False):
            inputs = self.e * self.C * x / self.link
            outputs = self.e * block.attention.query_size * out / self.link
            tiled += (memory.attention_again or 0.0) * max(0.0, inputs - projecting)
            tiled += max(0.0, inputs + outputs - projecting)
        # In forward, a quarter, weights come behind what is saved
        first = (away + weights) / self.link - BEHIND * compute / 4 if weights else 0.0
        waiting = max(0.0, copied / self.link - BEHIND * compute, first)
        return self.N * self.groups * tiled + waiting


def update_seconds(workload: Workload, chip: Chip) -> float:
    """Return the time of the optimizer's update."""
    assert chip.flops is not None and chip.bandwidth is not None
    matrices, others = trained_weights(workload)
    on_gpu, on_host = optimizer_state(workload)
    # Weights and state are read and written, gradients read twice, once for their norm; or the
    # state comes from the host and goes back. Newton-Schulz moves 36 bytes more, and multiplies in
    # bf16.
    moved = 16 * (matrices + others) + 2 * on_gpu
    moved += 36 * matrices if workload.optimizer.traits.orthogonalizes else 0
    moving = moved / workload.slices / (STREAM * chip.bandwidth)
    if on_host:
        moving = 2 * on_host / workload.slices / min(LINK, chip.link)
    products = update_products(workload)
    return moving + sum(flops / (PRODUCTS * m / (m + SMALL) * chip.flops) for m, flops in products)


def block_matrices(blocks: Iterable[BlockSpec]) -> Counter[tuple[int, int]]:
    """Count the matrices of `blocks` by rows and columns, those of fused weights apart."""
    linears = (linear for block in blocks for linear in block.linears.values())
    return Counter((rows, linear.columns) for linear in linears for rows in linear.rows)


def update_products(workload: Workload) -> list[tuple[int, float]]:
    """Return the narrow side and FLOPs of Newton-Schulz for the matrices of each shape."""
    if not workload.optimizer.traits.orthogonalizes:
        return []
    times = getattr(workload.optimizer, "iterations", 5)
    # X Xᵀ and its product with X take 2 m² n each, its square 2 m³, for m <= n
    matrices = block_matrices(workload.model.blocks).items()
    shapes = [(*sorted(shape), count) for shape, count in matrices]
    return [(m, times * count * (4.0 * m * m * n + 2.0 * m**3)) for m, n, count in shapes]


def attention_seconds(workload: Workload, chip: Chip) -> float:
    """Return the time of attention in one micro-batch, forward and backward, all layers."""
    blocks = workload.model.blocks
    alike = [[n for n, x in enumerate(blocks) if x is kind] for kind, _ in workload.model.kinds]
    return sum(attention_of_layers(workload, layers, chip) for layers in alike)


def attention_of_layers(workload: Workload, layers: list[int], chip: Chip) -> float:
    """Return the part of `attention_seconds` of these layers, which are alike."""
    assert chip.flops is not None and chip.bandwidth is not None
    own = workload.model.blocks[layers[0]].attention
    part = own.softmax if isinstance(own, MixerSpec) else own  # calls may have other heads
    sequences, length = workload.batch_size, workload.seq_len
    description = workload.attention.of_window(own.window).description
    passing = workload.pass_of(sequences, length, window=own.window)
    runs_again = len(set(attends_again(workload)).intersection(layers)) / len(layers)
    is_saved = description.has_backward and not isinstance(own, MixerSpec)
    runs_again += 0 if is_saved else workload.memory.again
    heads = sequences * part.model.heads / workload.context
    if description.score_bytes is not None:
        calls = len(layers) * getattr(own, "softmax_calls", 1)
        forward, backward = description.score_bytes
        is_fused = passing.is_compiled and passing.recompute == "none"
        moved = forward * (1 + runs_again) + backward
        moved *= calls * length**2 * heads * (1.0 if is_fused else EAGER)
        return moved / (STREAM * chip.bandwidth)
    forward_rate, backward_rate = rates_on(chip.generation, part, passing)
    flops = 4 * len(layers) * pairs_of(own, length) * heads * part.model.head_size
    if workload.context > 1 and workload.context_method == "allgather":
        flops *= IMBALANCE
    return flops * ((1 + runs_again) / forward_rate + 2.5 / backward_rate) / chip.flops


def rates_on(generation: str, part: AttentionSpec, p: Pass) -> tuple[float, float]:
    """Return the shares of a chip's peak that forward and backward of attention reach.

    `generation` is hopper, ampere (and later GPUs with its products), or other.
    """
    rates, kernel = p.backend.rates, kernel_on(generation, part, p)
    rates = rates.get(f"{kernel}_on_{generation}", rates[kernel])
    sizes = [size for size in rates if part.model.head_size <= int(size)]
    found: tuple[float, float] = rates[(sizes or list(rates)[-1:])[0]]
    return found


def mixer_seconds(workload: Workload, chip: Chip) -> float:
    """Return the time of what mixers do besides matrices and attention in one micro-batch."""
    assert chip.flops is not None and chip.bandwidth is not None
    e, again = workload.activation_bytes, workload.memory.again
    layers = (block.attention for block in workload.model.blocks)
    costs = [layer.cost(e) for layer in layers if isinstance(layer, MixerSpec)]
    flops = (3 + again) * sum(cost.flops for cost in costs)
    # What is saved is written and read, each time it is made, and has a gradient
    moved = (4 + 2 * again) * sum(cost.saved for cost in costs)
    tokens = workload.batch_size * workload.seq_len / workload.context
    return tokens * (flops / (MIXED * chip.flops) + moved / (STREAM * chip.bandwidth))


def pairs_of(part: AttentionSpec, length: int) -> int:
    """Count the visible pairs of a sequence of one document in a layer, in all calls together."""
    # The first `reach` queries see 1, 2, ... keys, all others `reach`
    reach = min(length, part.window or length)
    pairs = reach * (reach + 1) // 2 + (length - reach) * reach
    return pairs * (part.softmax_calls if isinstance(part, MixerSpec) else 1)


def attention_exchange(workload: Workload, chip: Chip) -> float:
    """Return the seconds per micro-batch in which attention waits for other ranks."""
    windows = workload.model.windows().items()
    return sum(count * _exchange_of_layer(workload, window, chip) for window, count in windows)


def _exchange_of_layer(workload: Workload, window: int | None, chip: Chip) -> float:
    model, ranks = workload.model, workload.context
    e, B = workload.activation_bytes, workload.batch_size
    n = ceil(workload.seq_len / ranks)
    q, kv = model.heads * model.head_size, 2 * model.kv_heads * model.head_size
    if exchanges_halo(workload, window):
        # keys and values, again in backward, and their gradients back
        assert window is not None
        sent = 3 * e * kv * (window - 1) * B
        inside = ranks <= workload.devices_per_machine
        return sent / (chip.link if inside else chip.network)
    if workload.context_method == "allgather":
        # k and v in forward and in backward, group of heads by group; partial sums of their
        # gradients in fp32
        gathered = 2 * ring(e * kv * n * ranks * B, workload.head_parts, ranks, workload, chip)
        return gathered + all_to_all(FP32 * kv * n * ranks * B, workload, chip)
    # forward q, k, v and the output; backward those, the output's gradient, and dq, dk, dv; and
    # q, k and v once more if they are computed again
    kv *= kv_copies(model.heads, model.kv_heads, ranks)
    each = 4 * q + 2 * kv + workload.memory.again * (2 * q + kv)
    return all_to_all(e * each * n * B, workload, chip)


def all_to_all(sent: float, workload: Workload, chip: Chip) -> float:
    """Return the seconds in which each rank sends `sent` bytes in equal parts to all ranks."""
    ranks, here = workload.context, min(workload.context, workload.devices_per_machine)
    # both networks work at the same time: the slower one counts
    part = sent / ranks
    return max((here - 1) * part / chip.link, (ranks - here) * part / chip.network)


def ring(size: float, pieces: int, ranks: int, workload: Workload, chip: Chip) -> float:
    """Return the seconds in which `ranks` devices all gather `size` bytes, or reduce-scatter them,
    piece after piece.
    """
    here = min(ranks, workload.devices_per_machine)
    machines = -(-ranks // here)
    outside = machines if machines > 1 else 0
    slowest = min(chip.link, here * chip.network) if outside else chip.link
    # a ring has a step for each other rank
    hops = max(0, ranks - 1 - outside) * HOP + outside * HOP_OUTSIDE
    return (1 - 1 / ranks) * size / slowest + pieces * hops


def waiting_for_weights(workload: Workload, chip: Chip, compute: float) -> float:
    """Return the seconds of a step in which a device waits for weights and gradients of others.

    A micro-batch computes for `compute` seconds. fsdp gathers a block's weights for forward and for
    backward and sums its gradients while other blocks compute; ddp sums all gradients during the
    last backward. Nothing hides fsdp's first gather, or the last gradient, the embedding's.
    """
    model = workload.model
    # embedding and lm_head are not part of a block
    outside = int(model.vocab_size or 0) * model.channels * (1 if model.tied else 2)
    trained, trained_outside = workload.added, 0
    if not trained:
        trained, trained_outside = model.parameters() - outside, outside

    def shared(size: float, pieces: int) -> float:
        return ring(size, pieces, workload.devices, workload, chip)

    if not workload.sharing.shards_weights:  # NCCL's trees keep a sum's hops few
        last = 2 * shared(FP32 * trained_outside, 1)
        backward = 2 / 3 * compute
        return last + max(0.0, 2 * shared(FP32 * trained, 1) - BEHIND * backward)
    e = workload.activation_bytes
    gathered = workload.lora.frozen_bytes(model, e) - e * outside  # of blocks, packed perhaps
    first = shared(e * outside + gathered / model.layers, 1)
    last = shared(FP32 * trained_outside, 1)
    hidden = 2 * shared(gathered, model.layers) + shared(FP32 * trained, model.layers)
    return workload.accumulate * (first + last + max(0.0, hidden - BEHIND * compute))
