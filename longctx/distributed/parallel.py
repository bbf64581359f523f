"""The processes of a run: the mesh they form, what is added up over it, and which of them writes.

The only file that knows how a run is spread over devices. Lightning Fabric starts the processes
(`python train.py devices=4`) or finds them (torchrun, srun) and gives each its device, precision
and gradient averaging. Everything else asks this object, on one device too.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from lightning.fabric.plugins.environments import (
    ClusterEnvironment,
    LightningEnvironment,
    SLURMEnvironment,
    TorchElasticEnvironment,
)
from lightning.fabric.strategies import DDPStrategy, SingleDeviceStrategy
from lightning.fabric.strategies.launchers import subprocess_script
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from longctx.attention.context_parallel import Context
from longctx.config.eval_config import EvalConfig
from longctx.config.model_config import AttentionConfig
from longctx.config.train_config import TrainConfig
from longctx.distributed import sharding
from longctx.distributed.heartbeat import Heartbeat
from longctx.model import GPT
from longctx.planner.hardware import Machine
from longctx.planner.workload import PRECISION

T = TypeVar("T")
RUN_VARIABLE = "LONGCTX_RUN"  # the run's folder, for what is said about a process that is lost
LIGHTNING_PRECISION = {"bf16": "bf16-mixed", "fp32": "32-true"}


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
        self.environment, self.ranks, self.local_ranks = processes(config)
        self.config = replace(config, devices=self.ranks)
        config.context.validate(self.ranks)
        if device == "cuda" and self.local_ranks > machine.gpus:
            there = f"there {'is' if machine.gpus == 1 else 'are'} {machine.gpus} here"
            raise ValueError(f"devices={self.local_ranks}: {there}")
        self.data_ranks = self.ranks
        self.strategy = "none"
        # Evaluation computes no gradients, whose order of sums is all that is not deterministic.
        self.deterministic = isinstance(config, TrainConfig) and config.deterministic
        precision = PRECISION[device] if config.precision == "auto" else config.precision
        self.dtype = torch.bfloat16 if precision == "bf16" else torch.float32
        several = self.ranks > 1 or config.strategy.name != "auto"
        self.fabric = Fabric(
            accelerator="gpu" if device == "cuda" else "cpu",
            devices=self.local_ranks,
            num_nodes=self.ranks // self.local_ranks,
            strategy=launcher(several, device),
            precision=LIGHTNING_PRECISION[precision],  # type: ignore[arg-type]
            plugins=[self.environment],
        )
        self.mesh: DeviceMesh | None = None
        self.context = Context()
        self.heartbeat: Heartbeat | None = None

    @property
    def rank(self) -> int:
        """This process's number among those of the run."""
        return rank_of(self.environment)

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

    def launch(self, folder: str) -> None:
        """Start the other processes of the run in `folder`, or join those of a launcher."""
        quiet_lightning()
        os.environ[RUN_VARIABLE] = folder
        if self.deterministic:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
            torch.use_deterministic_algorithms(True)
            torch.backends.cudnn.benchmark = False
            # A debugging aid, of which every allocation pays: our kernels write what they allocate.
            torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        self.fabric.launch()
        if self.ranks > 1:
            self.heartbeat = Heartbeat(self.rank, self.ranks, self.share, self.give_up)

    def give_up(self, problem: str, says: bool) -> None:
        """End this process at once, whatever it waits for, and those that it has started."""
        if says:
            print(f"error: {problem}, and the run with it{remedy()}", file=sys.stderr, flush=True)
        self.kill_others()
        os._exit(1)

    def fail(self, problem: str) -> None:
        """Make the other processes end too: this one does, because of `problem`."""
        if self.heartbeat is not None:
            self.heartbeat.fail(problem)
        self.kill_others()

    def form(self, workload: Layout, folder: str) -> None:
        """Form the mesh of the launched processes as `workload` shares rows and weights over it."""
        os.environ[RUN_VARIABLE] = folder
        self.strategy, self.data_ranks = workload.strategy, workload.data_ranks
        if dist.is_initialized():
            self.mesh = init_device_mesh(
                self.device.type,
                (workload.data_ranks, workload.context),
                mesh_dim_names=("data", "context"),
            )
            if workload.context > 1:
                self.context = Context(self.mesh.get_group("context"))

    def share(self, plain: T) -> T:
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

    def prepare(self, module: nn.Module) -> Any:
        """`module` such that `backward` gives every rank the gradients of all of them."""
        return module if self.strategy == "fsdp" else self.fabric.setup_module(module)

    def autocast(self) -> AbstractContextManager[None]:
        """The precision of the run, around forward and backward of a step."""
        context: AbstractContextManager[None] = self.fabric.autocast()
        return context

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of `loss` to those of the step."""
        self.fabric.backward(loss)

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
        total = torch.full((), float(self.once(scored)), device=self.device)
        return self.ranks / self.sum(total).clamp(min=1.0)

    def once(self, count: int) -> int:
        """`count`, of whole rows, on one of the ranks that share them, and 0 on the others."""
        return count if self.context.rank == 0 else 0

    def sum(self, x: Tensor) -> Tensor:
        """`x` added up over all ranks, in place."""
        if self.ranks > 1:
            dist.all_reduce(x)
        return x

    def gathered_rows(self, x: Tensor) -> Tensor:
        """The rows x (B, ...) of every data rank, in their order: (data ranks · B, ...)."""
        if self.data_ranks == 1:
            return x
        assert self.mesh is not None
        parts = [torch.empty_like(x) for _ in range(self.data_ranks)]
        dist.all_gather(parts, x.contiguous(), group=self.mesh.get_group("data"))
        return torch.cat(parts)

    def max(self, number: int) -> int:
        """The largest `number` of any rank."""
        if self.ranks == 1:
            return number
        largest = torch.tensor(number, device=self.device)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        return int(largest)

    def first_problem(self, problem: str | None) -> str | None:
        """Wait for all ranks; the `problem` of the first that has one, told to all of them."""
        if self.ranks == 1:
            return problem
        problems: list[str | None] = [None] * self.ranks
        dist.all_gather_object(problems, problem)
        return next((x for x in problems if x is not None), None)

    def barrier(self) -> None:
        """Wait until every rank is here."""
        self.fabric.barrier()

    def leave(self) -> None:
        """Part from the other processes, while all are there: gloo's threads outlive no exit."""
        if self.heartbeat is not None:
            self.heartbeat.stop()
        if dist.is_available() and dist.is_initialized():
            dist.barrier()
            dist.destroy_process_group()

    def is_lost_connection(self, error: BaseException) -> bool:
        """Whether another process went away inside a collective; gloo has no exception for that."""
        return self.ranks > 1 and (
            isinstance(error, dist.DistError) or "gloo/transport" in str(error)
        )

    def kill_others(self) -> None:
        """End the processes that this one has started, which may wait in a collective."""
        for process in getattr(self.fabric.strategy.launcher, "procs", []):
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)


