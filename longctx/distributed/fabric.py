"""What Lightning Fabric is told of a run: its processes, device and precision, and who starts the
processes.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from typing import Any

from longctx.distributed.launched import OWN, Launched
from longctx.distributed.lightning_parts import (
    DDPStrategy,
    Fabric,
    LightningEnvironment,
    _set_num_threads_if_needed,
    _SubprocessScriptLauncher,
)

# fp8: layers make their products in FP8 themselves, see longctx.model.fp8
PRECISIONS = {"bf16": "bf16-mixed", "fp8": "bf16-mixed", "fp32": "32-true"}


class Processes(LightningEnvironment):
    """What Lightning is told of the processes of a run."""

    def __init__(self, launched: Launched) -> None:
        super().__init__()
        self.launched = launched

    @property
    def creates_processes_externally(self) -> bool:
        return self.launched.by != OWN or self.launched.rank > 0

    @property
    def main_address(self) -> str:
        return self.launched.address

    @property
    def main_port(self) -> int:
        return super().main_port if self.launched.port is None else self.launched.port

    def world_size(self) -> int:
        return self.launched.ranks

    def global_rank(self) -> int:
        return self.launched.rank

    def local_rank(self) -> int:
        return self.launched.local_rank

    def node_rank(self) -> int:
        return self.launched.rank // self.launched.local_ranks


class Met(DDPStrategy):
    """Lightning's DDP, whose process group is formed once `ready` returns."""

    def __init__(self, ready: Callable[[], None], **options: Any) -> None:
        super().__init__(**options)
        self.ready = ready

    def setup_environment(self) -> None:
        self.ready()
        super().setup_environment()

    def _configure_launcher(self) -> None:
        assert self.cluster_environment is not None
        self._launcher = Starter(self.cluster_environment, self.num_processes, self.num_nodes)


class Starter(_SubprocessScriptLauncher):
    """Lightning's launcher without the thread that kills all processes, the first one too, where
    one has ended: they watch one another (heartbeat.py).
    """

    def launch(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not self.cluster_environment.creates_processes_externally:
            self._call_children_scripts()
        _set_num_threads_if_needed(num_processes=self.num_processes)
        return function(*args, **kwargs)


def make_fabric(environment: Processes, strategy: Any, device: str, precision: str) -> Fabric:
    """Lightning's Fabric on "cuda" or "cpu" in "bf16", "fp8" or "fp32"."""
    quiet_lightning()
    return Fabric(
        accelerator="gpu" if device == "cuda" else "cpu",
        devices=environment.launched.local_ranks,
        num_nodes=environment.launched.nodes,
        strategy=strategy,
        precision=PRECISIONS[precision],  # type: ignore[arg-type]
        plugins=[environment],
    )


def quiet_lightning() -> None:
    """Silence advice that does not apply: own loggers, checkpoints and choice of workers."""
    for name in ("lightning.pytorch", "lightning.fabric", "lightning"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module=r"lightning\..*")
    warnings.filterwarnings(
        "ignore", message=r".*(does not have many workers|LeafSpec|pkg_resources).*"
    )
    # DDP keeps the nodes of its first stream; gradients wait for one another as they should.
    warnings.filterwarnings("ignore", message="The AccumulateGrad node's stream does not match")
