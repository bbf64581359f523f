"""The processes of a run: their mesh, and the sums that they form over it.

Only this file knows how a run is spread over devices. All others ask `Parallel`, on one device too.
Lightning Fabric gives each process its device, precision and gradient averaging.
"""

from __future__ import annotations

import os
import socket
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from longctx.attention import communication
from longctx.attention.communication import Clock, measured
from longctx.attention.context_parallel import Context
from longctx.attention.description import AttentionConfig
from longctx.config.eval_config import EvalConfig
from longctx.config.fields import refuse
from longctx.config.layout_config import STRATEGIES, Strategy
from longctx.config.train_config import TrainConfig
from longctx.model import GPT
from longctx.parallel import sharding
from longctx.parallel.devices import dtype_of
from longctx.parallel.fabric import Fabric, make_fabric
from longctx.parallel.launch import EXIT, OWN, Launched, launched
from longctx.parallel.meeting import GOODBYE, Arrival, Meeting, missing
from longctx.spec.hardware import Machine
from longctx.spec.step import Division, Workload, precision_of
from longctx.system import exit_within

T = TypeVar("T")
COLLECTIVE_VARIABLE = "LONGCTX_COLLECTIVE_SECONDS"
COLLECTIVE = 1800.0  # seconds: a batch may take 10 minutes, a checkpoint longer
# Weights of the embedding and the first block: one of them gets its gradient last
LAST_WEIGHTS = 16


