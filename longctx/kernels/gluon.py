"""One name for each thing that Gluon names differently from Triton 3.6 to 3.9.

Triton 3.8 renamed the copies between global and shared memory and made the reduction public; 3.9
removed the old names.
"""

import functools
from typing import Any

from triton._C.libtriton import ir
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import tma


@builtin
def _reduce_add(desc: Any, coord: Any, src: Any, _semantic: Any = None) -> None:
    coord = _semantic._convert_to_ir_values(coord, require_i64=False)
    _semantic.builder.create_async_tma_reduce(
        ir.DESCRIPTOR_REDUCE_KIND.ADD, desc.handle, coord, src.handle
    )


@builtin
def reinterpret(x: Any, dtype: Any, shape: Any, layout: Any, _semantic: Any = None) -> Any:
    """The same shared memory as another type, shape and layout."""
    plain = [getattr(n, "value", n) for n in shape]
    return _semantic.memdesc_reinterpret(
        x, getattr(dtype, "value", dtype), plain, getattr(layout, "value", layout)
    )


@functools.cache
def shared_layout(shape: tuple[int, ...], dtype: gl.dtype) -> gl.NVMMASharedLayout:
    """The layout of a tile in shared memory that matrix products and tensor maps take.

    Cached, since making one takes as long as a launch.
    """
    return gl.NVMMASharedLayout.get_default_for(list(shape), dtype)


renamed = hasattr(tma, "async_load")
# (descriptor, coordinates, barrier, shared)
tma_load = tma.async_load if renamed else tma.async_copy_global_to_shared
# (descriptor, coordinates, shared)
tma_store = tma.async_store if renamed else tma.async_copy_shared_to_global
# as tma_store, but adds
tma_add = tma.async_atomic_add if hasattr(tma, "async_atomic_add") else _reduce_add
