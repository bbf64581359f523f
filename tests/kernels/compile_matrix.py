"""Compile the attention kernels but those of Hopper for cards that need not be there, and print as
JSON the shared memory that each takes and the bytes that it spills.

    compile_matrix.py TARGET ... -- HEAD_SIZE ...     such as 80 120 gfx942 -- 64 96
"""

import json
import sys

import triton
from compile_report import SCALARS, build, spilled_bytes
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource

from longctx.kernels.attention import ampere, portable
from longctx.kernels.attention.hopper_primitives import split
from longctx.kernels.attention.launch import padded, table

KERNELS = {"forward": portable.forward_kernel, "dkv": portable.dkv_kernel, "dq": portable.dq_kernel}
POINTERS = dict.fromkeys(("q", "k", "v", "do", "out", "dq_out", "dk_out", "dv_out"), "*bf16")
POINTERS |= SCALARS | {"lse2": "*fp32", "delta": "*fp32"}


AMPERE = {
    "ampere forward": ampere.forward_kernel,
    "ampere backward": ampere.backward_kernel,
    "ampere sort": ampere.sort_kernel,
}
AMPERE_TILES = {80: 163, 86: 99, 120: 99}  # of the cards that take them: KiB of shared memory


def ampere_report(target, name, head_size):
    """Return the same of a kernel for mma.sync."""
    tiles = ampere.FORWARD if "forward" in name else ampere.BACKWARD
    config = tiles[AMPERE_TILES[target]][head_size]
    constants = dict(zip(("D0", "D1"), split(head_size), strict=True)) | config._asdict()
    constants |= {"W": config.warps, "GROUP": 1, "SOFTCAP": None}
    pointers = POINTERS | {"dq": "*bf16" if "sort" in name else "*fp32"}
    warps = 4 if "sort" in name else config.warps
    return compiled_report(GluonASTSource, AMPERE[name], pointers, constants, target, warps, 1)


def report(target, name, head_size):
    """Return the most shared memory and spilled bytes of a kernel with the configs of a run."""
    own = table().get(f"sm{target}", {}).get(name, {})
    rows = own.get(padded(head_size)) or table()["any"][name][padded(head_size)]
    reports = [portable_report(target, name, head_size, *config) for config in rows.values()]
    return {figure: max(r[figure] for r in reports) for figure in ("shared", "spilled")}


def portable_report(target, name, head_size, BM, BN, warps, stages):
    pad = triton.next_power_of_2(head_size)
    # tensor maps load whole tiles, from Hopper on
    tma = isinstance(target, int) and target >= 90 and pad == head_size
    constants = dict(GROUP=1, D=head_size, PAD=pad, BM=BM, BN=BN, STAGES=stages)
    # the pass for dk alone takes more than that for dv
    constants |= dict(TMA=tma, PRECISION="ieee", SOFTCAP=None, DK=True, DV=head_size <= 256)
    types = dict(POINTERS)
    if tma:
        rows = {"q": BM, "do": BM, "k": BN, "v": BN}
        types |= {x: f"tensordesc<bf16[{n}, {head_size}]>" for x, n in rows.items()}
    return compiled_report(ASTSource, KERNELS[name], types, constants, target, warps, stages)


def compiled_report(source_type, kernel, types, constants, target, warps, stages):
    """Compile a kernel whose parameters have these types, but for constants and plain numbers."""
    constants = {x: value for x, value in constants.items() if x in kernel.arg_names}
    types = types | dict.fromkeys(constants, "constexpr")
    signature = {
        x: types.get(x) or ("fp32" if x.startswith("scale") else "i32") for x in kernel.arg_names
    }
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, x in enumerate(kernel.arg_names)
        if signature[x].startswith("*") or (x.startswith("stride_") and x != "stride_ib")
    }
    source = source_type(kernel, signature, constants, aligned)
    compiled, log = build(source, target, num_warps=warps, num_stages=stages)
    return {"shared": compiled.metadata.shared, "spilled": spilled_bytes(compiled, log)}


if __name__ == "__main__":
    border = sys.argv.index("--")
    targets = [int(text) if text.isdigit() else text for text in sys.argv[1:border]]
    sizes = {
        f"{target} {name} {head_size}": report(target, name, head_size)
        for target in targets
        for head_size in map(int, sys.argv[border + 1 :])
        for name in KERNELS
    }
    sizes |= {
        f"{target} {name} {head_size}": ampere_report(target, name, head_size)
        for target in targets
        for head_size in map(int, sys.argv[border + 1 :])
        for name in (AMPERE if target in AMPERE_TILES and head_size <= 256 else ())
    }
    json.dump(sizes, sys.stdout)
