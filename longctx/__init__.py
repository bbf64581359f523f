"""longctx: train GPTs on long documents, with pluggable exact attention."""

import os
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from longctx.generation import generate, load

__all__ = ["__version__", "generate", "load"]
__version__ = "0.1.0"

# By default OpenMP's threads spin for 3 ms at each barrier. If other programs need the cores, that
# takes most of a CPU's time; threads that sleep at once make a step on free cores 13% slower. About
# 10 microseconds of spinning cost nothing in either case. OpenMP reads this once, when torch loads.
if not {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & os.environ.keys():
    os.environ["GOMP_SPINCOUNT"] = "1000"


def __getattr__(name: str) -> Any:
    # `import longctx` imports no torch, so that --help answers at once
    if name in ("generate", "load"):
        return resolve_name(f"longctx.generation:{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
