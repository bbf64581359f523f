"""Compile kernels for GPUs that need not be there, and print what the compiler says as JSON.

    compile_report.py NAME ...     names of HOPPER, or architectures of launch.json

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

from longctx.kernels import hopper_backward, hopper_forward, portable
from longctx.kernels.launch import table

# a cached kernel comes without what ptxas said of it
triton.knobs.compilation.always_compile = True
triton.knobs.nvidia.dump_ptxas_log = True
layout = gl.NVMMASharedLayout.get_default_for
SCALARS = {
    "lse": "*fp32",
    "first": "*i32",
    "last": "*i32",
    "qfirst": "*i32",
    "qlast": "*i32",
    "semaphores": "*i32",
    "counter": "*i32",
    "retry": "*i32",
}


def box(rows, columns, dtype=gl.bfloat16, name="bf16"):
    shape = [1, rows, 1, columns]
    return f"tensordesc<{name}{shape},{layout(shape, dtype)!r}>"


def build(source, capability, **options):
    """A kernel compiled for that GPU, and what ptxas said of it: Triton's own call, which knows its
    ptxas and its options.
    """
    with redirect_stdout(io.StringIO()) as log:
        compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    assert "Used" in log.getvalue(), "Triton printed no log of ptxas"
    return compiled, log.getvalue()


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


def forward(head_dim, retry=False):
    c = hopper_forward.CONFIGS[head_dim]
    constants = dict(
        shared=layout([64, head_dim], gl.bfloat16),
        shared_kv=layout([c.BN, head_dim], gl.bfloat16),
        **dict(
            GROUP=1,
            D=head_dim,
            BN=c.BN,
            STAGES=c.stages,
            CONSUMERS=c.consumers,
            REGISTERS=c.registers,
        ),
        **dict(PINGPONG=c.pingpong, OVERLAP=c.overlap, MASKED_LOOP=c.masked_loop),
        **dict(FIXED_MAX=not retry, RETRY=retry),
    )
    rows = {"q": 64, "k": c.BN, "v": c.BN, "out": 64}
    return ptxas(
        hopper_forward.forward_kernel,
        constants,
        {name: box(n, head_dim) for name, n in rows.items()},
    )


def backward(head_dim, ordered=False, group=1):
    c = hopper_backward.CONFIGS[head_dim]
    row = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)
    bf16 = gl.bfloat16
    constants = dict(
        **{
            f"{x}_shared": layout([n, head_dim], bf16)
            for x, n in (("q", c.BM), ("k", c.BN), ("v", 64))
        },
        **dict(ds_shared=layout([c.BN, c.BM], bf16), row_shared=row),
        **dict(GROUP=group, D=head_dim, BM=c.BM, BN=c.BN, FENCE_LAST=c.fence_last, ORDERED=ordered),
        DIRECTIONS=hopper_backward.directions(head_dim, group, ordered),
        REGISTERS=c.registers,
    )
    rows = {"q": c.BM, "do": c.BM, "k": c.BN, "v": 64, "dk": 64, "dv": 64}
    descriptors = {name: box(n, head_dim) for name, n in rows.items()}
    descriptors |= dict.fromkeys(("lse2", "delta"), f"tensordesc<fp32{[1, c.BM]},{row!r}>")
    descriptors["dq"] = f"tensordesc<fp32{[16, 256]},{row!r}>"
    return ptxas(hopper_backward.backward_kernel, constants, descriptors)


def shipped(arch, capability, tma):
    """Shared memory of the portable kernels with every launch config of `arch` for the usual head
    sizes.
    """
    sizes = {}
    kernels = {
        "forward": portable.forward_kernel,
        "dkv": portable.dkv_kernel,
        "dq": portable.dq_kernel,
    }
    for name, kernel in kernels.items():
        for head_dim in (64, 128, 256):
            for BM, BN, warps, stages in table()[arch][name][str(head_dim)].values():
                constants = dict(
                    GROUP=1,
                    D=head_dim,
                    PAD=head_dim,
                    BM=BM,
                    BN=BN,
                    STAGES=stages,
                    TMA=tma,
                    PRECISION="ieee",
                )
                rows = {"q": BM, "do": BM, "k": BN, "v": BN}
                types = SCALARS | {"lse2": "*fp32", "delta": "*fp32"}
                types |= dict.fromkeys(("out", "dq_out", "dk_out", "dv_out"), "*bf16")
                types |= {
                    x: f"tensordesc<bf16[{n}, {head_dim}]>" if tma else "*bf16"
                    for x, n in rows.items()
                }
                signature = {
                    x: "constexpr"
                    if x in constants
                    else types.get(x) or ("fp32" if x.startswith("scale") else "i32")
                    for x in kernel.arg_names
                }
                aligned = {
                    (i,): [["tt.divisibility", 16]]
                    for i, x in enumerate(kernel.arg_names)
                    if signature[x].startswith("*")
                    or (x.startswith("stride_") and x != "stride_ib")
                }
                source = ASTSource(kernel, signature, constants, aligned)
                compiled, _ = build(source, capability, num_warps=warps, num_stages=stages)
                key = f"{arch} {name} {head_dim} {[BM, BN, warps, stages]}"
                sizes[key] = compiled.metadata.shared
    return sizes


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
SHIPPED = {"any": (86, False), "sm90": (90, True)}  # architecture → capability, tensor maps

if __name__ == "__main__":
    report = {}
    for name in sys.argv[1:]:
        if name in SHIPPED:
            report[name] = shipped(name, *SHIPPED[name])
        else:
            function, head_dim, options = HOPPER[name]
            report[name] = function(head_dim, **options)
    json.dump(report, sys.stdout)
