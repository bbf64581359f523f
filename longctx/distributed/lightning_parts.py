"""What longctx uses of Lightning, imported without what only its metrics need.

Lightning imports torchmetrics, which imports transformers, matplotlib, scipy and torchvision where
they are installed: 2 s of the start of every process. While it does, they count as not installed.
"""

from importlib.metadata import PackageNotFoundError, version
from unittest.mock import patch

from lightning_utilities.core import imports
from lightning_utilities.core.imports import module_available, package_available

UNUSED = frozenset({"transformers", "matplotlib", "scipy", "torchvision"})


def _version_unless_unused(package: str) -> str:
    if package in UNUSED:
        raise PackageNotFoundError(package)
    return version(package)


def _is_package_available(package: str) -> bool:
    return package not in UNUSED and package_available(package)


def _is_available(module: str) -> bool:
    return module not in UNUSED and module_available(module)


with (
    patch.object(imports, "_version", _version_unless_unused, create=True),
    patch.object(imports, "package_available", _is_package_available),
    patch.object(imports, "module_available", _is_available),
):
    from lightning import pytorch
    from lightning.fabric import Fabric
    from lightning.fabric.plugins.environments import LightningEnvironment
    from lightning.fabric.strategies import DDPStrategy, SingleDeviceStrategy
    from lightning.fabric.strategies.launchers.subprocess_script import _SubprocessScriptLauncher
    from lightning.fabric.utilities.distributed import _set_num_threads_if_needed

__all__ = [
    "DDPStrategy",
    "Fabric",
    "LightningEnvironment",
    "SingleDeviceStrategy",
    "_SubprocessScriptLauncher",
    "_set_num_threads_if_needed",
    "pytorch",
]
