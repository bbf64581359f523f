"""What this machine has to compute with, which kind of it a command takes, whether the attention
that is asked for runs there, and memory that runs out.
"""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from longctx import attention
from longctx.attention import Mask
from longctx.config.eval_config import EvalConfig
from longctx.config.generate_config import GenerateConfig
from longctx.config.model_config import GPTConfig
from longctx.config.train_config import TrainConfig
from longctx.planner import hardware
from longctx.planner.hardware import Machine
from longctx.planner.workload import precision_of


def this_machine() -> Machine:
    """The machine as torch sees it from this process."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not gpus:
        return Machine(0, None, False, hardware.host_memory())
    eight_bits = torch.version.hip is None and torch.cuda.get_device_capability() >= (8, 9)
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    gpu = hardware.chip(properties.name, float(properties.total_memory))
    bf16 = torch.cuda.is_bf16_supported()
    return Machine(gpus, gpu, bf16, hardware.host_memory(), fp8=eight_bits)


def dtype_of(precision: str) -> torch.dtype:
    """The dtype of activations in "bf16", "fp8" or "fp32"."""
    return torch.float32 if precision == "fp32" else torch.bfloat16


def choose_device(config: TrainConfig | EvalConfig | GenerateConfig, machine: Machine) -> str:
    """ "cuda" or "cpu"; ValueError for a GPU that is asked for and not there, or lacks bf16."""
    if config.device == "cuda" and not machine.gpus:
        raise ValueError(hardware.NO_GPU)
    if config.device == "cpu" or not machine.gpus:
        if config.precision == "fp8":
            raise ValueError(hardware.without_fp8("a CPU"))
        return "cpu"
    if not machine.bf16 and config.precision in ("auto", "bf16"):
        name = machine.gpu.name if machine.gpu else "this GPU"
        raise ValueError(f"precision=bf16: {name} has no bf16; use precision=fp32")
    if config.precision == "fp8" and not machine.fp8:
        raise ValueError(hardware.without_fp8(machine.gpu.name if machine.gpu else "this GPU"))
    return "cuda"


def check_attention(config: TrainConfig | EvalConfig, model: GPTConfig, device: str) -> None:
    """Raise ValueError, saying what to use instead, where the backend cannot run as asked."""
    shard, sharing = None, config.context
    if sharing.degree not in (1, "auto") and sharing.method_for(model.heads) == "allgather":
        shard = Mask("intervals")  # the queries of a rank see any of them
    attention.check(
        config.attention.backend,
        device=device,
        dtype=dtype_of(precision_of(config.precision, device)),
        mask=shard,
        options=config.attention.options,
        deterministic=isinstance(config, TrainConfig) and config.deterministic,
        **model.block(0).attention.required(),
    )


@contextmanager
def within_memory(device: str) -> Iterator[None]:
    """On a CPU, refuse memory that the machine does not have when it is asked for, while that can
    be said; else the kernel grants it, and kills some process once it is used. A tenth is left to
    everything else.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    if device == "cpu":
        most = int(hardware.host_memory()) // 10 * 9
        resource.setrlimit(
            resource.RLIMIT_DATA,
            (most if soft == resource.RLIM_INFINITY else min(soft, most), hard),
        )
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out, on a GPU or the CPU, for which torch has no exception."""
    return isinstance(
        error, torch.OutOfMemoryError | MemoryError
    ) or "can't allocate memory" in str(error)
