"""Compile Hopper's kernels for a GPU that need not be there; print as JSON what the compiler says.

    compile_report.py NAME ...     names of HOPPER

A script of its own: it needs Triton's compiler, and the other tests of a machine without a GPU run
in Triton's interpreter.
"""

import io
import json
import re
import sys
from contextlib import redirect_stdout

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

from longctx.kernels.attention import hopper_backward, hopper_forward, hopper_primitives
from longctx.kernels.attention.hopper_primitives import shared_layout

# a cached kernel comes without what ptxas said of it
triton.knobs.compilation.always_compile = True
triton.knobs.nvidia.dump_ptxas_log = True
INTEGERS = ("first", "last", "qfirst", "qlast", "semaphores", "counter", "retry")
SCALARS = dict.fromkeys(INTEGERS, "*i32") | {"lse": "*fp32", "sums": "*fp32"}


def box(rows, columns, dtype=gl.bfloat16):
    shape = 1, rows, 1, columns
    return f"tensordesc<{dtype}{list(shape)},{shared_layout(shape, dtype)!r}>"


def build(source, capability, **options):
    """A kernel compiled for that GPU, and what ptxas said of it: Triton's own call, which knows its
    ptxas and its options.
    """
    is_amd = isinstance(capability, str)
    target = GPUTarget("cuda", capability, 32)
    if is_amd:
        target = GPUTarget("hip", capability, 64 if capability.startswith("gfx9") else 32)
    with redirect_stdout(io.StringIO()) as log:
        compiled = triton.compile(source, target=target, options=options)
    assert is_amd or "Used" in log.getvalue(), "Triton printed no log of ptxas"
    return compiled, log.getvalue()


def spilled_bytes(compiled, log):
    """Bytes that a compiled kernel spills, by ptxas or by AMD's assembly."""
    if "amdgcn" in compiled.asm:
        return sum(map(int, re.findall(r"ScratchSize: (\d+)", compiled.asm["amdgcn"])))
    return sum(map(int, re.findall(r"(\d+) bytes spill stores", log)))


def ptxas(kernel, constants, descriptors):
    """Spilled bytes, registers and warnings of one kernel."""
    signature = {
        name: "constexpr"
        if name in constants
        else descriptors.get(name)
        or SCALARS.get(name)
        or ("fp32" if name.startswith("scale") else "i32")
        for name in kernel.arg_names
    }
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, x in enumerate(kernel.arg_names)
        if signature[x].startswith("*")
    }
    source = GluonASTSource(kernel, signature, constants, aligned)
    compiled, log = build(source, 90, num_warps=4)
    spilled = sum(int(n) for n in re.findall(r"(\d+) bytes spill", log))
    return {
        "spilled": spilled,
        "shared": compiled.metadata.shared,
        "warnings": re.findall(r"C7\d+", log),
    }


def forward(head_dim, retry=False, dtype=gl.bfloat16):
    c = hopper_forward.CONFIGS[head_dim]
    constants = hopper_forward.constants_of(c, head_dim, 1, dtype, retry)
    width, rest = hopper_primitives.split(head_dim)
    rows = {"q": 64, "k": c.BN, "v": c.BN, "out": 64}
    descriptors = {name: box(n, width, dtype) for name, n in rows.items()}
    if rest:
        descriptors |= {f"{name}1": box(n, rest, dtype) for name, n in rows.items()}
    else:
        constants |= {f"{name}1": None for name in rows}
    return ptxas(hopper_forward.forward_kernel, constants, descriptors)


def backward(head_dim, ordered=False, group=1, dtype=gl.bfloat16):
    c = hopper_backward.CONFIGS[head_dim]
    row = hopper_primitives.ROW_LAYOUT
    constants = hopper_backward.constants_of(c, head_dim, group, dtype, ordered)
    width, rest = hopper_primitives.split(head_dim)
    rows = {"q": c.BM, "do": c.BM, "k": c.BN, "v": 64, "dk": 64, "dv": 64}
    descriptors = {name: box(n, width, dtype) for name, n in rows.items()}
    if rest:
        descriptors |= {f"{name}1": box(n, rest, dtype) for name, n in rows.items()}
        descriptors["dq1"] = f"tensordesc<fp32{[8, 256]},{row!r}>"
    else:
        constants |= dict.fromkeys([f"{name}1" for name in rows] + ["dq1"])
    descriptors |= dict.fromkeys(("lse2", "delta"), f"tensordesc<fp32{[1, c.BM]},{row!r}>")
    descriptors["dq"] = f"tensordesc<fp32{[16, 256]},{row!r}>"
    return ptxas(hopper_backward.backward_kernel, constants, descriptors)


def large_backward(head_dim, ordered=False, group=1, dtype=gl.bfloat16):
    large, row = hopper_backward.LARGE[head_dim], hopper_primitives.ROW_LAYOUT
    constants = hopper_backward.constants_of(None, head_dim, group, dtype, ordered)
    descriptors = {name: box(64, large.width, dtype) for name in ("q", "do")}
    descriptors |= {name: box(large.box, large.width, dtype) for name in ("k", "v", "dk", "dv")}
    descriptors |= dict.fromkeys(("lse2", "delta"), f"tensordesc<fp32{[1, 64]},{row!r}>")
    descriptors["dq"] = f"tensordesc<fp32{[16, 256]},{row!r}>"  # if it is mapped
    return ptxas(large.kernel, constants, descriptors)


HOPPER = {
    f"{name} {head_dim}": (function, head_dim, options)
    for head_dim in (64, 128)
    for name, function, options in (
        ("forward", forward, {}),
        ("forward retry", forward, {"retry": True}),
        ("backward", backward, {}),
        ("ordered backward", backward, {"ordered": True}),
        ("backward of groups", backward, {"group": 4}),
        ("ordered backward of groups", backward, {"ordered": True, "group": 4}),
    )
}
HOPPER |= {f"forward {head_dim}": (forward, head_dim, {}) for head_dim in (96, 192, 256)}
HOPPER |= {
    "backward 96": (backward, 96, {}),
    "ordered backward 96": (backward, 96, {"ordered": True}),
}
HOPPER |= {
    f"{'ordered ' if ordered else ''}backward {head_dim}": (
        large_backward,
        head_dim,
        {"ordered": ordered},
    )
    for head_dim in (192, 256)
    for ordered in (False, True)
}


def unpack(head_dim, size):
    """Shared memory of the kernel that sorts dq's sums of heads computed as `size`."""
    kernel = hopper_backward.unpack_kernel
    BM = hopper_backward.CONFIGS[size].BM if size <= 128 else 64
    constants = dict(D=head_dim, PAD=size, BM=BM)
    types = {"sums": "*fp32", "out": "*bf16", "scale": "fp32"} | dict.fromkeys(
        constants, "constexpr"
    )
    signature = {name: types.get(name, "i32") for name in kernel.arg_names}
    compiled, log = build(ASTSource(kernel, signature, constants), 90, num_warps=8)
    return {
        "spilled": sum(int(n) for n in re.findall(r"(\d+) bytes spill", log)),
        "shared": compiled.metadata.shared,
        "warnings": [],
    }


HOPPER |= {
    f"unpack {head_dim}": (unpack, head_dim, {"size": size})
    for head_dim, size in ((64, 64), (88, 96), (128, 128), (184, 192), (256, 256))
}

if __name__ == "__main__":
    report = {}
    for name in sys.argv[1:]:
        function, head_dim, options = HOPPER[name]
        report[name] = function(head_dim, **options)
    json.dump(report, sys.stdout)
