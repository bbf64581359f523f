"""The processes of a run: the mesh they form, what is added up over it, and which of them writes.

The only file that knows how a run is spread over devices. Lightning Fabric starts the processes
(`python train.py devices=4`) or finds them (torchrun, srun) and gives each its device, precision
and gradient averaging. Everything else asks this object, on one device too.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from copy import copy
from dataclasses import replace
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from longctx.attention import communication
from longctx.attention.communication import Clock, measured
from longctx.attention.context_parallel import Context
from longctx.attention.description import AttentionConfig
from longctx.config.eval_config import EvalConfig
from longctx.config.train_config import TrainConfig
from longctx.distributed import rendezvous, sharding
from longctx.distributed.devices import choose_device, dtype_of
from longctx.distributed.fabric import Met, Processes, make_fabric
from longctx.distributed.heartbeat import EVERY, RUN_VARIABLE, SILENCE, Heartbeat
from longctx.distributed.launched import FIRST_VARIABLE, OWN, OWN_VARIABLE, launched
from longctx.distributed.lightning_parts import DDPStrategy, SingleDeviceStrategy
from longctx.model import GPT
from longctx.planner.hardware import Machine
from longctx.planner.workload import precision_of
from longctx.stop_signal import exit_within

T = TypeVar("T")
EXIT = 20.0  # seconds that a process that has failed may take to exit
LAST = 16  # weights, of the embedding and the first block, among which is the last with a gradient


class Layout(Protocol):
    """What decides how the processes share rows and weights, of a workload or an evaluation."""

    @property
    def strategy(self) -> str: ...  # none | ddp | fsdp
    @property
    def data_ranks(self) -> int: ...  # groups of devices that take rows of their own
    @property
    def context(self) -> int: ...  # devices that share each row
    @property
    def context_method(self) -> str: ...  # ulysses | allgather
    @property
    def attention(self) -> AttentionConfig: ...


class Parallel:
    """The processes of one run; this one is number `rank` of `ranks`, on `device`.

    The mesh is (data, context): every data rank takes its own rows, and the context ranks of one
    data rank share each of them. Make it, decide what is to be run on the first rank, then
    `launch`.
    """

    def __init__(self, config: TrainConfig | EvalConfig, device: str, machine: Machine) -> None:
        self.launched = launched(config)
        self.environment = Processes(self.launched)
        self.asked, self.machine = config, machine
        self.ranks, self.rank = self.launched.ranks, self.launched.rank
        if device == "cuda" and self.launched.local_ranks > machine.gpus:
            raise ValueError(rendezvous.too_few_gpus(config, self.launched, machine))
        self.data_ranks = self.ranks
        self.strategy = "none"
        # Evaluation computes no gradients, whose order of sums is all that is not deterministic.
        if isinstance(config, TrainConfig) and config.deterministic:
            use_deterministic_algorithms()  # before anything runs: kernel.lock names its kernels
        precision = precision_of(config.precision, device)
        self.dtype = dtype_of(precision)
        # Lightning's: it starts the processes of the run, and wraps its model under ddp
        strategy: Any
        if self.ranks > 1 or config.strategy.name != "auto":
            strategy = Met(self._ready, broadcast_buffers=False, gradient_as_bucket_view=True)
        else:
            strategy = SingleDeviceStrategy(device="cuda:0" if device == "cuda" else "cpu")
        self.fabric = make_fabric(self.environment, strategy, device, precision)
        self.mesh: DeviceMesh | None = None
        self.context = Context()
        self.heartbeat: Heartbeat | None = None
        self.has_failed = False
        self.clock: Clock | None = None  # of the time in collectives

    @property
    def data_rank(self) -> int:
        """The number of this process's rows: those that share rows have the same."""
        return self.rank // (self.ranks // self.data_ranks)

    @property
    def is_first(self) -> bool:
        """Whether this process decides, writes and prints for the run."""
        return self.rank == 0

    @property
    def device(self) -> torch.device:
        """What this process computes on."""
        device: torch.device = self.fabric.device
        return device

    def meet(self) -> None:
        """Wait until all processes of the run are here; they watch one another from then on.

        Raises ValueError, one line, where one is missing or they do not fit together.
        """
        if self.ranks == 1 or self.heartbeat is not None:
            return
        here = rendezvous.arrival(self.launched, self.device.type, self.machine.gpus)
        place = replace(self.launched, port=self.environment.main_port)
        meeting = rendezvous.meet(self.asked, place, here, self.ended)
        processes = meeting.processes()
        self.heartbeat = Heartbeat(
            meeting.store, self.rank, processes, self.give_up, self.how_ended
        )

    def launch(self, folder: str) -> None:
        """Start the other processes of the run in `folder`, or join those of a launcher, once the
        first process has decided what is to be run.
        """
        os.environ[RUN_VARIABLE] = folder
        if self.launched.by == OWN and self.ranks > 1:
            os.environ[OWN_VARIABLE] = str(self.ranks)
            if self.launched.rank == 0:
                os.environ[FIRST_VARIABLE] = str(os.getpid())
        try:
            self.fabric.launch()
        except BaseException:
            self.kill_others()
            raise

    def ended(self) -> str | None:
        """What became of a process that this one has started and that has ended."""
        for rank, process in enumerate(self.started, start=1):
            if how := self.how_ended(rank):
                return f"process {rank} of {self.ranks} (PID {process.pid}) {how}"
        return None

    def how_ended(self, rank: int) -> str | None:
        """How process `rank` has ended, where this one has started it and it runs no more."""
        started = [None, *self.started]  # nobody of a launcher's, and never the first
        process = started[rank] if rank < len(started) else None
        if process is None or (code := process.poll()) is None:
            return None
        return f"has ended with {signal.Signals(-code).name if code < 0 else f'exit code {code}'}"

    def give_up(self, problem: str, says: bool, code: int) -> None:
        """End this process at once, whatever it waits for, and those that it has started."""
        if says:
            print(f"error: {problem}", file=sys.stderr, flush=True)
            time.sleep(0.5)  # for the one that failed to hear so: the store goes with the first
        self.kill_others()
        os._exit(code)

    def fail(self, problem: str, code: int = 1) -> None:
        """Tell the other processes that this one ends because of `problem`, so that they end too.

        Only the first call counts. The first process has printed its problem; that of another one
        it prints, if it can. What all have at the same time, such as a loss that is no number, only
        the first one prints.
        """
        if self.has_failed:
            return
        self.has_failed = True
        if self.heartbeat is not None:
            if not self.is_first:
                time.sleep(2 * EVERY)  # where the first one has failed too, its word ends this one
            if not self.heartbeat.fail(problem, code) and not self.is_first:
                print(f"error: {problem}", file=sys.stderr, flush=True)
            exit_within(EXIT, code)
        self.kill_others()

    def init_mesh(self, workload: Layout, folder: str) -> None:
        """Form the mesh of the launched processes as `workload` shares rows and weights over it."""
        os.environ[RUN_VARIABLE] = folder
        self.strategy, self.data_ranks = workload.strategy, workload.data_ranks
        if self.ranks > 1:
            self.clock = Clock(self.device)
            communication.start(self.clock)
        if dist.is_initialized():
            self.mesh = init_device_mesh(
                self.device.type,
                (workload.data_ranks, workload.context),
                mesh_dim_names=("data", "context"),
            )
            if workload.context > 1:
                group = self.mesh.get_group("context")
                fetches_windows = workload.attention.description.takes_intervals
                self.context = Context(group, workload.context_method, fetches_windows)

    def in_fp32(self) -> Parallel:
        """The same processes, launched and with their mesh, in fp32."""
        other = copy(self)
        other.dtype = torch.float32
        other.environment = Processes(replace(self.launched, by="the run"))  # starts no others
        strategy = DDPStrategy(broadcast_buffers=False, gradient_as_bucket_view=True)
        other.fabric = make_fabric(other.environment, strategy, self.device.type, "fp32")
        other.fabric.launch()
        return other

    def alone(self) -> Parallel:
        """This process as the one rank of a run, which talks to no other."""
        other = copy(self)
        one = replace(self.launched, ranks=1, local_ranks=1, rank=0, local_rank=0)
        other.launched, other.environment = one, Processes(one)
        other.rank, other.ranks, other.data_ranks, other.strategy = 0, 1, 1, "none"
        other.mesh, other.context, other.heartbeat, other.clock = None, Context(), None, None
        precision = "bf16" if self.dtype == torch.bfloat16 else "fp32"
        single = SingleDeviceStrategy(device=self.device)
        other.fabric = make_fabric(other.environment, single, self.device.type, precision)
        return other

    def broadcast(self, plain: T) -> T:
        """What the first rank has for `plain`, a value that JSON can hold, on every rank."""
        if self.ranks == 1:
            return plain
        text = self.fabric.broadcast(json.dumps(plain), src=0)
        shared: T = json.loads(text)
        return shared

    def build(self, make: Callable[[], None]) -> None:
        """Call `make` so that the parameters that it creates are on this process's device."""
        with self.fabric.init_module():
            make()

    def shard(self, model: GPT, cast: bool = True) -> None:
        """Spread the weights of `model`, which hold nothing yet, over all ranks if that is asked
        for. Blocks compute with weights in the precision of the run if `cast`, else as they are.
        """
        if self.strategy == "fsdp":
            ranks = init_device_mesh(self.device.type, (self.ranks,))
            sharding.shard(model, ranks, self.dtype if cast else None)
            sharding.measure_waits()

    def prepare(self, module: nn.Module) -> Any:
        """`module` such that `backward` gives every rank the gradients of all of them."""
        if self.strategy == "fsdp":
            return module
        if self.clock is not None:  # after the last gradient, backward waits for the other ranks
            weights = [p for p in module.parameters() if p.requires_grad]
            for weight in weights[:LAST]:
                weight.register_post_accumulate_grad_hook(self.clock.mark)
        return self.fabric.setup_module(module)

    def autocast(self) -> AbstractContextManager[None]:
        """The precision of the run, around forward and backward of a step."""
        context: AbstractContextManager[None] = self.fabric.autocast()
        return context

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of `loss` to those of the step."""
        self.fabric.backward(loss)
        if self.clock is not None:
            self.clock.until_now()

    def accumulates(self, module: Any, last: bool) -> AbstractContextManager[None]:
        """Around forward and backward of a micro-batch: gradients stay on their rank until the
        last.
        """
        if last or self.strategy != "ddp":
            return nullcontext()
        context: AbstractContextManager[None] = self.fabric.no_backward_sync(module)
        return context

    def loss_weight(self, scored: int) -> Tensor:
        """What each scored token's loss counts in the step, where this rank's rows have `scored`.

        () float32 on the device: the number of ranks, over which gradients are averaged, divided by
        the scored tokens of all ranks.
        """
        total = torch.full((), float(self.counted_once(scored)), device=self.device)
        return self.ranks / self.all_reduce_sum(total).clamp(min=1.0)

    def counted_once(self, count: int) -> int:
        """`count`, of whole rows, on one of the ranks that share them, and 0 on the others."""
        return count if self.context.ranks.rank == 0 else 0

    def all_reduce_sum(self, x: Tensor) -> Tensor:
        """`x` added up over all ranks, in place."""
        if self.ranks > 1:
            with measured():
                dist.all_reduce(x)
        return x

    def all_gather_rows(self, x: Tensor) -> Tensor:
        """The rows x (B, ...) of every data rank, in their order: (data ranks · B, ...)."""
        if self.data_ranks == 1:
            return x
        assert self.mesh is not None
        parts = [torch.empty_like(x) for _ in range(self.data_ranks)]
        dist.all_gather(parts, x.contiguous(), group=self.mesh.get_group("data"))
        return torch.cat(parts)

    def all_gather_numbers(self, numbers: list[float]) -> list[list[float]]:
        """The `numbers` of every rank, in order."""
        mine = torch.tensor(numbers, dtype=torch.float64, device=self.device)
        if self.ranks == 1:
            return [mine.tolist()]
        of_ranks = [torch.empty_like(mine) for _ in range(self.ranks)]
        dist.all_gather(of_ranks, mine)
        return [of_rank.tolist() for of_rank in of_ranks]

    def max(self, number: int) -> int:
        """The largest `number` of any rank."""
        if self.ranks == 1:  # which waits for no device
            return number
        return int(self.all_reduce_max(torch.tensor(number, device=self.device)))

    def all_reduce_max(self, x: Tensor) -> Tensor:
        """The largest of each value of `x` of any rank, in place."""
        if self.ranks > 1:
            with measured():
                dist.all_reduce(x, op=dist.ReduceOp.MAX)
        return x

    def all_gather_objects(self, x: T) -> list[T]:
        """What each rank has for `x`, in their order."""
        every: list[Any] = [x]
        if self.ranks > 1:
            every = [None] * self.ranks
            dist.all_gather_object(every, x)
        return every

    def first_problem(self, problem: str | None) -> str | None:
        """Wait for all ranks; the `problem` of the first that has one, told to all of them."""
        return next((x for x in self.all_gather_objects(problem) if x is not None), None)

    def barrier(self) -> None:
        """Wait until every rank is here."""
        self.fabric.barrier()

    def shut_down(self) -> None:
        """Part from the other processes, while all are there: gloo's threads outlive no exit."""
        if self.heartbeat is not None:
            self.heartbeat.stop()
        if dist.is_initialized():
            dist.barrier()
            dist.destroy_process_group()

    def is_lost_connection(self, error: BaseException) -> bool:
        """Whether another process went away inside a collective; gloo has no exception for that.

        If so, it waits until the process's watch has named it, which ends this process.
        """
        lost = self.ranks > 1 and (
            isinstance(error, dist.DistError) or "gloo/transport" in str(error)
        )
        if lost and self.heartbeat is not None and self.heartbeat.is_watching:
            time.sleep(SILENCE + 5)
        return lost

    def abandon(self) -> None:
        """Part from the other processes without a word, since a signal ends this one."""
        if self.heartbeat is not None:
            self.heartbeat.stopped.set()
        self.kill_others()

    @property
    def started(self) -> list[subprocess.Popen[bytes]]:
        """The processes that this one has started."""
        return getattr(self.fabric.strategy.launcher, "procs", [])

    def kill_others(self) -> None:
        """End the processes that this one has started, which may wait in a collective."""
        for process in self.started:
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)

    def _ready(self) -> None:
        """All processes are here, and the first one has decided what is to be run."""
        self.meet()
        if self.heartbeat is not None:
            self.heartbeat.decided(self.is_first)


def parallel_of(config: TrainConfig | EvalConfig, machine: Machine) -> Parallel:
    """The processes that `config` asks for; those of a launcher have met.

    Raises ValueError where this one cannot be among them; the others are told why.
    """
    try:
        parallel = Parallel(config, choose_device(config, machine), machine)
    except ValueError as error:
        rendezvous.refuse(launched(config), str(error))
        raise
    if parallel.launched.by != OWN:
        parallel.meet()
    return parallel


def use_deterministic_algorithms() -> None:
    """Have torch compute the same bits in every run."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    # A debugging aid, of which every allocation pays: our kernels write what they allocate.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
