"""How long a step takes: a model of time. No torch.

It is a sum: products at a share of the chip's peak, attention at the rate of its backend,
elementwise kernels at a share of the bandwidth, and waiting for other devices. Copies to the host
count only beyond the computation that hides them.

Ranks that share a sequence are neighbours, so they use the link of one machine alone if they fit on
it. Between machines every device has a network adapter of its own:

    all-to-all        a device sends a part to each other one, by its adapter if that is elsewhere
    gather, reduce    rings (NCCL): each passes on the part received last, and a machine's rings
                      leave it by all its adapters together

Letters of exchanges: P ranks of a sequence of N tokens, n = N/P; H and Hkv heads of D channels; e
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
    model, memory, e = workload.model, workload.memory, workload.activation_bytes
    N, T, C = workload.batch_size * workload.seq_len, workload.seq_len, model.channels
    N = -(-N // workload.context)  # of this device
    # products: weights before and after attention, and weights of recomputed products
    peak = chip.flops * (1.0 if e == 2 else 0.5)
    blocks, L = model.blocks, model.layers
    before = sum(block.attention.linears[0].weights for block in blocks) / L
    after = sum(block.multiplied for block in blocks) / L - before
    inner = sum(block.mlp.moved for block in blocks) / L
    inner *= 1 if model.experts.clamp is None else CLAMPED
    # A block makes its input again, by those from the last saved one on
    more = sum(n % (memory.keep_every or 1) for n in range(L)) / L
    again = memory.again * (before + after * (more + 1))
    # A group of heads projects all of them, in both passes and for an output made again
    groups = ceil(model.kv_heads / (memory.heads_at_once or model.kv_heads))
    projected = groups * (2 + (memory.attention_again or 0.0)) - 2
    again += before * projected
    rate = PRODUCTS * C / (C + SMALL) * peak
    added = workload.lora.parameters(model, of_token=True)
    each = 4 if added else 6  # frozen weights have no gradient
    fp8_layers = L - len(workload.bf16_layers) if workload.precision == "fp8" else 0
    in_8_bits = fp8_layers / L
    each_flop = (1 - in_8_bits) / rate + in_8_bits / (FP8 * C / (C + SMALL_FP8) * peak)
    products = N * L * (each * (before + after) + 2 * again) * each_flop + 6 * N * added / rate
    loss = each * N * int(model.vocab_size or 0) * C / rate
    # bytes of elementwise kernels
    widths = ADDED * added / (workload.lora.rank or 1)
    moved = e * N * (L * (32 * C + 9 * inner) + widths) * (1 + 0.3 * memory.again)
    moved += e * N * L * projected * 3 * (C + before / C)
    if workload.lora.base:  # unpacked for each tile, for forward, again, and for gradients
        whole = sum(block.weights for block in blocks)
        passes = (3 + more) * whole + L * before * projected
        moved += UNPACKED * -(-N // (memory.mlp_tile or N)) * passes
    # FP8: inputs and gradients of products, read for their scale, read again and written both ways
    ends = 4 * C + 2 * (model.heads + model.kv_heads) * model.head_size + 3 * model.ffn
    # weights are read for their scale and for each copy
    of_weights: float = (3 * (e if added else 4) + 2) * (before + after)
    moved += fp8_layers * (N * (6 * ends + 3 * model.ffn) + of_weights)
    per_micro = {
        "attention": attention_seconds(workload, chip) + mixer_seconds(workload, chip),
        "projections and MLP": products,
        "loss": loss,
        "norm, rope and copies": moved / (STREAM * chip.bandwidth),
    }
    # copies to the host and back, beyond the computation that hides them
    away = predict(workload, 0).host[KEPT] if memory.offload else 0.0
    # Weights come for forward and backward, and for each block that makes an input again
    weights, _ = frozen_on_host(workload)
    copied, tiled = (1 if memory.heads_at_once else 2) * away + weights * (more + 2), 0.0
    compute, link = sum(per_micro.values()), min(LINK, chip.link)
    # For each group of heads tiles come from the host, each while the one before is projected: the
    # inputs of attention that runs again, then inputs and outputs for its backward
    projecting = 2 * before / rate + 3 * e * (C + before / C) / (STREAM * chip.bandwidth)
    for block, (x, out) in zip(blocks, read_from_host(workload), strict=False):
        inputs, outputs = e * C * x / link, e * block.attention.query_size * out / link
        tiled += (memory.attention_again or 0.0) * max(0.0, inputs - projecting)
        tiled += max(0.0, inputs + outputs - projecting)
    # In forward, a quarter, weights come behind what is saved
    first = (away + weights) / link - BEHIND * compute / 4 if weights else 0.0
    waiting = N * groups * tiled + max(0.0, copied / link - BEHIND * compute, first)
    per_micro["waiting for the host"] = waiting
    parts = {name: workload.accumulate * time for name, time in per_micro.items()}
    parts[OPTIMIZER] = update_seconds(workload, chip)
    if workload.devices > 1:
        exchanged = workload.accumulate * attention_exchange(workload, chip)
        weights = waiting_for_weights(workload, chip, compute)
        parts["waiting for other devices"] = exchanged + weights
    tokens = N * workload.accumulate
    pairs = sum(count * pairs_of(block.attention, T) for block, count in model.kinds) / L
    flops = tokens * model.flops_per_token(pairs / T, added)
    return Seconds(parts, tokens * workload.devices, flops / sum(parts.values()) / chip.flops)


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
    shapes = [
        (*sorted(shape), count) for shape, count in block_matrices(workload.model.blocks).items()
    ]
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
    rows, length = workload.batch_size, workload.seq_len
    description = workload.attention.of_window(own.window).description
    passing = workload.pass_of(rows, length, window=own.window)
    runs_again = len(set(attends_again(workload)).intersection(layers)) / len(layers)
    is_saved = description.has_backward and not isinstance(own, MixerSpec)
    runs_again += 0 if is_saved else workload.memory.again
    heads = rows * part.model.heads / workload.context
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
    costs = [
        x.attention.cost(e) for x in workload.model.blocks if isinstance(x.attention, MixerSpec)
    ]
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
    e, rows = workload.activation_bytes, workload.batch_size
    n = ceil(workload.seq_len / ranks)
    q, kv = model.heads * model.head_size, 2 * model.kv_heads * model.head_size
    if exchanges_halo(workload, window):
        # keys and values, again in backward, and their gradients back
        assert window is not None
        sent = 3 * e * kv * (window - 1) * rows
        inside = ranks <= workload.devices_per_machine
        return sent / (chip.link if inside else chip.network)
    if workload.context_method == "allgather":
        # k and v in forward and in backward, group of heads by group; partial sums of their
        # gradients in fp32
        gathered = 2 * ring(e * kv * n * ranks * rows, workload.head_parts, ranks, workload, chip)
        return gathered + all_to_all(FP32 * kv * n * ranks * rows, workload, chip)
    # forward q, k, v and the output; backward those, the output's gradient, and dq, dk, dv; and
    # q, k and v once more if they are computed again
    kv *= kv_copies(model.heads, model.kv_heads, ranks)
    each = 4 * q + 2 * kv + workload.memory.again * (2 * q + kv)
    return all_to_all(e * each * n * rows, workload, chip)


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
