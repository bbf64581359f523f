"""Compile the portable attention kernels for cards that need not be there, and print as JSON the
shared memory that each takes and the bytes that it spills.

    compile_matrix.py TARGET ... -- HEAD_SIZE ...     such as 80 120 gfx942 -- 64 96
"""

import json
import re
import sys

import triton
from compile_report import SCALARS, build
from triton.compiler import ASTSource

from longctx.kernels.attention import portable
from longctx.kernels.attention.launch import padded, table

KERNELS = {
    "forward": portable.forward_kernel,
    "dkv": portable.dkv_kernel,
    "dq": portable.dq_kernel,
}
POINTERS = dict.fromkeys(("q", "k", "v", "do", "out", "dq_out", "dk_out", "dv_out"), "*bf16")
POINTERS |= SCALARS | {"lse2": "*fp32", "delta": "*fp32"}


def report(target, name, head_size):
    """Return shared memory and spilled bytes of a kernel with the config that a run would take."""
    arch = "sm90" if target == 90 else "any"
    BM, BN, warps, stages = table()[arch][name][padded(head_size)]["0"]
    pad = triton.next_power_of_2(head_size)
    # tensor maps load whole tiles, from Hopper on
    tma = isinstance(target, int) and target >= 90 and pad == head_size
    constants = dict(GROUP=1, D=head_size, PAD=pad, BM=BM, BN=BN, STAGES=stages)
    constants |= dict(TMA=tma, PRECISION="ieee", SOFTCAP=None)
    types = POINTERS | dict.fromkeys(constants, "constexpr")
    if tma:
        rows = {"q": BM, "do": BM, "k": BN, "v": BN}
        types |= {x: f"tensordesc<bf16[{n}, {head_size}]>" for x, n in rows.items()}
    kernel = KERNELS[name]
    signature = {
        x: types.get(x) or ("fp32" if x.startswith("scale") else "i32") for x in kernel.arg_names
    }
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, x in enumerate(kernel.arg_names)
        if signature[x].startswith("*") or (x.startswith("stride_") and x != "stride_ib")
    }
    source = ASTSource(kernel, signature, constants, aligned)
    compiled, log = build(source, target, num_warps=warps, num_stages=stages)
    if isinstance(target, str):
        spilled = re.findall(r"ScratchSize: (\d+)", compiled.asm["amdgcn"])
    else:
        spilled = re.findall(r"(\d+) bytes spill stores", log)
    return {"shared": compiled.metadata.shared, "spilled": sum(map(int, spilled))}


if __name__ == "__main__":
    border = sys.argv.index("--")
    targets = [int(text) if text.isdigit() else text for text in sys.argv[1:border]]
    sizes = {
        f"{target} {name} {head_size}": report(target, name, head_size)
        for target in targets
        for head_size in map(int, sys.argv[border + 1 :])
        for name in KERNELS
    }
    json.dump(sizes, sys.stdout)
