"""Kernels of attention and between the matmuls: the only user of Triton.

Triton is imported when the first one is launched.
"""

import importlib.util

HAS_TRITON = importlib.util.find_spec("triton") is not None