@dataclass(frozen=True)
class Parallel:
    """The processes of one run; this one is number `rank` of `ranks`, on `device`.

    Make it, decide on rank 0 what to run, `launch` it, then take it `with_mesh`. The mesh has the
    named dimensions data (copies of the model), shard (slices of it) and context (parts of a
    sequence).
    """

    launched: Launched
    device: torch.device
    dtype: torch.dtype  # of activations
    meeting: Meeting | None = None
    strategy: Strategy = STRATEGIES["none"]
    data_ranks: int = 1
    mesh: DeviceMesh | None = None
    context: Context = field(default_factory=Context)
    clock: Clock | None = None  # of the time in collectives

    @classmethod
    def of(
        cls,
        config: TrainConfig | EvalConfig,
        device: str,
        processes: Launched | None = None,
        meeting: Meeting | None = None,
    ) -> Parallel:
        """Return the `processes` that run `config` on "cuda" or "cpu"."""
        processes = launched(config) if processes is None else processes
        # Evaluation computes no gradients; only the order of their sums is not deterministic
        if isinstance(config, TrainConfig) and config.deterministic:
            # Before anything runs, since kernel.lock names the kernels
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
            torch.use_deterministic_algorithms(True)
            torch.backends.cudnn.benchmark = False
            # It slows every allocation, for debugging; our kernels write all of their memory
            torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        own = torch.device(f"cuda:{processes.local_rank}" if device == "cuda" else "cpu")
        dtype = dtype_of(precision_of(config.precision, device))
        return cls(processes, own, dtype, meeting, data_ranks=processes.ranks)

    @property
    def rank(self) -> int:
        """Return the number of this process."""
        return self.launched.rank

    @property
    def ranks(self) -> int:
        """Return the number of processes."""
        return self.launched.ranks

    @property
    def data_rank(self) -> int:
        """Return the number of this rank's sequences; ranks that share sequences have the same."""
        return self.rank // (self.ranks // self.data_ranks)

    @property
    def is_first(self) -> bool:
        """Return True on rank 0, which decides, writes and prints."""
        return self.rank == 0

    @cached_property
    def fabric(self) -> Fabric:
        """Return Lightning's part, in the run's precision, once the process group is formed."""
        return make_fabric(self.launched, self.device, self.dtype)

    def launch(self) -> None:
        """Form the process group once rank 0 has decided what to run."""
        if self.meeting is None:
            return
        on_gpu, store = self.device.type == "cuda", self.meeting.store
        if self.is_first:
            store.set("decided", "yes")
        # Without a limit: rank 0 may tokenize for hours
        missing(store, ["decided"], float("inf"))
        if on_gpu:
            torch.cuda.set_device(self.device)
        dist.init_process_group(
            "nccl" if on_gpu else "gloo",
            store=dist.PrefixStore("group", store),
            rank=self.rank,
            world_size=self.ranks,
            timeout=timedelta(seconds=float(os.environ.get(COLLECTIVE_VARIABLE, COLLECTIVE))),
            device_id=self.device if on_gpu else None,
        )

    def with_mesh(
        self, layout: Workload | Division, attention: AttentionConfig, folder: Path | None = None
    ) -> Parallel:
        """Return the launched processes with the mesh in which `layout` shares sequences and
        weights. `folder` is the run's, to tell how a run with a lost process continues.
        """
        if self.ranks == 1:
            return self
        if self.meeting is not None:
            self.meeting.begin(folder)
        clock, strategy = Clock(self.device), STRATEGIES[layout.strategy]
        communication.start(clock)
        rows = "shard" if strategy.shards_weights else "data"
        groups = {rows: self.ranks // layout.context, "context": layout.context}
        # Each dimension has process groups of its own, so one of a single rank is left out
        sizes = {name: size for name, size in groups.items() if size > 1}
        mesh = init_device_mesh(self.device.type, (*sizes.values(),), mesh_dim_names=(*sizes,))
        context = Context()
        if layout.context > 1:
            fetches_windows = attention.description.takes_intervals
            context = Context(mesh.get_group("context"), layout.context_method, fetches_windows)
        shared = replace(self, strategy=strategy, data_ranks=groups[rows], clock=clock)
        return replace(shared, mesh=mesh, context=context)

    def fail(self, problem: str, code: int = 1) -> None:
        """End the other processes too, since this one has a `problem`; only the first call counts.
        Rank 0 has printed its own. If all have the same, such as a loss of NaN, it alone prints it.
        """
        if self.meeting is not None and not self.meeting.is_ending:
            self.meeting.fail(problem, code)
            exit_within(EXIT, code)

    def is_lost_connection(self, error: BaseException) -> bool:
        """Return True if another process left a collective, or did not come in time."""
        # gloo has no exception of its own
        is_lost = isinstance(error, dist.DistError) or "gloo/transport" in str(error)
        # If it is gone, it is named elsewhere, and this process ended meanwhile
        if is_lost and self.meeting is not None:
            time.sleep(EXIT)
        return is_lost and self.ranks > 1

    def shut_down(self) -> None:
        """Part from the other processes while all run: an exit crashes gloo's threads."""
        if dist.is_initialized():
            dist.barrier()
        if self.meeting is not None:
            self.meeting.say(GOODBYE)
        if dist.is_initialized():
            dist.destroy_process_group()

    def alone(self) -> Parallel:
        """Return this process as the one rank of a run, which talks to no other."""
        alone = replace(self.launched, ranks=1, local_ranks=1, rank=0)
        return Parallel(alone, self.device, self.dtype)

    def shard(self, model: GPT, cast: bool = True) -> None:
        """Spread the weights of `model`, which hold nothing yet, over all ranks under fsdp. Blocks
        compute with weights in the precision of the run if `cast`, else as they are.
        """
        if self.strategy.shards_weights:
            assert self.mesh is not None
            # Under fsdp the mesh has no copies: all its ranks hold slices
            ranks = self.mesh if self.mesh.ndim == 1 else self.mesh._flatten("shard_context")
            sharding.shard(model, ranks, self.dtype if cast else None)

    def prepare(self, module: nn.Module) -> Any:
        """Return `module` wrapped so that `backward` averages gradients over all ranks."""
        if self.strategy.shards_weights:
            return module
        # After the last gradient, backward waits for the other ranks
        if self.clock is not None:
            weights = [p for p in module.parameters() if p.requires_grad]
            for weight in weights[:LAST_WEIGHTS]:
                weight.register_post_accumulate_grad_hook(self.clock.mark)
        return self.fabric.setup_module(module, move_to_device=False)  # it is where it should be

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of `loss` to those of the step."""
        self.fabric.backward(loss)
        if self.clock is not None:
            self.clock.until_now()

    def accumulates(self, module: Any, last: bool) -> AbstractContextManager[None]:
        """Keep gradients on their rank around a micro-batch, until the last one."""
        if last or not self.strategy.buckets_gradients or self.ranks == 1:
            return nullcontext()
        return self.fabric.no_backward_sync(module)

    def loss_weight(self, scored: int) -> Tensor:
        """Return the weight of each target token in the step's loss, if this rank has `scored`: ()
        float32, the number of ranks, which average gradients, divided by the targets of all ranks.
        """
        total = torch.full((), float(self.counted_once(scored)), device=self.device)
        return self.ranks / self.all_reduce_sum(total).clamp(min=1.0)

    def counted_once(self, count: int) -> int:
        """Return `count`, of whole sequences, on one of the ranks that share them, 0 on others."""
        return count if self.context.ranks.rank == 0 else 0

    def all_reduce_max(self, tensor: Tensor) -> Tensor:
        """Set each value of `tensor` to the largest of any rank, in place."""
        return self.all_reduce_sum(tensor, dist.ReduceOp.MAX)

    def all_reduce_sum(self, tensor: Tensor, operation: Any = dist.ReduceOp.SUM) -> Tensor:
        """Add up `tensor` over all ranks, in place."""
        if self.ranks > 1:
            with measured():
                dist.all_reduce(tensor, op=operation)
        return tensor

    def all_gather_rows(self, tensor: Tensor) -> Tensor:
        """Return the rows `tensor` (B, ...) of every data rank, in order: (data ranks · B, ...)."""
        if self.data_ranks == 1:
            return tensor
        assert self.mesh is not None
        parts = [torch.empty_like(tensor) for _ in range(self.data_ranks)]
        # The first dimension: its ranks take sequences of their own
        dist.all_gather(parts, tensor.contiguous(), group=self.mesh.get_group(0))
        return torch.cat(parts)

    def all_gather_objects(self, value: T) -> list[T]:
        """Return every rank's `value`, in order; rank 0's own is the first."""
        every = [value] * self.ranks
        if self.ranks > 1:
            dist.all_gather_object(every, value)
        return every


def parallel_of(
    config: TrainConfig | EvalConfig, machine: Machine, processes: Launched
) -> Parallel:
    """Return the `processes` of a run on this `machine`, which have met.

    Raises ValueError on rank 0 if a process is missing or cannot take part.
    """
    device, problem, meeting = "cpu", "", None
    try:
        device = machine.device_for(config.device, config.precision)
        too_many = (
            f"devices={processes.local_ranks}: torch finds {machine.gpus} GPUs on this machine;"
            " use as many, see CUDA_VISIBLE_DEVICES, and let each task see all GPUs of its node"
            " (srun --gpus-per-node=N --gpu-bind=none)"
        )
        refuse((device == "cuda" and processes.local_ranks > machine.gpus, too_many))
    except ValueError as error:
        # Processes that a supervisor has started have the same problem, and need not meet
        if processes.ranks == 1 or processes.by == OWN:
            raise
        problem = str(error)
    if processes.ranks > 1:
        host, computes_on = socket.gethostname(), f"{device} with torch {torch.__version__}"
        here = Arrival(processes.rank, os.getpid(), host, computes_on, problem)
        meeting = Meeting(processes, here)
    return Parallel.of(config, device, processes, meeting)
