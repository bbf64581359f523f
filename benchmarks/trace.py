"""Where the time of profiled steps went, from torch.profiler's trace.

On a GPU the leaves are its kernels and copies, on a CPU the operators. Each is attributed to what
was running on the CPU when it was launched: operators, and the ranges that `marked` puts around the
parts of a model. A backward operator belongs where the forward operator of its sequence number was.
Inside a compiled block there are no ranges; there operators tell the part, and for fused ones the
operators' names in the name of the kernel.
"""

from __future__ import annotations

import bisect
import functools
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

ATTENTION, MATRICES, LOSS, SMALL, OPTIMIZER = (
    "attention",
    "projections and MLP",
    "loss",
    "embedding, norm and rope",
    "optimizer",
)
DATA, COPIES, IDLE, OTHER = "data", "copies", "idle", "other"
PARTS = (ATTENTION, MATRICES, LOSS, SMALL, OPTIMIZER, DATA, COPIES, IDLE, OTHER)
RANGE = "longctx: "
MODEL = RANGE + "model"  # around all of forward: what has no part of its own in it is SMALL
OPERATORS = (
    (
        re.compile(
            r"flash|scaled_dot_product|cudnn_attention|flex_attention|::bmm|::baddbmm|efficient_attention"
        ),
        ATTENTION,
    ),
    (re.compile(r"cross_entropy|SummedLoss|log_softmax"), LOSS),
    (re.compile(r"^Optimizer\.|clip_grad|adamw?\b", re.IGNORECASE), OPTIMIZER),
    (re.compile(r"enumerate\(DataLoader\)"), DATA),
    (
        re.compile(
            r"::(mm|addmm|linear|matmul|_scaled_mm|silu|silu_backward)\b|swiglu", re.IGNORECASE
        ),
        MATRICES,
    ),
    (re.compile(r"rms_norm|rope_|::rope|rotate|embedding", re.IGNORECASE), SMALL),
)
KERNELS = (  # the first that fits; captured steps have no operators
    (re.compile(r"cross_entropy|multiply_kernel"), LOSS),
    (re.compile(r"swiglu|quantize|amax_kernel"), MATRICES),
    (re.compile(r"^(rms_norm|rope)_"), SMALL),
    (
        re.compile(
            r"flash|fmha|attention|forward_kernel|dkv_kernel|dq_kernel|backward_kernel|backward_\d+_kernel|unpack_kernel|delta_kernel|softmax|logsumexp"
        ),
        ATTENTION,
    ),
    (re.compile(r"silu|sigmoid|gemm|nvjet|cutlass|splitK"), MATRICES),
    (re.compile(r"multi_tensor|fused_adam|adamw_", re.IGNORECASE), OPTIMIZER),
    # A weight cast for its product
    (
        re.compile(r"triton_\w*fused__to_copy(_t|_view|_permute|_\d+)*$"),
        MATRICES,
    ),
    (re.compile(r"^triton_"), SMALL),
)
ON_GPU = {"kernel", "gpu_memcpy", "gpu_memset"}
LAUNCHES = {"cuda_runtime", "cuda_driver"}
ROUNDING = 0.002  # microseconds by which neighbours in a trace may overlap
BACKWARD = "autograd::engine::evaluate_function: "


@dataclass(eq=False)
class Node:
    """An operator, a range or a launch on the CPU, in microseconds, inside its `parent`."""

    name: str
    start: float
    end: float
    sequence: int | None
    parent: Node | None = None

    def path(self) -> list[Node]:
        """Itself and what is around it, the innermost first."""
        return [self, *(self.parent.path() if self.parent else [])]


@dataclass
class Leaf:
    """A stretch of work and the node that launched it, or was it."""

    name: str
    category: str
    start: float
    end: float
    node: Node | None


