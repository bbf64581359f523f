"""Compile the attention kernels but those of Hopper for cards that need not be there, and print as
JSON the shared memory that each takes and the bytes that it spills.

    compile_matrix.py TARGET ... -- HEAD_SIZE ...     such as 80 120 gfx942 -- 64 96
"""

import itertools
import json
import sys

import triton
from compile_report import SCALARS, report
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource

from longctx.kernels.attention import ampere, portable
from longctx.kernels.attention.hopper_primitives import split
from longctx.kernels.attention.launch import padded, table

PORTABLE = {
    "forward": portable.forward_kernel,
    "dkv": portable.dkv_kernel,
    "dq": portable.dq_kernel,
}
AMPERE = {
    "ampere forward": ampere.forward_kernel,
    "ampere backward": ampere.backward_kernel,
    "ampere sort": ampere.sort_kernel,
}
AMPERE_TILES = {80: 163, 86: 99, 120: 99}  # of the cards that take them: KiB of shared memory
POINTERS = dict.fromkeys(("q", "k", "v", "do", "out", "dq_out", "dk_out", "dv_out"), "*bf16")
POINTERS |= SCALARS | {"lse2": "*fp32", "delta": "*fp32"}


def multiples(kernel, types):
    """Return the names of parameters that 16 divides: pointers and strides."""
    pointers = [x for x, type in types.items() if type.startswith("*")]
    return pointers + [x for x in kernel.arg_names if x.startswith("stride_") and x != "stride_ib"]


def of_ampere(target, name, head_size):
    """Return the report on a kernel for mma.sync."""
    tiles = ampere.FORWARD if "forward" in name else ampere.BACKWARD
    config = tiles[AMPERE_TILES[target]][head_size]
    constants = dict(zip(("D0", "D1"), split(head_size), strict=True)) | config._asdict()
    constants |= {"W": config.warps, "GROUP": 1, "SOFTCAP": None}
    types = POINTERS | {"dq": "*bf16" if "sort" in name else "*fp32"}
    warps = 4 if "sort" in name else config.warps
    kernel, aligned = AMPERE[name], multiples(AMPERE[name], types)
    return report(GluonASTSource, kernel, types, constants, target, warps, aligned)


def of_portable(target, name, head_size):
    """Return the largest figures of a portable kernel among the configs of a run."""
    own = table().get(f"sm{target}", {}).get(name, {})
    rows = own.get(padded(head_size)) or table()["any"][name][padded(head_size)]
    reports = [of_config(target, name, head_size, *config) for config in rows.values()]
    return {figure: max(r[figure] for r in reports) for figure in ("shared", "spilled")}


def of_config(target, name, head_size, BM, BN, warps, stages):
    pad = triton.next_power_of_2(head_size)
    # tensor maps load whole tiles, from Hopper on
    tma = isinstance(target, int) and target >= 90 and pad == head_size
    constants = dict(GROUP=1, D=head_size, PAD=pad, BM=BM, BN=BN, STAGES=stages)
    # the pass for dk alone takes more than that for dv
    constants |= dict(TMA=tma, PRECISION="ieee", SOFTCAP=None, DK=True, DV=head_size <= 256)
    rows = {"q": BM, "do": BM, "k": BN, "v": BN} if tma else {}
    types = POINTERS | {x: f"tensordesc<bf16[{n}, {head_size}]>" for x, n in rows.items()}
    kernel, aligned = PORTABLE[name], multiples(PORTABLE[name], types)
    return report(ASTSource, kernel, types, constants, target, warps, aligned, num_stages=stages)


if __name__ == "__main__":
    border = sys.argv.index("--")
    targets = [int(text) if text.isdigit() else text for text in sys.argv[1:border]]
    sizes = map(int, sys.argv[border + 1 :])
    found = {}
    for target, head_size in itertools.product(targets, sizes):
        for name in PORTABLE:
            found[f"{target} {name} {head_size}"] = of_portable(target, name, head_size)
        for name in AMPERE if target in AMPERE_TILES and head_size <= 256 else ():
            found[f"{target} {name} {head_size}"] = of_ampere(target, name, head_size)
    json.dump(found, sys.stdout)
