"""Which configurations fit, and how long a step takes: `peak_memory` and a model of time. No torch.

A step's time is a sum: products at a share of the chip's peak, attention at the rate of its
backend, elementwise kernels at a share of the bandwidth. Copies to the host count only beyond the
computation that hides them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from longctx.attention.description import AttentionConfig, capturable_backends
from longctx.config.layout_config import POLICIES
from longctx.config.train_config import LONGEST_ROW
from longctx.planner import links, optimizer_cost
from longctx.planner.hardware import Chip
from longctx.planner.peak_memory import KEPT, OPTIMIZER, Memory, predict
from longctx.planner.workload import Workload

HOST_LEFT = 12 * 2**30  # bytes of host memory left to the process, its libraries and the data
COPY_SHARE = 0.5  # of free host memory: limit of the copy from which a checkpoint is written
IMBALANCE = 1.02  # pairs of the busiest rank to the mean, if sequences are dealt out in chunks
LINK = 55e9  # bytes per second between a GPU and pinned memory
LEFT_FREE = 0.05  # of the GPU, if no dry run checks a decision
PRODUCTS = 0.68  # share of the peak of a large product, times C / (C + SMALL) for narrow ones
SMALL = 160
# Of products in FP8, times C / (C + SMALL_FP8): 1.8 times bf16 at 2,048 channels. At 4,096, 1.95:
# there power holds bf16 back.
FP8 = 1.43
SMALL_FP8 = 500
CLEARLY_FASTER = 1.1  # times another backend's speed, to be told at the start
STREAM = 0.8  # share of the bandwidth that elementwise kernels reach
EAGER = 3.1  # times as many bytes for each score, if torch.compile fuses nothing


def with_policy(workload: Workload, policy: str) -> Workload:
    """Return `workload` with memory=`policy`; given keys of memory stay.

    Raises ValueError if they contradict the policy.
    """
    chosen = replace(workload, memory=workload.memory.filled(policy))
    chosen.memory.validate()
    return chosen


def policies(workload: Workload) -> list[Workload]:
    """Return `workload` with each policy that memory= allows, the fastest first.

    memory=auto allows all policies that suit the optimizer.
    """
    each = [with_policy(workload, name) for name in workload.memory.policies()]
    states = workload.optimizer.traits.states
    return [chosen for chosen in each if chosen.memory.optimizer_state in states]


def fits(workload: Workload, gpu: float, host: float) -> bool:
    """Return True if `workload`, its policy decided, fits so many bytes of GPU and host memory."""
    memory = predict(workload)
    host_bytes = on_host(workload, memory)
    return memory.peak <= gpu and (not host_bytes or host_bytes <= host - HOST_LEFT)


def on_host(workload: Workload, memory: Memory | None = None) -> float:
    """Return the bytes of host memory that all processes of one machine take together."""
    return workload.devices_per_machine * sum((memory or predict(workload)).host.values())


def copy_on_host(workload: Workload, host: float) -> float:
    """Return the bytes of a machine's host memory for the copy that background saving writes.

    0 if there is no room for it: then the steps wait for each checkpoint.
    """
    memory = predict(workload)
    writers = workload.devices_per_machine if workload.sharing.shards_weights else 1
    free = host - HOST_LEFT - on_host(workload, memory)
    return writers * memory.saved if writers * memory.saved <= COPY_SHARE * free else 0.0


def room(chip: Chip) -> float:
    """Return the bytes of the GPU that a decision may fill without a dry run."""
    return (1 - LEFT_FREE) * chip.usable


def first_that_fits(workload: Workload, gpu: float, host: float) -> Workload | None:
    """Return `workload` with its fastest policy within so many bytes of GPU and host memory."""
    return next((chosen for chosen in policies(workload) if fits(chosen, gpu, host)), None)


def decide(workload: Workload, chip: Chip, host: float, merge: bool = False) -> Workload:
    """Return `workload` with memory=auto decided: the fastest policy that fits, else the smallest.

    With `merge`, a step first gets as few micro-batches as fit with the fastest policy, since a GPU
    waits for the host between small kernels.
    """
    for larger in merged(workload) if merge else []:
        fastest = policies(larger)[0]
        if fits(fastest, room(chip), host):
            return fastest
    return first_that_fits(workload, room(chip), host) or min(
        policies(workload), key=lambda chosen: predict(chosen).peak
    )


def merged(workload: Workload) -> list[Workload]:
    """Return the same step in 1, 2, ... equal micro-batches, up to the number that it has."""
    sequences = workload.batch_size * workload.accumulate
    return [
        replace(workload, batch_size=sequences // count, accumulate=count)
        for count in range(1, workload.accumulate + 1)
        if sequences % count == 0
    ]


def longest(
    at: Callable[[int], Workload],
    gpu: float,
    host: float,
    multiple: int = 128,
    limit: int = LONGEST_ROW,
) -> Workload | None:
    """Return at(seq_len) for the longest sequences that fit, with the fastest policy for them."""

    def is_fitting(units: int) -> bool:
        # the smallest policy is the last
        return any(fits(chosen, gpu, host) for chosen in reversed(policies(at(units * multiple))))

    low, high = 0, limit // multiple
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if is_fitting(middle) else (low, middle - 1)
    return first_that_fits(at(low * multiple), gpu, host) if low else None


def one_row(workload: Workload) -> Callable[[int], Workload]:
    """Return seq_len → `workload` with one such sequence per micro-batch, and about as many tokens
    per step as before.
    """
    tokens = workload.batch_size * workload.accumulate * workload.seq_len

    def at(seq_len: int) -> Workload:
        accumulate = max(1, tokens // seq_len)
        return replace(workload, seq_len=seq_len, batch_size=1, accumulate=accumulate)

    return at


def smallest_change(workload: Workload, gpu: float, host: float) -> str:
    """Return the smallest change with which `workload` is predicted to fit, as overrides."""
    if workload.attention.description.score_bytes is not None:
        return "attention=flash, which keeps no seq_len × seq_len scores"
    # the same step in more micro-batches
    sequences = workload.accumulate * workload.batch_size
    sizes = [size for size in range(workload.batch_size - 1, 0, -1) if sequences % size == 0]
    for size in sizes:
        smaller = replace(workload, batch_size=size, accumulate=sequences // size)
        if fits(smaller, gpu, host):
            return f"batch_size={size} accumulate={smaller.accumulate}, the same step in pieces"
    # a policy that takes less
    own = list(POLICIES).index(workload.memory.policy)
    for policy in list(POLICIES)[own + 1 :]:
        other = replace(workload, memory=type(workload.memory)(policy))
        if fits(with_policy(other, policy), gpu, host):
            return f"memory={policy}"
    # shorter sequences with any policy
    any_policy = replace(workload, memory=type(workload.memory)("auto"))
    shorter = longest(one_row(any_policy), gpu, host, limit=workload.seq_len)
    if shorter is None:
        if sizes:
            return f"batch_size={sizes[0]} accumulate={sequences // sizes[0]}"
        return "a smaller model="
    is_other = shorter.memory.policy != workload.memory.policy
    policy = f" memory={shorter.memory.policy}" if is_other else ""
    return f"seq_len={shorter.seq_len} batch_size=1{policy}, the longest that fits"


def faster_backend(workload: Workload, backends: Iterable[str], chip: Chip) -> str:
    """Return a line that names the fastest of `backends` if it is predicted CLEARLY_FASTER than
    the backend of `workload`, else nothing.
    """
    own = seconds(workload, chip)
    if own is None:
        return ""
    times = backend_seconds(workload, backends, chip)
    name = min(times, key=times.__getitem__, default="")
    if not name or own.total < CLEARLY_FASTER * times[name]:
        return ""
    share = own.total / times[name] - 1
    return f"attention={name} is predicted {share:.0%} faster on this GPU"


def backend_seconds(workload: Workload, backends: Iterable[str], chip: Chip) -> dict[str, float]:
    """Return the predicted time of a step with each of `backends`; none for an unknown chip."""
    return {
        name: time.total
        for name in backends
        if (time := seconds(replace(workload, attention=AttentionConfig(name)), chip))
    }


def fastest_backend(workload: Workload, backends: Sequence[str], chip: Chip) -> tuple[str, str]:
    """Return the one of `backends` that is predicted fastest for `workload`, and why."""
    # Graphs save the time of launches, which is not in the prediction
    on = chip.name
    if replace(workload, attention=AttentionConfig()).captured:
        backends = [name for name in backends if name in capturable_backends()] or backends
        on += " in CUDA graphs"
    times = backend_seconds(workload, backends, chip)
    if not times:
        return backends[0], f"since nothing is predicted for {chip.name}"
    name, *slower = sorted(times, key=times.__getitem__)
    if not slower:
        return name, f"the only one for this step on {on}"
    share = times[slower[0]] / times[name] - 1
    return name, f"predicted {share:.0%} faster than {slower[0]} on {on}"


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
    blocks, L = workload.blocks, model.layers
    before = sum(block.attention.linears[0].weights for block in blocks) / L
    after = sum(block.multiplied for block in blocks) / L - before
    inner = sum(block.mlp.moved for block in blocks) / L
    again: float = {"none": 0, "mlp": after, "block": before + after}[memory.recompute or "none"]
    again += after * (1 - 1 / (memory.keep_every or 1)) if memory.recompute == "block" else 0
    rate = PRODUCTS * C / (C + SMALL) * peak
    added = workload.added
    each = 4 if added else 6  # frozen weights have no gradient
    in_8_bits = workload.fp8_layers / model.layers
    each_flop = (1 - in_8_bits) / rate + in_8_bits / (FP8 * C / (C + SMALL_FP8) * peak)
    products = (
        N * model.layers * (each * (before + after) + 2 * again) * each_flop + 6 * N * added / rate
    )
    loss = each * N * int(model.vocab_size or 0) * C / rate
    # bytes of elementwise kernels
    moved = e * N * model.layers * (32 * C + 9 * inner) * (1.3 if again else 1)
    # FP8: inputs and gradients of products, read for their scale, read again and written both ways
    ends = 4 * C + 2 * (model.heads + model.kv_heads) * model.head_size + 3 * model.ffn
    # weights are read for their scale and for each copy
    of_weights: float = (3 * (e if added else 4) + 2) * (before + after)
    of_weights /= workload.accumulate if workload.quantizes_once else 1
    moved += workload.fp8_layers * (N * (6 * ends + 3 * model.ffn) + of_weights)
    per_micro = {
        "attention": attention_seconds(workload, chip),
        "projections and MLP": products,
        "loss": loss,
        "norm, rope and copies": moved / (STREAM * chip.bandwidth),
    }
    # copies to the host and back, beyond the computation that hides them
    away = predict(workload).host.get(KEPT, 0.0)
    compute = sum(per_micro.values())
    per_micro["waiting for the host"] = max(0.0, 2 * away / LINK - 0.8 * compute)
    parts = {name: workload.accumulate * time for name, time in per_micro.items()}
    parts[OPTIMIZER] = update_seconds(workload, chip)
    if workload.devices > 1:
        exchanged = workload.accumulate * links.attention_exchange(workload, chip)
        weights = links.waiting_for_weights(workload, chip, compute)
        parts["waiting for other devices"] = exchanged + weights
    tokens = N * workload.accumulate
    flops = tokens * model.flops_per_token(pairs_of_row(workload) / model.layers / T, added)
    return Seconds(parts, tokens * workload.devices, flops / sum(parts.values()) / chip.flops)


def update_seconds(workload: Workload, chip: Chip) -> float:
    """Return the time of the optimizer's update.

    Its bytes pass through the GPU's memory, or its state comes from the host and goes back; and
    Newton-Schulz multiplies in bf16.
    """
    assert chip.flops is not None and chip.bandwidth is not None
    moving = optimizer_cost.bytes_moved(workload) / workload.slices / (STREAM * chip.bandwidth)
    if workload.memory.optimizer_state == "host":
        moving = 2 * optimizer_cost.state_on_host(workload) / workload.slices / LINK
    products = optimizer_cost.products(workload)
    return moving + sum(flops / (PRODUCTS * m / (m + SMALL) * chip.flops) for m, flops in products)


def attention_seconds(workload: Workload, chip: Chip) -> float:
    """Return the time of attention in one micro-batch, forward and backward, all layers."""
    assert chip.flops is not None and chip.bandwidth is not None
    model, description = workload.model, workload.attention.description
    layer = workload.layer(workload.batch_size, workload.seq_len)
    runs_again = layer.recompute == "block" and not description.has_backward
    if description.score_bytes is not None:
        heads = model.heads * model.layers
        scores = workload.batch_size * workload.seq_len**2 * heads / workload.context
        forward, backward = description.score_bytes
        is_fused = layer.is_compiled and layer.recompute == "none"
        moved = scores * (forward * (1 + runs_again) + backward) * (1.0 if is_fused else EAGER)
        return moved / (STREAM * chip.bandwidth)
    forward_rate, backward_rate = description.rates_for(layer, chip.generation)
    pairs = workload.batch_size * pairs_of_row(workload)
    flops = 4 * pairs * model.heads * model.head_size / workload.context
    if workload.context > 1 and workload.context_method == "allgather":
        flops *= IMBALANCE
    return flops * ((1 + runs_again) / forward_rate + 2.5 / backward_rate) / chip.flops


def pairs_of_row(workload: Workload) -> int:
    """Count the visible pairs of a sequence of one document, summed over the layers."""
    length, pairs = workload.seq_len, 0
    for window, layers in workload.model.windows().items():
        # The first `reach` queries see 1, 2, ... keys, all others `reach`
        reach = min(length, window or length)
        pairs += layers * (reach * (reach + 1) // 2 + (length - reach) * reach)
    return pairs
