"""Compile the kernels for GPUs that need not be there, and print what the compiler says of them as
JSON.

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

triton.knobs.compilation.always_compile = (
    True  # a cached kernel comes without what ptxas said of it
)
triton.knobs.nvidia.dump_ptxas_log = True
layout = gl.NVMMASharedLayout.get_default_for
SCALARS = {
    "lse": "*fp32",
    "first": "*i32",
    "last": "*i32",
    "qfirst": "*i32",
    "qlast": "*i32",
    "turns": "*i32",
    "counter": "*i32",
    "again": "*i32",
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
    compiled, said = build(source, 90, num_warps=4)
    spilled = sum(int(n) for n in re.findall(r"(\d+) bytes spill", said))
    return {
        "spilled": spilled,
        "shared": compiled.metadata.shared,
        "warnings": re.findall(r"C7\d+", said),
    }


def forward(head_dim, again=False):
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
        **dict(TURNS=c.turns, OVERLAP=c.overlap, PEELED=c.peeled, KEEP=not again, AGAIN=again),
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
        **dict(WAYS=hopper_backward.ways(head_dim, group, ordered), REGISTERS=c.registers),
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
    found = {}
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
                found[f"{arch} {name} {head_dim} {[BM, BN, warps, stages]}"] = (
                    compiled.metadata.shared
                )
    return found


if __name__ == "__main__":
    hopper = {f"forward {d}": forward(d) for d in hopper_forward.CONFIGS}
    hopper |= {f"forward again {d}": forward(d, again=True) for d in hopper_forward.CONFIGS}
    hopper |= {f"backward {d}": backward(d) for d in hopper_backward.CONFIGS}
    hopper |= {f"ordered backward {d}": backward(d, ordered=True) for d in hopper_backward.CONFIGS}
    hopper |= {f"backward of groups {d}": backward(d, group=4) for d in hopper_backward.CONFIGS}
    hopper |= {
        f"ordered backward of groups {d}": backward(d, ordered=True, group=4)
        for d in hopper_backward.CONFIGS
    }
    json.dump(
        {"hopper": hopper, "any": shipped("any", 86, False), "sm90": shipped("sm90", 90, True)},
        sys.stdout,
    )
