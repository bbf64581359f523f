"""Time that the devices of a run wait for one another: what they exchange for attention, and for
weights and gradients. Free of torch.

The ranks of a row lie side by side, so a row of no more ranks than a machine has devices is
exchanged over its link alone. Between machines every device has a network adapter of its own:

    all-to-all        a device sends to each other one; what leaves the machine passes its adapter
    gather, reduce    rings (NCCL): each passes on what it has received, and a machine's rings leave
                      it by all its adapters together

Letters: P ranks of a row of N tokens, n = N/P; H and Hkv heads of D channels; e bytes of an
activation.
"""

from __future__ import annotations

from math import ceil

from longctx.config.parallel_config import allgather_group, kv_copies
from longctx.config.parts import FP32
from longctx.planner.hardware import Chip
from longctx.planner.workload import Workload

# Seconds from one rank of a ring to the next, inside a machine and to another: what NCCL's choice
# of an algorithm assumes (its tuning.cc, ring, simple protocol).
HOP, HOP_OUTSIDE = 3.4e-6, 14e-6
BEHIND = 0.8  # share of the time of blocks that compute which hides what travels meanwhile


def attention_exchange(workload: Workload, chip: Chip) -> float:
    """Seconds of one micro-batch, forward and backward, in which attention waits for other ranks of
    the row; blocks cannot compute meanwhile.
    """
    if workload.context == 1:
        return 0.0
    return sum(
        layers * _of_layer(workload, window, chip)
        for window, layers in workload.model.windows().items()
    )


def _of_layer(workload: Workload, window: int | None, chip: Chip) -> float:
    m, ranks = workload.model, workload.context
    e, rows = workload.activation_bytes, workload.batch_size
    n = ceil(workload.seq_len / ranks)
    q, kv = m.heads * m.head_size, 2 * m.kv_heads * m.head_size
    if exchanges_halo(workload, window):
        # Keys and values, again in backward, and their gradients back
        assert window is not None
        sent = 3 * e * kv * (window - 1) * rows
        inside = ranks <= workload.devices_per_machine
        return sent / (chip.link if inside else chip.network)
    if workload.context_method == "allgather":
        # K and V in forward and in backward; partial sums of their gradients in fp32
        groups = -(
            -m.kv_heads // allgather_group(m.kv_heads, ranks)
        )  # of heads, one after the other
        gathered = 2 * ring(e * kv * n * ranks * rows, groups, ranks, workload, chip)
        return gathered + all_to_all(FP32 * kv * n * ranks * rows, workload, chip)
    # Forward q, k, v and the output; backward those, the output's gradient, and dq, dk, dv; and
    # q, k and v once more where they are computed again.
    kv *= kv_copies(m.heads, m.kv_heads, ranks)
    again = workload.memory.recompute == "block"
    each = 2 * q + kv + (4 * q + 2 * kv if again else 2 * q + kv)
    return all_to_all(e * each * n * rows, workload, chip)


def exchanges_halo(workload: Workload, window: int | None) -> bool:
    """Whether a layer of this `window` needs no more than the end of the rank before, and the
    backend takes the mask that this leaves.
    """
    n = ceil(workload.seq_len / workload.context)
    free = workload.attention.description.takes_intervals
    return workload.context > 1 and window is not None and window - 1 <= n and free


def all_to_all(sent: float, workload: Workload, chip: Chip) -> float:
    """Seconds in which each rank of a row sends `sent` bytes in equal parts to all of them."""
    ranks, here = workload.context, min(workload.context, workload.devices_per_machine)
    part = sent / ranks
    return max((here - 1) * part / chip.link, (ranks - here) * part / chip.network)


def ring(size: float, pieces: int, ranks: int, workload: Workload, chip: Chip) -> float:
    """Seconds in which each of `ranks` devices gathers `size` bytes from all, or sums of so many
    bytes are left in slices; one piece after the other.
    """
    here = min(ranks, workload.devices_per_machine)
    machines = -(-ranks // here)
    outside = machines if machines > 1 else 0
    slowest = min(chip.link, here * chip.network) if outside else chip.link
    hops = max(0, ranks - 1 - outside) * HOP + outside * HOP_OUTSIDE
    return (1 - 1 / ranks) * size / slowest + pieces * hops


def waiting_for_weights(workload: Workload, chip: Chip, compute: float) -> float:
    """Seconds of a step in which a device waits for weights and gradients of others, where a
    micro-batch computes for `compute` seconds.

    fsdp gathers a block's weights for forward and for backward and sums its gradients while other
    blocks compute; ddp sums all gradients during the last backward. Nothing hides what fsdp gathers
    before the first block, and the gradient of the embedding, which comes last.
    """
    m, ranks = workload.model, workload.devices
    if ranks == 1:
        return 0.0
    outside = int(m.vocab_size or 0) * m.channels * (1 if m.tied else 2)
    blocks = m.parameters() - outside
    added = workload.lora.parameters(m)
    trained, trained_outside = (added, 0) if added else (blocks, outside)

    def shared(size: float, pieces: int) -> float:
        return ring(size, pieces, ranks, workload, chip)

    if not workload.sharing.shards_weights:  # NCCL's trees keep a sum's hops few
        last = 2 * shared(FP32 * trained_outside, 1)
        backward = 2 / 3 * compute
        return last + max(0.0, 2 * shared(FP32 * trained, 1) - BEHIND * backward)
    e = workload.activation_bytes
    first = shared(e * (outside + blocks / m.layers), 1)
    last = shared(FP32 * trained_outside, 1)
    hidden = 2 * shared(e * blocks, m.layers) + shared(FP32 * trained, m.layers)
    return workload.accumulate * (first + last + max(0.0, hidden - BEHIND * compute))
