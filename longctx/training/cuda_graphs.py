"""CUDA graphs of a step: all kernels of a micro-batch's forward, or backward, in one launch.

Launching the some 400 kernels of a small micro-batch takes the host 40 to 60 ms; the GPU computes
for 9. Kernels, shapes and addresses never change while sequences keep their length. So the first
step runs as ever, the second is captured, and later ones are replayed, to the same bits. Graphs
read changing values at fixed addresses: tokens, targets, documents and the weight of a token here,
gradients in each parameter's .grad, learning rate and step of AdamW in its `count_step`.

The first micro-batch of a step writes the gradients, the others add to them: two pairs of graphs
that share their memory. They are captured again when seq_len_schedule goes on to longer sequences.
`Workload.not_captured` gives the reason why a step cannot be captured.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from copy import deepcopy
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from longctx.attention import Mask
from longctx.parallel.devices import is_out_of_memory
from longctx.training.batches import MicroBatch
from longctx.training.module import Mark, StepParts
from longctx.training.optimizers.adamw import AdamW

T = TypeVar("T")


class CaptureFailed(RuntimeError):
    """An operation cannot be captured; torch captures no other after that."""

    def __init__(self, error: BaseException) -> None:
        reason = (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
        super().__init__(f"a step cannot be captured in a CUDA graph ({reason}); use graphs=false")


class StaticBatch:
    """A micro-batch at fixed addresses, filled from others of its shape."""

    def __init__(self, like: MicroBatch) -> None:
        self.micro = deepcopy(like)
        # Offsets and lengths of documents change in number: backends that read them are refused
        self.micro.mask = Mask("documents", like.mask.window, doc_ids=self.micro.mask.doc_ids)

    def fill(self, micro: MicroBatch) -> bool:
        """Copy the tensors of `micro`, wait for nothing; return False if their shape is another."""
        if micro.tokens.shape != self.micro.tokens.shape:
            return False
        for target, source in zip(self._tensors(self.micro), self._tensors(micro), strict=True):
            target.copy_(source, non_blocking=True)
        return True

    @staticmethod
    def _tensors(micro: MicroBatch) -> list[Tensor]:
        assert micro.mask.doc_ids is not None
        return [micro.tokens, micro.targets, micro.mask.doc_ids, micro.weight]


class StepGraphs(StepParts):
    """A step whose kernels are launched as graphs, once a step of its shape has run without."""

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        self.inputs: StaticBatch | None = None
        self._begin()

    def _begin(self) -> None:
        """Forget the graphs: sequences of another length follow."""
        # True once a step of this shape has run to its update: all is compiled, and every moment
        # has its address
        self.is_warm = self.captures_update = False
        # By whether a micro-batch is the first of its step: forward, backward, and its loss, which
        # each replay writes
        self.passes: dict[bool, tuple[torch.cuda.CUDAGraph, torch.cuda.CUDAGraph, Tensor]] = {}
        # Writes the module's `grad_norm`, and the factor of AdamW
        self.clipping: torch.cuda.CUDAGraph | None = None
        self.updating: torch.cuda.CUDAGraph | None = None
        self.gradients: list[tuple[nn.Parameter, Tensor]] = []  # written by the graphs
        self.pool: Any = torch.cuda.graph_pool_handle()
        super().zero_grad()

    def forward_backward(self, micro: MicroBatch, first: bool, last: bool, mark: Mark) -> Tensor:
        """Do as without graphs; the `first` micro-batch writes its gradients over the old ones."""
        if self.inputs is None or not self.inputs.fill(micro):
            self._begin()
            self.inputs = StaticBatch(micro)
        if not self.is_warm:
            with uncached(self.parallel.device.type):
                return super().forward_backward(self.inputs.micro, first, last, mark)
        if first not in self.passes:
            # live autograd nodes of an earlier step would keep its gradients on its stream
            gc.collect()
            batch = self.inputs.micro
            forward, loss = self._capture(lambda: self.prepared.training_step(batch))
            backward, _ = self._capture(lambda: self.parallel.backward(loss))
            self.gradients = [(p, p.grad) for p in self.module.parameters() if p.grad is not None]
            self.passes[first] = forward, backward, loss.detach()
        forward, backward, loss = self.passes[first]
        forward.replay()
        mark("forward")
        backward.replay()
        mark("backward")
        return loss

    def clip(self) -> None:
        if not self.is_warm:
            return super().clip()
        if self.clipping is None:
            self.clipping, _ = self._capture(super().clip)
            if isinstance(self.optimizer, AdamW):
                self.captures_update = self.optimizer.can_capture_update()
        return self.clipping.replay()

    def update(self) -> None:
        if self.captures_update:
            assert isinstance(self.optimizer, AdamW)
            # Before the capture too: it reads the count, and finds the numbers on the GPU
            self.optimizer.count_step()
            if self.updating is None:
                self.updating, _ = self._capture(self.optimizer.update)
            self.updating.replay()
            return
        if not self.is_warm:
            # Optimizer state that lies among freed activations would keep their segments from
            # the graphs' pool: a quarter of a GiB in 124m.
            torch.cuda.empty_cache()
        super().update()
        self.is_warm = True
        for parameter, gradient in self.gradients:  # the optimizer may have set it to None
            parameter.grad = gradient

    def zero_grad(self) -> None:
        """Leave captured gradients, to be written over."""
        if not self.passes:
            super().zero_grad()

    def _capture(self, function: Callable[[], T]) -> tuple[torch.cuda.CUDAGraph, T]:
        return capture(function, self.parallel.device.type, self.pool)


class ForwardGraph:
    """`function` of micro-batches without gradients, as a graph from the second of a shape on. The
    next call overwrites its result.
    """

    def __init__(self, function: Callable[[MicroBatch], Tensor]) -> None:
        self.function = function
        self.inputs: StaticBatch | None = None
        self.graph: torch.cuda.CUDAGraph | None = None
        self.result: Tensor | None = None

    def __call__(self, micro: MicroBatch) -> Tensor:
        if self.inputs is None:
            self.inputs = StaticBatch(micro)
            return self.function(micro)
        if not self.inputs.fill(micro):  # the last rows of a data set: the graph's memory is theirs
            self.graph = self.result = None
            return self.function(micro)
        if self.graph is None:
            batch, pool = self.inputs.micro, torch.cuda.graph_pool_handle()
            self.graph, self.result = capture(
                lambda: self.function(batch), micro.tokens.device.type, pool
            )
        self.graph.replay()
        assert self.result is not None
        return self.result


def capture(function: Callable[[], T], device: str, pool: Any) -> tuple[torch.cuda.CUDAGraph, T]:
    """Return a graph of the kernels of `function` in the memory `pool`, and its result, which a
    replay computes again. Raises CaptureFailed.
    """
    graph, failure = torch.cuda.CUDAGraph(), list[BaseException]()
    # cuBLAS allocates a workspace for each stream: it goes into the graph's memory, once
    torch.cuda.synchronize()
    torch._C._cuda_clearCublasWorkspaces()
    # thread_local: meanwhile the thread of a checkpoint may wait for its copies
    try:
        with (
            torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"),
            uncached(device),
        ):
            try:
                result = function()
            except BaseException as error:
                failure.append(error)  # the end of the capture may fail after it, and hide it
                raise
    except RuntimeError as error:
        cause = failure[0] if failure else error
        if is_out_of_memory(cause) or not isinstance(cause, RuntimeError):
            raise cause from None
        raise CaptureFailed(cause) from error
    torch._C._cuda_clearCublasWorkspaces()
    return graph, result


def uncached(device: str) -> torch.autocast:
    """Return autocast as it is without its cache: a graph would read the copy of another one."""
    # torch.compile compiles again with it, so the step before the capture has it too
    enabled, dtype = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
    return torch.autocast(device, dtype, enabled, cache_enabled=False)
