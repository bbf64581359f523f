"""Attention: masks as intervals, a registry of backends, and one function that calls them.

The names load on first use, so that reading the config schema beside them does not import torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from longctx.attention.mask import Mask as Mask
    from longctx.attention.registry import attention as attention
    from longctx.attention.registry import attention_backward as attention_backward
    from longctx.attention.registry import backends as backends
    from longctx.attention.registry import check as check
    from longctx.attention.registry import keeps_output as keeps_output
    from longctx.attention.registry import kernels_run as kernels_run
    from longctx.attention.registry import register as register
    from longctx.attention.registry import reproducible as reproducible

__all__ = [
    *(
        "Mask",
        "attention",
        "attention_backward",
        "backends",
        "check",
        "keeps_output",
        "kernels_run",
        "register",
    ),
    "reproducible",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name == "Mask":
        return import_module(f"{__name__}.mask").Mask
    registry = import_module(f"{__name__}.registry")
    registry.load_backends()
    return getattr(registry, name)
