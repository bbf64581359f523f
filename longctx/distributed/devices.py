"""What this machine has to compute with, and which kind of it a command takes."""

from __future__ import annotations

import torch

from longctx.config.eval_config import EvalConfig
from longctx.config.generate_config import GenerateConfig
from longctx.config.train_config import TrainConfig
from longctx.planner import hardware
from longctx.planner.hardware import Machine


def this_machine() -> Machine:
    """The machine as torch sees it from this process."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not gpus:
        return Machine(0, None, False, hardware.host_memory())
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    gpu = hardware.chip(properties.name, float(properties.total_memory))
    return Machine(gpus, gpu, torch.cuda.is_bf16_supported(), hardware.host_memory())


def dtype_of(precision: str) -> torch.dtype:
    """The dtype in which "bf16" or "fp32" computes products."""
    return torch.bfloat16 if precision == "bf16" else torch.float32


def choose_device(config: TrainConfig | EvalConfig | GenerateConfig, machine: Machine) -> str:
    """ "cuda" or "cpu"; ValueError for a GPU that is asked for and not there, or lacks bf16."""
    if config.device == "cuda" and not machine.gpus:
        raise ValueError(hardware.NO_GPU)
    if config.device == "cpu" or not machine.gpus:
        return "cpu"
    if not machine.bf16 and config.precision in ("auto", "bf16"):
        name = machine.gpu.name if machine.gpu else "this GPU"
        raise ValueError(f"precision=bf16: {name} has no bf16; use precision=fp32")
    return "cuda"
