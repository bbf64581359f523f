"""Time that devices wait for one another, for attention and for weights and gradients. No torch.

Ranks that share a sequence are neighbours, so they use the link of one machine alone if they fit on
it. Between machines every device has a network adapter of its own:

    all-to-all        a device sends a part to each other one, by its adapter if that is elsewhere
    gather, reduce    rings (NCCL): each passes on the part received last, and a machine's rings
                      leave it by all its adapters together

Letters: P ranks of a sequence of N tokens, n = N/P; H and Hkv heads of D channels; e bytes of an
activation.
"""

from __future__ import annotations

from math import ceil

from longctx.config.layout_config import allgather_group, kv_copies
from longctx.config.parts import FP32
from longctx.planner.hardware import Chip
from longctx.planner.workload import Workload

# Seconds from one rank of a ring to the next, inside a machine and to another, as NCCL assumes to
# choose an algorithm (its tuning.cc, ring, simple protocol)
HOP, HOP_OUTSIDE = 3.4e-6, 14e-6
BEHIND = 0.8  # share of computing time that hides communication


def attention_exchange(workload: Workload, chip: Chip) -> float:
    """Return the seconds per micro-batch in which attention waits for other ranks.

    Blocks cannot compute meanwhile.
    """
    if workload.context == 1:
        return 0.0
    return sum(
        layers * _of_layer(workload, window, chip)
        for window, layers in workload.model.windows().items()
    )


def _of_layer(workload: Workload, window: int | None, chip: Chip) -> float:
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
        groups = -(-model.kv_heads // allgather_group(model.kv_heads, ranks))
        gathered = 2 * ring(e * kv * n * ranks * rows, groups, ranks, workload, chip)
        return gathered + all_to_all(FP32 * kv * n * ranks * rows, workload, chip)
    # forward q, k, v and the output; backward those, the output's gradient, and dq, dk, dv; and
    # q, k and v once more if they are computed again
    kv *= kv_copies(model.heads, model.kv_heads, ranks)
    again = workload.memory.recompute == "block"
    each = 2 * q + kv + (4 * q + 2 * kv if again else 2 * q + kv)
    return all_to_all(e * each * n * rows, workload, chip)


def exchanges_halo(workload: Workload, window: int | None) -> bool:
    """Return True if a layer of this `window` needs only the end of the rank before.

    The backend must take the free intervals that result.
    """
    n = ceil(workload.seq_len / workload.context)
    free = workload.attention.description.takes_intervals
    return workload.context > 1 and window is not None and window - 1 <= n and free


def all_to_all(sent: float, workload: Workload, chip: Chip) -> float:
    """Return the seconds in which each rank sends `sent` bytes in equal parts to all ranks."""
    ranks, here = workload.context, min(workload.context, workload.devices_per_machine)
    # both networks work at the same time: the slower one counts
    part = sent / ranks
    return max((here - 1) * part / chip.link, (ranks - here) * part / chip.network)


def ring(size: float, pieces: int, ranks: int, workload: Workload, chip: Chip) -> float:
    """Return the seconds in which `ranks` devices all gather `size` bytes, or reduce-scatter them.

    The pieces go one after another.
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
    model, ranks = workload.model, workload.devices
    if ranks == 1:
        return 0.0
    # embedding and lm_head are not part of a block
    outside = int(model.vocab_size or 0) * model.channels * (1 if model.tied else 2)
    blocks = workload.parameters - outside
    added = workload.added
    trained, trained_outside = (added, 0) if added else (blocks, outside)

    def shared(size: float, pieces: int) -> float:
        return ring(size, pieces, ranks, workload, chip)

    if not workload.sharing.shards_weights:  # NCCL's trees keep a sum's hops few
        last = 2 * shared(FP32 * trained_outside, 1)
        backward = 2 / 3 * compute
        return last + max(0.0, 2 * shared(FP32 * trained, 1) - BEHIND * backward)
    e = workload.activation_bytes
    gathered = workload.own_bytes - e * outside  # of blocks, packed perhaps
    first = shared(e * outside + gathered / model.layers, 1)
    last = shared(FP32 * trained_outside, 1)
    hidden = 2 * shared(gathered, model.layers) + shared(FP32 * trained, model.layers)
    return workload.accumulate * (first + last + max(0.0, hidden - BEHIND * compute))
