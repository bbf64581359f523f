"""Kernels: attention's, and those between the matmuls. The only user of Triton, which is imported
when the first one is launched.
"""

import importlib.util

HAS_TRITON = importlib.util.find_spec("triton") is not None
