"""Attention: masks as intervals, a registry of backends, and one function that calls them."""

from longctx.attention.mask import Mask
from longctx.attention.registry import (
    Attention,
    Backend,
    Request,
    attention,
    backends,
    check,
    kernels_run,
    load_backends,
    register,
    reproducible,
    takes_intervals,
)

__all__ = [
    "Attention",
    "Backend",
    "Mask",
    "Request",
    "attention",
    "backends",
    "check",
    "kernels_run",
    "register",
    "reproducible",
    "takes_intervals",
]

load_backends()
