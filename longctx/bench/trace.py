"""Where the time of profiled steps went, from torch.profiler's trace.

On a GPU the leaves are its kernels and copies, on a CPU the operators, each with what was running on the CPU when it was
launched: ranges that `marked` puts around the parts of a model, and operators. A backward operator belongs where the
forward operator of its sequence number was. Inside a compiled block there are no ranges; there the operators say it, and
for what the compiler fused, the operators' names in the kernel's own.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Iterator
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
    (re.compile(r"flash|scaled_dot_product|cudnn_attention|flex_attention|::bmm|::baddbmm|efficient_attention"), ATTENTION),
    (re.compile(r"cross_entropy|SummedLoss|log_softmax"), LOSS),
    (re.compile(r"^Optimizer\.|clip_grad|adamw?\b", re.IGNORECASE), OPTIMIZER),
    (re.compile(r"enumerate\(DataLoader\)"), DATA),
    (re.compile(r"::(mm|addmm|linear|matmul|_scaled_mm|silu|silu_backward)\b|swiglu", re.IGNORECASE), MATRICES),
    (re.compile(r"rms_norm|::rope|rotate|embedding", re.IGNORECASE), SMALL),
)
KERNELS = (
    (re.compile(r"flash|fmha|attention|forward_kernel|dkv_kernel|dq_kernel|backward_kernel|delta_kernel|softmax|logsumexp"), ATTENTION),
    (re.compile(r"silu|sigmoid|gemm|nvjet|cutlass|splitK"), MATRICES),
    (re.compile(r"multi_tensor|fused_adam", re.IGNORECASE), OPTIMIZER),
    (re.compile(r"triton_\w*fused__to_copy(_t|_view|_permute|_\d+)*$"), MATRICES),  # a weight cast for its product
    (re.compile(r"^triton_"), SMALL),
)
LEAVES = {"kernel", "gpu_memcpy", "gpu_memset"}
LAUNCHES = {"cuda_runtime", "cuda_driver"}


@dataclass
class Leaf:
    """A stretch of work: microseconds from `start` to `end`, and the names around its launch, the outermost first."""

    start: float
    end: float
    name: str
    category: str
    stack: tuple[str, ...] = ()
    forward: tuple[str, ...] = ()  # those around the forward operator that it is the backward of


@contextmanager
def marked(compiled: bool) -> Iterator[None]:
    """Inside, models run with ranges around their parts; where blocks are compiled, only around what is not."""
    from torch import nn
    from torch.profiler import record_function

    from longctx.model import gpt, layers

    def inside(part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            with record_function(part):
                return function(*args, **kwargs)

        return wrapped

    targets: list[tuple[Any, str, str]] = [(gpt.GPT, "forward", MODEL), (gpt, "linear_cross_entropy", RANGE + LOSS)]
    targets += [(nn.Embedding, "forward", RANGE + SMALL)]
    if not compiled:
        targets += [(layers, "attention", RANGE + ATTENTION), (layers, "rotate", RANGE + SMALL)]
        targets += [(layers.RMSNorm, "forward", RANGE + SMALL), (layers.SwiGLU, "forward", RANGE + MATRICES)]
        targets += [(nn.Linear, "forward", RANGE + MATRICES)]
    with ExitStack() as stack:
        for owner, name, part in targets:
            stack.enter_context(mock.patch.object(owner, name, inside(part, getattr(owner, name))))
        yield


def leaves(events: Iterable[dict[str, Any]]) -> list[Leaf]:
    """The leaves of a chrome trace's events, in order of their start: the GPU's where there are any, else the CPU's."""
    whole = [event for event in events if event.get("ph") == "X"]
    on_gpu = [event for event in whole if event.get("cat") in LEAVES]
    cpu = [event for event in whole if event.get("cat") in {"cpu_op", "user_annotation", *LAUNCHES}]
    stacks, own = _stacks(cpu)
    created = _forward_stacks(cpu, stacks)

    def found(event: dict[str, Any], at: int | None, start: float, end: float) -> Leaf:
        stack = stacks[at] if at is not None else ()
        numbers = [n for outer in (chain[at] if at is not None else ()) if (n := _backward_of(cpu[outer])) is not None]
        forward = created.get(numbers[0], ()) if numbers else ()
        return Leaf(start, end, event["name"], event["cat"], stack, forward)

    chain = own.chain
    if on_gpu:
        launched = {event["args"]["correlation"]: i for i, event in enumerate(cpu) if event["cat"] in LAUNCHES and "correlation" in event.get("args", {})}
        made = [found(e, launched.get(e.get("args", {}).get("correlation")), e["ts"], e["ts"] + e["dur"]) for e in on_gpu]
    else:
        made = [found(cpu[i], i, start, end) for i, start, end in own.segments]
    return sorted(made, key=lambda leaf: leaf.start)


@dataclass
class _Own:
    chain: list[tuple[int, ...]]  # of each event, those around it and itself, the outermost first
    segments: list[tuple[int, float, float]]  # (event, start, end) where nothing ran inside it


def _stacks(cpu: list[dict[str, Any]]) -> tuple[list[tuple[str, ...]], _Own]:
    """Names around each event, itself the last, and the stretches that are its own."""
    chain: list[tuple[int, ...]] = [()] * len(cpu)
    segments: list[tuple[int, float, float]] = []
    threads: dict[Any, list[int]] = {}
    for i, event in enumerate(cpu):
        threads.setdefault((event.get("pid"), event.get("tid")), []).append(i)
    for members in threads.values():
        open_: list[int] = []
        clock = 0.0

        def close(until: float) -> None:
            nonlocal clock
            while open_ and (end := cpu[open_[-1]]["ts"] + cpu[open_[-1]]["dur"]) <= until:
                if end > clock:
                    segments.append((open_[-1], clock, end))
                    clock = end
                open_.pop()

        for i in sorted(members, key=lambda i: (cpu[i]["ts"], -cpu[i]["dur"])):
            start = cpu[i]["ts"]
            close(start)
            if open_ and start > clock:
                segments.append((open_[-1], clock, start))
            clock = max(clock, start)
            chain[i] = (*(chain[open_[-1]] if open_ else ()), i)
            open_.append(i)
        close(float("inf"))
    return [tuple(cpu[i]["name"] for i in c) for c in chain], _Own(chain, segments)
