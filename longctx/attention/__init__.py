"""Attention: masks as intervals, a registry of backends, and one function that calls them.

The names below are imported when they are first asked for: planning reads `description`, and needs
no torch.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from longctx.attention.mask import Mask
    from longctx.attention.registry import (
        Attention,
        AttentionRequest,
        Backend,
        Scores,
        attention,
        backends,
        check,
        kernels_run,
        register,
        register_score,
        registered,
    )

__all__ = [
    "Attention",
    "AttentionRequest",
    "Backend",
    "Mask",
    "Scores",
    "attention",
    "backends",
    "check",
    "kernels_run",
    "register",
    "register_score",
    "registered",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from longctx.attention import registry

    registry.load_backends()
    value = globals()[name] = getattr(registry, name)
    return value
