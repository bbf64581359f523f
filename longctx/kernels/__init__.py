"""Kernels of attention and those between the matmuls (elementwise/): the only user of Triton.

What other packages call is named here. Modules that need Triton are imported when they are first
asked for, since Triton takes about as long to import as torch.
"""

import importlib
import importlib.util
from types import ModuleType

from longctx.kernels.attention import flash_op, launch, relaunch, selftest
from longctx.kernels.attention.fingerprint import fingerprint, machine, sources
from longctx.kernels.attention.selftest import SelfTestFailed
from longctx.kernels.elementwise.linear import linear

__all__ = [
    "HAS_TRITON",
    "SelfTestFailed",
    "fingerprint",
    "flash_op",
    "launch",
    "linear",
    "machine",
    "relaunch",
    "selftest",
    "sources",
]

HAS_TRITON = importlib.util.find_spec("triton") is not None
# module → the folder that holds it
IMPORTED_LATE = dict.fromkeys(
    ("adamw_update", "cross_entropy", "quantize", "rms_norm", "rotary", "swiglu"), "elementwise"
) | dict.fromkeys(("decoding", "tiled", "hopper_forward", "hopper_backward"), "attention")


def __getattr__(name: str) -> ModuleType:
    if name not in IMPORTED_LATE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return importlib.import_module(f"{__name__}.{IMPORTED_LATE[name]}.{name}")