@contextmanager
def marked(compiled: bool) -> Iterator[None]:
    """Inside, models run with ranges around their parts; where blocks are compiled, only around
    what is not.
    """
    from torch.profiler import record_function

    from longctx.model import gpt, layers

    def inside(part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            with record_function(part):
                return function(*args, **kwargs)

        return wrapped

    targets: list[tuple[Any, str, str]] = [
        (gpt.GPT, "forward", MODEL),
        (gpt, "linear_cross_entropy", RANGE + LOSS),
    ]
    targets += [(gpt.F, "embedding", RANGE + SMALL)]
    if not compiled:
        targets += [(layers.SelfAttention, "forward", RANGE + ATTENTION)]
        targets += [(layers, "rotate", RANGE + SMALL)]
        targets += [
            (layers.StreamNorm, "add_and_norm", RANGE + SMALL),
            (layers.SwiGLU, "forward", RANGE + MATRICES),
        ]
        targets += [
            (layers.StreamNorm, "forward", RANGE + SMALL),
            (layers.RMSNorm, "forward", RANGE + SMALL),
        ]
        targets += [(layers.Linear, "forward", RANGE + MATRICES)]
    with ExitStack() as stack:
        for owner, name, part in targets:
            stack.enter_context(mock.patch.object(owner, name, inside(part, getattr(owner, name))))
        yield


def time_by_part(events: list[dict[str, Any]]) -> dict[str, float]:
    """Microseconds of each of PARTS but IDLE in a chrome trace: on the GPU where it did anything,
    else on the CPU.

    Nothing is counted twice: what overlaps earlier work counts from that one's end, and copies only
    while nothing else runs. DATA is what of the rest lay inside the wait for the next batch.
    """
    nodes, segments, launches = tree([event for event in events if event.get("ph") == "X"])
    leaves = [
        Leaf(
            event["name"],
            event["cat"],
            event["ts"],
            event["ts"] + event["dur"],
            launches.get(_correlation(event)),
        )
        for event in events
        if event.get("ph") == "X" and event.get("cat") in ON_GPU
    ] or [Leaf(node.name, "cpu", start, end, node) for node, start, end in segments]
    # sequence number → the last forward operator that began with it, which is the one that used it
    # up
    created = {}
    for node in sorted(nodes, key=lambda node: node.start):
        if node.sequence is not None and not any(
            outer.name.startswith(BACKWARD) for outer in node.path()
        ):
            created[node.sequence] = node
    spent = dict.fromkeys(PARTS, 0.0)
    busy: list[tuple[float, float]] = []
    for leaf in sorted(
        leaves, key=lambda leaf: (leaf.category != "kernel" and leaf.category != "cpu", leaf.start)
    ):
        for start, end in _free(busy, leaf.start, leaf.end):
            spent[part_of(leaf, created)] += end - start
    if leaves and leaves[0].category != "cpu":
        waits = [node for node in nodes if "enumerate(DataLoader)" in node.name]
        spent[DATA] += sum(
            end - start for wait in waits for start, end in _free(busy, wait.start, wait.end)
        )
    del spent[IDLE]
    return spent


def part_of(leaf: Leaf, created: dict[int, Node]) -> str:
    """The one of PARTS that a leaf belongs to."""
    own = leaf.node.path() if leaf.node else []
    begun = next(
        (node for node in own if node.name.startswith(BACKWARD) and node.sequence is not None), None
    )
    origin = created[begun.sequence].path() if begun and begun.sequence in created else []
    for path in (own, origin):
        for node in path:
            if node.name.startswith(RANGE) and node.name != MODEL:
                return node.name.removeprefix(RANGE)
    if leaf.category == "gpu_memcpy" and "DtoD" not in leaf.name:
        return COPIES
    for node in (*own, *origin):
        for pattern, part in OPERATORS:
            if pattern.search(node.name):
                return part
    for pattern, part in KERNELS if leaf.category == "kernel" else ():
        if pattern.search(leaf.name):
            return part
    if any(node.name == MODEL or node.name.startswith(BACKWARD) for node in (*own, *origin)):
        return SMALL
    return COPIES if leaf.category in ("gpu_memcpy", "gpu_memset") else OTHER


def tree(
    events: list[dict[str, Any]],
) -> tuple[list[Node], list[tuple[Node, float, float]], dict[int, Node]]:
    """The CPU's nodes, the stretches in which each ran itself, and the launches by correlation
    number.
    """
    threads: dict[Any, list[tuple[Node, int | None]]] = {}
    for event in events:
        if event.get("cat") in {"cpu_op", "user_annotation", *LAUNCHES}:
            sequence = event.get("args", {}).get("Sequence number")
            node = Node(event["name"], event["ts"], event["ts"] + event["dur"], sequence)
            launch = _correlation(event) if event["cat"] in LAUNCHES else None
            threads.setdefault((event.get("pid"), event.get("tid")), []).append((node, launch))
    nodes, segments, launches = [], [], {}
    for members in threads.values():
        open_: list[Node] = []
        clock = 0.0
        last = Node("", float("inf"), float("inf"), None)
        for node, launch in [*sorted(members, key=lambda m: (m[0].start, -m[0].end)), (last, None)]:
            while open_ and open_[-1].end <= node.start + ROUNDING:
                event = open_.pop()
                if event.end > clock:
                    segments.append((event, clock, event.end))
                    clock = event.end
            if node is last:
                break
            if open_ and node.start > clock:
                segments.append((open_[-1], clock, node.start))
            clock = max(clock, node.start)
            node.parent = open_[-1] if open_ else None
            open_.append(node)
            nodes.append(node)
            if launch is not None:
                launches[launch] = node
    return nodes, segments, launches


def _correlation(event: dict[str, Any]) -> int:
    return int(event.get("args", {}).get("correlation", -1))


def _free(busy: list[tuple[float, float]], start: float, end: float) -> list[tuple[float, float]]:
    """The parts of start .. end that no interval of `busy`, sorted and disjoint, covers yet; they
    are busy from then on.
    """
    at = bisect.bisect_left(busy, (start, start))
    at -= at > 0 and busy[at - 1][1] > start
    free, clock, stop = [], start, at
    while stop < len(busy) and busy[stop][0] < end:
        if busy[stop][0] > clock:
            free.append((clock, busy[stop][0]))
        clock = max(clock, busy[stop][1])
        stop += 1
    if clock < end:
        free.append((clock, end))
    busy[at:stop] = sorted([*busy[at:stop], *free])
    return free
