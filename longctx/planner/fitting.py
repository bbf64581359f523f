"""What fits, and how long a step takes: questions to `longctx.planner.peak_memory`, and a model of
time. Free of torch.

Time adds up products at a share of the chip's peak, attention at the rate of its backend, and what
only moves bytes at a share of its bandwidth; copies to the host count where they take longer than
the work that hides them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from longctx.config.memory_config import POLICIES
from longctx.config.train_config import LONGEST_ROW
from longctx.planner import links, optimizer_cost
from longctx.planner.hardware import Chip
from longctx.planner.peak_memory import KEPT, OPTIMIZER, Memory, predict
from longctx.planner.workload import Workload

HOST_LEFT = 12 * 2**30  # bytes of host memory left to the process, its libraries and the data
COPY_SHARE = 0.5  # of free host memory, at most, for a copy of what is saved
IMBALANCE = 1.02  # the most work of a rank to the mean where rows are dealt out in chunks
LINK = 55e9  # bytes per second between a GPU and pinned memory
LEFT_FREE = 0.05  # of the GPU where nobody probes what is decided
PRODUCTS = 0.68  # share of the peak of a large product, times C / (C + SMALL) for narrow ones
SMALL = 160
# Of products in FP8, times C / (C + SMALL_FP8): 1.8 times bf16 at 2,048 channels, 1.95 at
# 4,096, where power holds bf16 back
FP8 = 1.43
SMALL_FP8 = 500
STREAM = 0.8  # share of the bandwidth that elementwise kernels reach


def with_policy(workload: Workload, policy: str) -> Workload:
    """`workload` with memory=`policy`; keys of memory that were given stay. ValueError where they
    do not go with it.
    """
    chosen = replace(workload, memory=workload.memory.filled(policy))
    chosen.memory.validate()
    return chosen


def policies(workload: Workload) -> list[Workload]:
    """`workload` with each policy that memory= may stand for, the fastest first: its own, or where
    it is auto all that the optimizer can keep its state as.
    """
    each = [with_policy(workload, name) for name in workload.memory.policies()]
    states = workload.optimizer.traits.states
    return [chosen for chosen in each if chosen.memory.optimizer_state in states]


def fits(workload: Workload, gpu: float, host: float) -> bool:
    """Whether `workload`, its policy decided, fits so many bytes of GPU and host memory."""
    memory = predict(workload)
    host_bytes = on_host(workload, memory)
    return memory.peak <= gpu and (not host_bytes or host_bytes <= host - HOST_LEFT)


def on_host(workload: Workload, memory: Memory | None = None) -> float:
    """Bytes of host memory that all processes of a machine take, each of which has its own."""
    return workload.devices_per_machine * sum((memory or predict(workload)).host.values())


def copy_on_host(workload: Workload, host: float) -> float:
    """Bytes of host memory that the processes of a machine take for the copies from which they
    write checkpoints behind the steps; 0 where there is no room, and a step waits instead.
    """
    memory = predict(workload)
    writers = workload.devices_per_machine if workload.sharing.shards_weights else 1
    free = host - HOST_LEFT - on_host(workload, memory)
    return writers * memory.saved if writers * memory.saved <= COPY_SHARE * free else 0.0


def room(chip: Chip) -> float:
    """Bytes of the GPU that a decision fills which nobody probes."""
    return (1 - LEFT_FREE) * chip.usable


def first_that_fits(workload: Workload, gpu: float, host: float) -> Workload | None:
    """The fastest policy of `workload` that stays within so many bytes of GPU and host memory; None
    if none does.
    """
    return next((chosen for chosen in policies(workload) if fits(chosen, gpu, host)), None)


def decide(workload: Workload, chip: Chip, host: float, merge: bool = False) -> Workload:
    """`workload` with memory=auto decided: the fastest policy that fits, or the one that takes
    least where none does.

    With `merge` a step is first made of as few micro-batches as fit with the fastest policy, since
    a GPU waits for the host between small kernels; where no more than those of `workload` fit, they
    stay. A twentieth of the GPU is left free, since nobody probes this choice.
    """
    for one_batch in merged(workload) if merge else []:
        fastest = policies(one_batch)[0]
        if fits(fastest, room(chip), host):
            return fastest
    return first_that_fits(workload, room(chip), host) or min(
        policies(workload), key=lambda chosen: predict(chosen).peak
    )


def merged(workload: Workload) -> list[Workload]:
    """The same rows per step in 1, 2, ... equal micro-batches, up to as many as `workload` has."""
    rows = workload.batch_size * workload.accumulate
    return [
        replace(workload, batch_size=rows // n, accumulate=n)
        for n in range(1, workload.accumulate + 1)
        if rows % n == 0
    ]


def longest(
    at: Callable[[int], Workload],
    gpu: float,
    host: float,
    multiple: int = 128,
    most: int = LONGEST_ROW,
) -> Workload | None:
    """The configuration at(seq_len) of the longest rows that fit with some policy, that policy
    chosen; or None.
    """

    def fitting(units: int) -> bool:  # what takes least comes last
        return any(fits(chosen, gpu, host) for chosen in reversed(policies(at(units * multiple))))

    low, high = 0, most // multiple
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fitting(middle) else (low, middle - 1)
    return first_that_fits(at(low * multiple), gpu, host) if low else None


def one_row(workload: Workload) -> Callable[[int], Workload]:
    """seq_len → `workload` with one row of so many tokens per micro-batch, and about as many tokens
    per step as before.
    """
    tokens = workload.batch_size * workload.accumulate * workload.seq_len

    def at(seq_len: int) -> Workload:
        return replace(
            workload, seq_len=seq_len, batch_size=1, accumulate=max(1, tokens // seq_len)
        )

    return at


def smallest_change(workload: Workload, gpu: float, host: float) -> str:
    """The least that has to change so that `workload` is predicted to fit, in words for the command
    line.
    """
    if workload.attention.description.score_bytes is not None:
        return "attention=flash, which keeps no seq_len × seq_len scores"
    rows_of_step = workload.accumulate * workload.batch_size
    pieces = [n for n in range(workload.batch_size - 1, 0, -1) if rows_of_step % n == 0]
    for rows in pieces:
        fewer = replace(workload, batch_size=rows, accumulate=rows_of_step // rows)
        if fits(fewer, gpu, host):
            return f"batch_size={rows} accumulate={fewer.accumulate}, the same step in pieces"
    own = list(POLICIES).index(workload.memory.policy)
    for policy in list(POLICIES)[own + 1 :]:
        other = replace(workload, memory=type(workload.memory)(policy))
        if fits(with_policy(other, policy), gpu, host):
            return f"memory={policy}"
    open_to_all = replace(workload, memory=type(workload.memory)("auto"))
    shorter = longest(one_row(open_to_all), gpu, host, most=workload.seq_len)
    if shorter is None:
        if pieces:
            return f"batch_size={pieces[0]} accumulate={rows_of_step // pieces[0]}"
        return "a smaller model="
    policy = (
        ""
        if shorter.memory.policy == workload.memory.policy
        else f" memory={shorter.memory.policy}"
    )
    return f"seq_len={shorter.seq_len} batch_size=1{policy}, the longest that fits"


@dataclass(frozen=True)
class Seconds:
    """The predicted time of one optimizer step by what it goes to, and of model FLOPs what share of
    the peak that is.
    """

    parts: dict[str, float]
    tokens: int
    mfu: float

    @property
    def total(self) -> float:
        return sum(self.parts.values())


def seconds(workload: Workload, chip: Chip) -> Seconds | None:
    """Time of a step of `workload`, rows of one document each, on `chip`; None where the chip's
    figures are not known.
    """
    if chip.flops is None or chip.bandwidth is None:
        return None
    workload = replace(workload, memory=workload.memory.filled(workload.memory.policy))
    m, memory, e = workload.model, workload.memory, workload.activation_bytes
    N, T, C = workload.batch_size * workload.seq_len, workload.seq_len, m.channels
    N = -(-N // workload.context)  # of this device
    peak = chip.flops * (1.0 if e == 2 else 0.5)
    before = C * (m.heads + 2 * m.kv_heads) * m.head_size
    after = m.heads * m.head_size * C + 3 * C * m.ffn
    again: float = {"none": 0, "mlp": after, "block": before + after}[memory.recompute or "none"]
    again += after * (1 - 1 / (memory.keep_every or 1)) if memory.recompute == "block" else 0
    rate = PRODUCTS * C / (C + SMALL) * peak
    added = workload.lora.parameters(m)
    each = 4 if added else 6  # frozen weights have no gradient
    in_8_bits = workload.fp8_layers / m.layers
    each_flop = (1 - in_8_bits) / rate + in_8_bits / (FP8 * C / (C + SMALL_FP8) * peak)
    products = (
        N * m.layers * (each * (before + after) + 2 * again) * each_flop + 6 * N * added / rate
    )
    loss = each * N * int(m.vocab_size or 0) * C / rate
    moved = e * N * m.layers * (32 * C + 9 * m.ffn) * (1.3 if again else 1)
    # The inputs and gradients of products, read for their scale, read again and written both ways
    ends = 4 * C + 2 * (m.heads + m.kv_heads) * m.head_size + 3 * m.ffn
    # Weights are read for their scale and for each copy
    of_weights: float = (3 * (e if added else 4) + 2) * (before + after)
    of_weights /= workload.accumulate if workload.quantizes_once else 1
    moved += workload.fp8_layers * (N * (6 * ends + 3 * m.ffn) + of_weights)
    attended = attention_seconds(workload, chip)
    per_micro = {
        "attention": attended,
        "projections and MLP": products,
        "loss": loss,
        "norm, rope and copies": moved / (STREAM * chip.bandwidth),
    }
    away = predict(workload).host.get(KEPT, 0.0)
    compute = sum(per_micro.values())
    waiting = max(0.0, 2 * away / LINK - 0.8 * compute)
    parts = {
        name: workload.accumulate * s
        for name, s in (per_micro | {"waiting for the host": waiting}).items()
    }
    parts[OPTIMIZER] = update_seconds(workload, chip)
    if workload.devices > 1:
        exchanged = workload.accumulate * links.attention_exchange(workload, chip)
        weights = links.waiting_for_weights(workload, chip, compute)
        parts["waiting for other devices"] = exchanged + weights
    tokens = N * workload.accumulate
    work = tokens * m.flops_per_token(pairs_of_row(workload) / m.layers / T, added)
    return Seconds(parts, tokens * workload.devices, work / sum(parts.values()) / chip.flops)


def update_seconds(workload: Workload, chip: Chip) -> float:
    """The optimizer's update: bytes through the GPU's memory, or state from the host and back; and
    the products of Newton-Schulz, in bf16.
    """
    assert chip.flops is not None and chip.bandwidth is not None
    moving = optimizer_cost.bytes_moved(workload) / workload.slices / (STREAM * chip.bandwidth)
    if workload.memory.optimizer_state == "host":
        moving = 2 * optimizer_cost.state_on_host(workload) / workload.slices / LINK
    works = optimizer_cost.products(workload)
    return moving + sum(flops / (PRODUCTS * m / (m + SMALL) * chip.flops) for m, flops in works)


def attention_seconds(workload: Workload, chip: Chip) -> float:
    """Attention of one micro-batch, forward and backward, all layers."""
    assert chip.flops is not None and chip.bandwidth is not None
    m, description = workload.model, workload.attention.description
    layer = workload.layer(workload.batch_size, workload.seq_len)
    runs_again = layer.recompute == "block" and not description.has_backward
    if description.score_bytes is not None:
        scores = workload.batch_size * workload.seq_len**2 * m.heads * m.layers / workload.context
        forward, backward = description.score_bytes
        return scores * (forward * (1 + runs_again) + backward) / (STREAM * chip.bandwidth)
    forward_rate, backward_rate = description.rates_for(layer, chip.hopper)
    pairs = workload.batch_size * pairs_of_row(workload)
    flops = 4 * pairs * m.heads * m.head_size / workload.context
    if workload.context > 1 and workload.context_method == "allgather":
        flops *= IMBALANCE
    return flops * ((1 + runs_again) / forward_rate + 2.5 / backward_rate) / chip.flops


def pairs_of_row(workload: Workload) -> int:
    """Visible pairs of one row that is one document, summed over the layers."""
    return sum(
        layers * visible(workload.seq_len, window)
        for window, layers in workload.model.windows().items()
    )


def visible(T: int, window: int | None) -> int:
    """Visible pairs of a causal row of T tokens."""
    w = min(T, window or T)
    return w * (w + 1) // 2 + (T - w) * w
