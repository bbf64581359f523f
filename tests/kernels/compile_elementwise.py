"""Compile the kernels between the matmuls and of decoding, and print the bytes that each spills.

compile_elementwise.py CAPABILITY ...     such as 80 90
"""

import json
import re
import sys

import triton.language as tl
from compile_report import build
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

POINTERS = [
    "loss",
    "scale",
    "p",
    "grad",
    "factor",
    "rates",
    "weight",
    "r",
    "dw",
    "by",
    "cos",
    "sin",
]
FLOATS = ["beta1", "beta2", "eps"]
INTS = ["V", "N", "C", "H", "G", "width", "stride_z"]
KINDS = {"target": "*i64", **dict.fromkeys(POINTERS, "*fp32")}
STRIDES = [f"stride_{x}{of}" for x in "kv" for of in "bth"]
KINDS |= dict.fromkeys(["first", "last"], "*i32") | dict.fromkeys(["part_out", "part_lse"], "*fp32")
KINDS |= dict.fromkeys(["Hkv", "parts", *STRIDES], "i32") | {"scale_log2": "fp32"}
KINDS |= {"places": "*i64", "owners": "*i32"}
KINDS |= dict.fromkeys(["rows", "columns"], "*fp8e4nv") | {"amax": "*fp32"}
KINDS |= dict.fromkeys(["R", "padded", "numel"], "i32")
KINDS |= dict.fromkeys(FLOATS, "fp32") | dict.fromkeys(INTS, "i32")


def compiled(kernel, capability, warps, dtype, aligned=(), **constants):
    def kind(name):
        if name in constants:
            return "constexpr"
        return KINDS.get(name) or f"*{dtype}"

    signature = {name: kind(name) for name in kernel.arg_names}
    numbers = [i for i, name in enumerate(kernel.arg_names) if name in aligned]
    attributes = {(i,): [["tt.divisibility", 16]] for i in numbers}
    source = ASTSource(kernel, signature, constants, attributes)
    _, log = build(source, capability, num_warps=warps)
    return sum(int(n) for n in re.findall(r"(\d+) bytes spill", log))


if __name__ == "__main__":
    spilled = {}
    for capability in map(int, sys.argv[1:]):
        for dtype in ("bf16", "fp32"):
            for V in (300, 50304, 128256):
                block, warps = cross_entropy.launch_config(V)
                kernel, tile = (
                    cross_entropy.cross_entropy_kernel,
                    {"GRADIENT": True, "BLOCK": block},
                )
                key = f"cross entropy {capability} {dtype} {V}"
                spilled[key] = compiled(kernel, capability, warps, dtype, **tile)
        for kernel in (swiglu.swiglu_kernel, swiglu.swiglu_backward_kernel):
            for width in (384, 8192):
                (_, _), block = swiglu._grid(1, width)
                spilled[f"{kernel.__name__} {capability} {width}"] = compiled(
                    kernel, capability, 4, "bf16", BLOCK=block
                )
        for C in (768, 2048, 4096):
            rows, block, warps, _ = rms_norm.launch_config(C)
            tile = {"ROWS": rows, "BLOCK": block}
            spilled[f"rms norm {capability} {C}"] = compiled(
                rms_norm.rms_norm_kernel, capability, warps, "bf16", ADD=True, **tile
            )
            tile |= {"ADD": True, "STAGES": rms_norm.stages(block)}
            spilled[f"rms norm backward {capability} {C}"] = compiled(
                rms_norm.rms_norm_backward_kernel, capability, warps, "bf16", **tile
            )
        for D in (64, 128, 256):
            tokens, heads, block, warps = rotary.launch_config(32, 8, D)
            tile = {"HALF": D // 2, "TOKENS": tokens, "HEADS": heads, "BLOCK": block}
            for kernel in (rotary.rope_kernel, rotary.rope_backward_kernel):
                spilled[f"{kernel.__name__} {capability} {D}"] = compiled(
                    kernel, capability, warps, "bf16", **tile
                )
        for dtype, D in (("bf16", 64), ("bf16", 128), ("bf16", 256), ("fp32", 128)):
            rows, pad, tile = decoding.launch_config(4, D, 2 if dtype == "bf16" else 4)
            sizes = {"GROUP": 4, "ROWS": rows, "D": D, "PAD": pad, "BN": tile}
            sizes |= {"STAGES": decoding.STAGES, "PRECISION": decoding.PRECISION}
            aligned = ("q", "k", "v", *STRIDES)
            spilled[f"decode {capability} {dtype} {D}"] = compiled(
                decoding.part_kernel, capability, 4, dtype, aligned, **sizes
            )
            spilled[f"combine {capability} {dtype} {D}"] = compiled(
                decoding.combine_kernel, capability, 2, dtype, D=D, PAD=pad
            )
        for dtype in ("bf16", "fp32"):
            spilled[f"amax {capability} {dtype}"] = compiled(
                *(quantize.amax_kernel, capability, quantize.REDUCING, dtype),
                BLOCK=quantize.REDUCED,
                TILES=quantize.TILES,
            )
            rows, columns = quantize.TILE
            tile = {"ROWS": True, "COLUMNS": True, "BR": rows, "BC": columns}
            if capability >= 89:
                spilled[f"quantize {capability} {dtype}"] = compiled(
                    *(quantize.quantize_kernel, capability, quantize.WARPS, dtype),
                    aligned=("x", "rows", "columns", "R", "C", "padded"),
                    **tile,
                    LARGEST=448.0,
                    SCALED=False,
                )
        spilled[f"multiply {capability}"] = compiled(
            cross_entropy.multiply_kernel, capability, 4, "bf16", BLOCK=cross_entropy.MULTIPLIED
        )
        for dtype in ("bf16", "fp32"):
            spilled[f"adamw {capability} {dtype}"] = compiled(
                adamw_update.adamw_kernel,
                capability,
                adamw_update.WARPS,
                dtype,
                CLIPPED=True,
                BLOCK=adamw_update.BLOCK,
            )
            spilled[f"adamw of all {capability} {dtype}"] = compiled(
                adamw_update.multi_tensor_adamw_kernel,
                capability,
                adamw_update.WARPS,
                dtype,
                COLUMNS=7,
                MOMENT=getattr(tl, {"bf16": "bfloat16", "fp32": "float32"}[dtype]),
                CLIPPED=True,
                BLOCK=adamw_update.BLOCK,
            )
    json.dump(spilled, sys.stdout)
