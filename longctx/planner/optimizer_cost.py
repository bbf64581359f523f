"""Memory and time of an optimizer: its state, and an update's workspace and FLOPs. No torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from longctx.config.block import Block
from longctx.config.parts import FP32
from longctx.planner.workload import Workload

SLICE = 2**26  # weights whose state is on the GPU at one time, if it is saved on the host
STACK = 2**24  # weights that Newton-Schulz takes in one batch, unless one matrix has more
KEPT_SHARE = {"fp32": 1.0, "bf16": 0.5, "host": 0.0}  # of the fp32 state that lies on the GPU


def block_matrices(blocks: Iterable[Block]) -> Counter[tuple[int, int]]:
    """Count the matrices of `blocks` by rows and columns, those of fused weights apart."""
    linears = (linear for block in blocks for linear in block.linears.values())
    return Counter((rows, linear.columns) for linear in linears for rows in linear.rows)


def trained(workload: Workload) -> tuple[int, int]:
    """Count the trained weights: in matrices of the blocks, and all others, LoRA's among them."""
    added = workload.added
    if added:
        return 0, added
    matrices = sum(block.weights for block in workload.blocks)
    return matrices, workload.parameters - matrices


def state(workload: Workload) -> int:
    """Return the bytes of the optimizer's whole state in fp32."""
    traits = workload.optimizer.traits
    matrices, others = trained(workload)
    return traits.matrix_bytes * matrices + traits.other_bytes * others


def state_on_gpu(workload: Workload) -> float:
    """Return the bytes of state on the GPU between updates."""
    return KEPT_SHARE[workload.memory.optimizer_state or "fp32"] * state(workload)


def state_on_host(workload: Workload) -> float:
    """Return the bytes of state in pinned host memory."""
    return float(state(workload) if workload.memory.optimizer_state == "host" else 0)


def workspace(workload: Workload) -> float:
    """Return the bytes of an update on the GPU, its resting state apart.

    They hold state that comes from the host, and the matrices of Newton-Schulz.
    """
    model, orthogonalizes = workload.model, workload.optimizer.traits.orthogonalizes
    added = workload.added
    embedding = int(model.vocab_size or 0) * model.channels
    linears = [linear for block in workload.blocks for linear in block.linears.values()]
    linear = max(linear.weights for linear in linears)
    largest = added / model.layers if added else max(embedding, 0 if orthogonalizes else linear)
    slices = 2.0 * FP32 * min(SLICE, largest) if workload.memory.optimizer_state == "host" else 0.0
    if not orthogonalizes:
        return slices
    # A batch in bf16 before and after an iteration, with two square matrices no larger than it.
    # While it is filled: itself, the same in fp32, and its momentum unless that changes in place.
    each = 8 if workload.memory.optimizer_state in (None, "fp32") else 10
    largest_matrix = max(max(linear.rows) * linear.columns for linear in linears)
    if workload.sharing.shards_weights:  # one matrix at a time, next to its whole weight in bf16
        return max(slices, *(2.0 * x.weights + 8.0 * max(x.rows) * x.columns for x in linears))
    return max(slices, float(each * min(max(STACK, largest_matrix), trained(workload)[0])))


def bytes_moved(workload: Workload) -> float:
    """Return the bytes that an update with state on the GPU moves through its memory.

    Weights and state are read and written, gradients read twice, once for their norm. The passes
    of Newton-Schulz take 36 bytes more.
    """
    matrices, others = trained(workload)
    moved = 16 * (matrices + others) + 2 * state_on_gpu(workload)
    return moved + (36 * matrices if workload.optimizer.traits.orthogonalizes else 0)


def products(workload: Workload) -> list[tuple[int, float]]:
    """Return the narrow side and FLOPs of Newton-Schulz for the matrices of each shape.

    X Xᵀ and its product with X take 2 m² n each, its square 2 m³, for m <= n.
    """
    if not workload.optimizer.traits.orthogonalizes:
        return []
    iterations = workload.optimizer.filled().iterations or 0
    by_shape: list[tuple[int, float]] = []
    for shape, count in block_matrices(workload.blocks).items():
        m, n = sorted(shape)
        by_shape.append((m, iterations * count * (4.0 * m * m * n + 2.0 * m**3)))
    return by_shape
