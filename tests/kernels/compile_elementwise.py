"""Compile the kernels between the matmuls and of decoding, and print the bytes that each spills.

compile_elementwise.py TARGET ...     such as 80 90 gfx942
"""

import json
import sys

import triton.language as tl
from compile_report import report
from triton.compiler import ASTSource

from longctx.kernels.attention import decoding
from longctx.kernels.elementwise import (
    adamw_update,
    cross_entropy,
    quantize,
    rms_norm,
    rotary,
    swiglu,
)

STRIDES = [f"stride_{x}{of}" for x in "kv" for of in "bth"]
# type → the arguments that have it; all others are pointers to the dtype under test
TYPES = {
    "*fp32": "loss squares scale p grad factor rates weight r dw by cos sin part_out part_lse amax",
    "*i32": "first last owners",
    "*i64": "target places",
    "*fp8e4nv": "rows columns",
    "fp32": "beta1 beta2 eps scale_log2 z_loss",
    "i32": " ".join(["V N C H G width stride_z Hkv parts R padded numel", *STRIDES]),
}
KINDS = {name: kind for kind, names in TYPES.items() for name in names.split()}
DTYPES = {"bf16": tl.bfloat16, "fp32": tl.float32}


def spilled(kernel, target, warps, dtype, aligned=(), **constants):
    types = {name: KINDS.get(name, f"*{dtype}") for name in kernel.arg_names}
    return report(ASTSource, kernel, types, constants, target, warps, aligned)["spilled"]


def of_one_dtype(target, dtype):
    """Yield (name, kernel, warps, aligned, constants) of kernels that take fp32 too."""
    for V in (300, 50304, 128256):
        block, warps = cross_entropy.launch_config(V)
        kernel = cross_entropy.cross_entropy_kernel
        yield f"cross entropy {V}", kernel, warps, (), {"GRADIENT": True, "BLOCK": block}
    tile = {"BLOCK": quantize.REDUCED, "TILES": quantize.TILES}
    yield "amax", quantize.amax_kernel, quantize.REDUCING, (), tile
    # GPUs before 8.9 have no FP8, AMD's another one
    if isinstance(target, int) and target >= 89:
        tile = {"ROWS": True, "COLUMNS": True, "LARGEST": 448.0, "SCALED": False}
        tile = tile | dict(zip(("BR", "BC"), quantize.TILE, strict=True))
        aligned = ("x", "rows", "columns", "R", "C", "padded")
        yield "quantize", quantize.quantize_kernel, quantize.WARPS, aligned, tile
    tile = {"CLIPPED": True, "BLOCK": adamw_update.BLOCK}
    yield "adamw", adamw_update.adamw_kernel, adamw_update.WARPS, (), tile
    kernel, tile = adamw_update.multi_tensor_adamw_kernel, tile | {"COLUMNS": 7}
    yield "adamw of all", kernel, adamw_update.WARPS, (), tile | {"MOMENT": DTYPES[dtype]}


def in_16_bits():
    """Yield the same of kernels that run in 16 bits."""
    for kernel in (swiglu.swiglu_kernel, swiglu.swiglu_backward_kernel):
        for width in (384, 8192):
            yield f"{kernel.__name__} {width}", kernel, 4, (), {"BLOCK": swiglu._grid(1, width)[1]}
    for C in (768, 2048, 4096):
        rows, block, warps, _ = rms_norm.launch_config(C)
        tile = {"ROWS": rows, "BLOCK": block, "ADD": True}
        yield f"rms norm {C}", rms_norm.rms_norm_kernel, warps, (), tile
        tile = tile | {"STAGES": rms_norm.stages(block)}
        yield f"rms norm backward {C}", rms_norm.rms_norm_backward_kernel, warps, (), tile
    for D in (64, 128, 256):
        tokens, heads, block, warps = rotary.launch_config(32, 8, D)
        tile = {"HALF": D // 2, "TOKENS": tokens, "HEADS": heads, "BLOCK": block}
        for kernel in (rotary.rope_kernel, rotary.rope_backward_kernel):
            yield f"{kernel.__name__} {D}", kernel, warps, (), tile
    tile = {"BLOCK": cross_entropy.MULTIPLIED}
    yield "multiply", cross_entropy.multiply_kernel, 4, (), tile


def of_decoding(target, D, itemsize):
    rows, pad, tile = decoding.launch_config(4, D, itemsize)
    precision = decoding.PRECISION if isinstance(target, int) else decoding.PRECISION_ON_AMD
    sizes = {"GROUP": 4, "ROWS": rows, "D": D, "PAD": pad, "BN": tile}
    sizes |= {"STAGES": decoding.STAGES, "PRECISION": precision}
    yield f"decode {D}", decoding.part_kernel, 4, ("q", "k", "v", *STRIDES), sizes
    yield f"combine {D}", decoding.combine_kernel, 2, (), {"D": D, "PAD": pad}


if __name__ == "__main__":
    found = {}
    for target in (int(text) if text.isdigit() else text for text in sys.argv[1:]):
        cases = {
            "bf16": [*of_one_dtype(target, "bf16"), *in_16_bits()],
            "fp32": [*of_one_dtype(target, "fp32"), *of_decoding(target, 128, 4)],
        }
        for D in (64, 128, 256):
            cases["bf16"] += of_decoding(target, D, 2)
        for dtype, kernels in cases.items():
            for name, kernel, warps, aligned, constants in kernels:
                key = f"{name} {target} {dtype}"
                found[key] = spilled(kernel, target, warps, dtype, aligned, **constants)
    json.dump(found, sys.stdout)
