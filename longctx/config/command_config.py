"""The options of the smaller commands, a dataclass for each. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass

from longctx.config.data_config import DataConfig
from longctx.config.fields import check, group, key

SIZES = (1, 2**24)  # of tokens and of a head


@dataclass
class DescribeConfig:
    """Which documents to describe; `data` has the keys that train.py has."""

    seq_len: int = key(4096, "tokens in a sequence", between=(2, 2**31 - 1))
    out: str | None = key(None, "picture of the document lengths, such as lengths.png; null: none")
    data: DataConfig = group(DataConfig)

    def validate(self) -> None:
        """Raise ValueError for the first key that cannot be right, before anything is read."""
        check(self)
        if self.out == "":
            raise ValueError("out= names no picture; give a file, or out=null for none")


@dataclass
class PlanOptions:
    """The machine to plan for; every key of train may follow."""

    gpu: str = key("auto", "such as H100; auto: the one here, else an H200")
    gpu_memory: str = key("auto", "GiB of it, such as 80; auto: the GPU's")
    host_memory: str = key(
        "auto", "GiB of host memory; auto: this machine's, or 128 for each GPU if gpu= is not here"
    )
    gpus_per_machine: int = key(
        8, "beyond them, GPUs reach each other by network", between=(1, 4096)
    )
    network: float = key(400.0, "Gbit/s from each GPU to other machines", between=(1.0, 1e5))
    backends: tuple[str, ...] = key(("naive", "sdpa", "flash"), "attention backends")


@dataclass
class CompareOptions:
    """Runs to compare."""

    runs: list[str] = key([], "folders of runs, such as runs/*", positional=True)
    out: str = key("compare.html", "page with their curves; needs no network")


@dataclass
class WatchOptions:
    """The run to follow."""

    run: str = key("", "the folder of one run, such as runs/NAME", positional=True)


@dataclass
class DashboardOptions:
    """The project at wandb that gets a workspace."""

    project: str = key("", "the project at wandb, such as longctx")
    entity: str | None = key(None, "team or user; null: your default")
    name: str = key("longctx", "name of the workspace")
    dry_run: bool = key(False, "print what the workspace would show, and send nothing")

    def validate(self) -> None:
        """Raise ValueError if no project is given."""
        if not self.project:
            raise ValueError("project is not set; give the project at wandb, as in project=longctx")


@dataclass
class ExportOptions:
    """The run to export, and the form of the export."""

    run: str = key(
        "", "a run, of which the newest checkpoint is taken, or a checkpoint", positional=True
    )
    out: str = key("", "a new folder, or an empty one", positional=True)
    dtype: str | None = key(
        None,
        "of the weights, bf16 and fp16 have half the size; null: as they were trained, in fp32, or "
        "with LoRA as those of init",
        choices=("fp32", "bf16", "fp16"),
    )
    shard_gb: float = key(
        5.0, "largest size of one file of weights, in 10^9 bytes", between=(1e-9, 1e9)
    )
    adapter: bool = key(
        False,
        "of a run with LoRA: write its adapter alone, for peft; false: merge it into the weights",
    )


@dataclass
class ShowOptions:
    """The kernel to show."""

    kernel: str = key(
        "auto",
        "auto: what training takes | portable | hopper; a CPU has one of its own",
        choices=("auto", "portable", "hopper"),
    )
    head_size: int = key(64, "size of a head", between=(16, 256))
    seq_len: int = key(4096, "tokens in a sequence", between=SIZES)
    dtype: str = key(
        "auto",
        "auto: bf16 on a GPU, fp32 on a CPU | bf16 | fp16 | fp32",
        choices=("auto", "bf16", "fp16", "fp32"),
    )
