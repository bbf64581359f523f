"""Lightning Fabric for a run: device, precision and gradient averaging of processes that run.

Lightning imports torchmetrics, which imports transformers, matplotlib, scipy and torchvision, if
they count as installed: 2 s of the start of every process.
"""

from __future__ import annotations

import logging
import warnings
from typing import Any
from unittest.mock import patch

import torch
from lightning_utilities.core.imports import RequirementCache

from longctx.parallel.launch import Launched

UNUSED = ("transformers", "matplotlib", "scipy", "torchvision")
# Not so: DDP keeps its first stream's nodes, gradients wait, nothing adds to losses in place
UNFOUNDED = ".*(LeafSpec|pkg_resources|The AccumulateGrad node's stream|returned a view tensor)"
is_installed = RequirementCache.__bool__


def _is_used(package: RequirementCache) -> bool:
    return not str(package.requirement).startswith(UNUSED) and is_installed(package)


with patch.object(RequirementCache, "__bool__", _is_used):
    from lightning import pytorch
    from lightning.fabric import Fabric
    from lightning.fabric.plugins.environments import LightningEnvironment
    from lightning.fabric.strategies import DDPStrategy, SingleDeviceStrategy

__all__ = ["Fabric", "make_fabric", "pytorch"]


def make_fabric(launched: Launched, device: torch.device, dtype: torch.dtype) -> Fabric:
    """Return the launched Fabric of a rank on `device`; the caller has formed its group."""
    for name in ("lightning.pytorch", "lightning.fabric", "lightning"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module=r"lightning\..*")
    warnings.filterwarnings("ignore", message=UNFOUNDED)
    strategy: Any = SingleDeviceStrategy(device)
    if launched.ranks > 1:
        # Ranks compute their buffers alike; gradients that live in DDP's buckets are not copied
        strategy = DDPStrategy(broadcast_buffers=False, gradient_as_bucket_view=True)
    fabric = Fabric(
        accelerator=device.type,
        devices=launched.local_ranks,
        num_nodes=launched.nodes,
        strategy=strategy,
        precision="32-true" if dtype == torch.float32 else "bf16-mixed",
        plugins=[LightningEnvironment()],  # the processes run already
    )
    fabric.launch()
    return fabric