def processes(config: TrainConfig | EvalConfig) -> tuple[ClusterEnvironment, int, int]:
    """Who starts the processes of a run, how many there are in all, and how many on this machine.

    ValueError where devices= asks for another number than torchrun or srun has started.
    """
    if TorchElasticEnvironment.detect():
        environment: ClusterEnvironment = TorchElasticEnvironment()
        launcher, local = "torchrun", int(os.environ["LOCAL_WORLD_SIZE"])
    elif SLURMEnvironment.detect() and int(os.environ.get("SLURM_NTASKS", "1")) > 1:
        environment = SLURMEnvironment()
        nodes = int(os.environ.get("SLURM_NNODES", "1"))
        launcher, local = "srun", environment.world_size() // nodes
    else:
        return LightningEnvironment(), config.devices, config.devices
    ranks = environment.world_size()
    if config.devices not in (1, ranks):
        raise ValueError(
            f"devices={config.devices}: {launcher} has started {ranks} processes; leave devices "
            "out, or start as many"
        )
    return environment, ranks, local


def rank_of(environment: ClusterEnvironment) -> int:
    """This process's number, which Lightning's own launcher knows by its number on the machine."""
    if isinstance(environment, LightningEnvironment):
        return environment.local_rank()
    return environment.global_rank()


def launcher(several: bool, device: str) -> Any:
    """Lightning's strategy that starts the processes of the run, and wraps its model under ddp."""
    if several:
        return DDPStrategy(broadcast_buffers=False, gradient_as_bucket_view=True)
    return SingleDeviceStrategy(device="cuda:0" if device == "cuda" else "cpu")


def go_on() -> str:
    """How the run that this process belongs to goes on."""
    return f"python train.py resume={os.environ.get(RUN_VARIABLE) or 'runs/NAME'} goes on"


def remedy() -> str:
    """How what a lost process has ended goes on; nothing of an evaluation, which has no folder."""
    return f"; {go_on()}" if os.environ.get(RUN_VARIABLE) else ""


class LostProcess(logging.Handler):
    """Says which of a run's processes is gone, which Lightning notes before it kills the others."""

    def emit(self, record: logging.LogRecord) -> None:
        what = record.getMessage().partition(". ")[0]
        print(f"error: {what}, and the run with it{remedy()}", file=sys.stderr, flush=True)


def quiet_lightning() -> None:
    """Silence advice that does not apply: own loggers, checkpoints and choice of workers."""
    for name in ("lightning.pytorch", "lightning.fabric", "lightning"):
        logging.getLogger(name).setLevel(logging.ERROR)
    launcher = logging.getLogger(subprocess_script.__name__)
    if not any(isinstance(handler, LostProcess) for handler in launcher.handlers):
        launcher.addHandler(LostProcess())
    launcher.setLevel(logging.INFO)
    launcher.propagate = False
    warnings.filterwarnings("ignore", module=r"lightning\..*")
    warnings.filterwarnings(
        "ignore", message=r".*(does not have many workers|LeafSpec|pkg_resources).*"
    )
