"""The devices of this machine, the attention that they can run, and limits of their memory."""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace

import torch

from longctx import attention
from longctx.attention import Mask
from longctx.attention.description import DESCRIPTIONS, AttentionConfig
from longctx.config.eval_config import EvalConfig
from longctx.config.train_config import TrainConfig
from longctx.model.mixers import description as mixers
from longctx.spec import hardware
from longctx.spec.hardware import Machine
from longctx.spec.model_config import GPTConfig
from longctx.spec.step import precision_of


def this_machine() -> Machine:
    """Return the machine as torch sees it from this process."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not gpus:
        return Machine(0, None, hardware.host_memory())
    eight_bits = torch.version.hip is None and torch.cuda.get_device_capability() >= (8, 9)
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    gpu = hardware.chip(properties.name, float(properties.total_memory))
    gpu = replace(gpu, fp8=eight_bits, bf16=torch.cuda.is_bf16_supported())
    return Machine(gpus, gpu, hardware.host_memory())


def dtype_of(precision: str) -> torch.dtype:
    """Return the dtype of activations in "bf16", "fp8" or "fp32"."""
    return torch.float32 if precision == "fp32" else torch.bfloat16


def check_attention(config: TrainConfig | EvalConfig, model: GPTConfig, device: str) -> None:
    """Raise ValueError with an alternative if the backend cannot run as asked."""
    shard, sharing, variant = None, config.context, config.attention.variant
    # A variant may know its heads by their numbers
    needed = "context=1" if config.devices > 1 and sharing.degree != 1 else ""
    if isinstance(config, TrainConfig) and config.memory.heads_at_once:
        needed = "memory.heads_at_once=0"
    if variant and needed:
        raise ValueError(f"{variant} is not exact: its heads are computed together; give {needed}")
    mixers.check(model, config.attention, device, sharing.degree, sharing.method)
    if sharing.degree not in (1, "auto") and sharing.method_for(model.heads) == "allgather":
        # A rank's queries see arbitrary intervals of keys
        shard = Mask("intervals")
    mixers.check_windows(model, config.attention.window)
    for chosen in config.attention.each:
        attention.check(
            chosen.backend,
            device=device,
            dtype=dtype_of(precision_of(config.precision, device)),
            mask=shard,
            options=chosen.options,
            deterministic=isinstance(config, TrainConfig) and config.deterministic,
            **model.largest_attention.required(isinstance(config, TrainConfig)),
        )


def able_backends(config: TrainConfig | EvalConfig, model: GPTConfig, device: str) -> list[str]:
    """Return the backends that are exact and can compute `config` on `device`."""
    able = []
    for name in (name for name, description in DESCRIPTIONS.items() if description.exact):
        with suppress(ValueError):
            check_attention(replace(config, attention=AttentionConfig(name)), model, device)
            able.append(name)
    return able


@contextmanager
def within_memory(device: str) -> Iterator[None]:
    """Have allocations fail on a CPU before the machine's memory is used up. Else the kernel grants
    it, and kills some process once it is used.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    if device == "cpu":
        # A tenth is left to everything else
        limit = int(hardware.host_memory()) // 10 * 9
        limit = limit if soft == resource.RLIM_INFINITY else min(soft, limit)
        resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def is_out_of_memory(error: BaseException) -> bool:
    """Return True if memory ran out."""
    is_known = isinstance(error, torch.OutOfMemoryError | MemoryError)
    # On a CPU torch has no exception of its own; the other message is of a file that is mapped
    messages = ("can't allocate memory", os.strerror(errno.ENOMEM))
    return is_known or any(message in str(error) for message in messages)
