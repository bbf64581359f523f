"""Lightning Fabric for a run: device, precision and gradient averaging of processes that run.

Lightning imports torchmetrics, which imports transformers, matplotlib, scipy and torchvision, if
they count as installed: 2 s of the start of every process.
"""

from __future__ import annotations

import logging
import warnings
from importlib.metadata import PackageNotFoundError, version
from typing import Any
from unittest.mock import patch

import torch
from lightning_utilities.core import imports
from lightning_utilities.core.imports import package_available

from longctx.parallel.launch import Launched

UNUSED = frozenset({"transformers", "matplotlib", "scipy", "torchvision"})
# Warnings that do not apply: DDP keeps the nodes of its first stream; gradients wait as they should
UNFOUNDED = ".*(LeafSpec|pkg_resources|The AccumulateGrad node's stream does not match)"
# fp8: layers make their products in FP8 themselves, see longctx.model.fp8
PRECISIONS = {"bf16": "bf16-mixed", "fp8": "bf16-mixed", "fp32": "32-true"}


def _version_unless_unused(package: str) -> str:
    if package in UNUSED:
        raise PackageNotFoundError(package)
    return version(package)


with patch.multiple(
    imports,
    create=True,
    _version=_version_unless_unused,
    package_available=lambda name: name not in UNUSED and package_available(name),
):
    from lightning import pytorch
    from lightning.fabric import Fabric
    from lightning.fabric.plugins.environments import LightningEnvironment
    from lightning.fabric.strategies import DDPStrategy, SingleDeviceStrategy

__all__ = ["Fabric", "make_fabric", "pytorch"]


def make_fabric(launched: Launched, device: str, precision: str) -> Fabric:
    """Return a Fabric on "cuda" or "cpu" in "bf16", "fp8" or "fp32"; the caller forms its group."""
    for name in ("lightning.pytorch", "lightning.fabric", "lightning"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module=r"lightning\..*")
    warnings.filterwarnings("ignore", message=UNFOUNDED)
    strategy: Any = SingleDeviceStrategy(
        torch.device(device, launched.local_rank) if device == "cuda" else "cpu"
    )
    if launched.ranks > 1:
        # Ranks compute their buffers alike; gradients that live in DDP's buckets are not copied
        strategy = DDPStrategy(broadcast_buffers=False, gradient_as_bucket_view=True)
    return Fabric(
        accelerator="gpu" if device == "cuda" else "cpu",
        devices=launched.local_ranks,
        num_nodes=launched.nodes,
        strategy=strategy,
        precision=PRECISIONS[precision],  # type: ignore[arg-type]
        plugins=[LightningEnvironment()],  # the processes run already
    )
