"""Kernels of attention and those between the matmuls (elementwise/): the only user of Triton.

Other packages import these names from here. Each is imported when it is first asked for: planning
needs no torch, and Triton takes about as long to import as torch.
"""

import functools
import importlib
import importlib.util
import sys
from importlib.metadata import version
from typing import Any

HAS_TRITON = importlib.util.find_spec("triton") is not None
TRITON = ("3.6.", "3.7.")  # the versions that have run on a GPU, as in pyproject.toml
# module → the folder that holds it
MODULES = {
    **dict.fromkeys(("decoding", "flash_op", "launch", "selftest"), "attention"),
    **dict.fromkeys(("hopper_backward", "hopper_forward", "tiled"), "attention"),
    **dict.fromkeys(("adamw_update", "cross_entropy", "quantize"), "elementwise"),
    **dict.fromkeys(("rms_norm", "rotary", "swiglu"), "elementwise"),
}
MEMBERS = {
    "SelfTestFailed": "attention.selftest",
    **dict.fromkeys(("integers", "machine", "sha256", "sources"), "attention.fingerprint"),
    "linear": "elementwise",
}


@functools.cache
def warn_of_triton() -> None:
    """Print a line, once, if the kernels have not run with the installed Triton on a GPU."""
    if HAS_TRITON and not version("triton").startswith(TRITON):
        print(
            f"warning: the kernels have not run with triton {version('triton')} on a GPU; "
            "install one that has: `pip install 'triton>=3.6,<3.8'`",
            file=sys.stderr,
        )


def __getattr__(name: str) -> Any:
    if name in MODULES:
        return importlib.import_module(f"{__name__}.{MODULES[name]}.{name}")
    if name in MEMBERS:
        return getattr(importlib.import_module(f"{__name__}.{MEMBERS[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
