"""Compile kernels for GPUs that need not be there; print as JSON what the compiler says of each.

    compile_report.py hopper NAME ...             such as "forward 96" "unpack 88"
    compile_report.py attention TARGET SIZE ...   of heads, for other cards, such as 80 gfx942
    compile_report.py elementwise TARGET          between the matmuls, and of decoding

A script of its own: it needs Triton's compiler, and the other tests of a machine without a GPU run
in Triton's interpreter.
"""

import io
import json
import re
import sys
from contextlib import redirect_stdout

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

from longctx.kernels.attention import (
    ampere,
    decoding,
    hopper_backward,
    hopper_forward,
    hopper_size,
    portable,
)
from longctx.kernels.attention.hopper_primitives import ROW_LAYOUT, shared_layout, split
from longctx.kernels.attention.launch import padded, table
from longctx.kernels.elementwise import (
    adamw_update,
    cross_entropy,
    quantize,
    rms_norm,
    rotary,
    swiglu,
)

# a cached kernel comes without what ptxas said of it
triton.knobs.compilation.always_compile = True
triton.knobs.nvidia.dump_ptxas_log = True
INTEGERS = ("first", "last", "qfirst", "qlast", "semaphores", "counter", "retry")
SCALARS = dict.fromkeys(INTEGERS, "*i32") | {"lse": "*fp32", "sums": "*fp32"}
DTYPE = gl.bfloat16


def report(source_type, kernel, types, constants, target, warps, multiples=None, **options):
    """Return what the compiler says of a kernel for `target`, such as 90 or gfx942.

    Parameters without one of `types` are constants, scales or whole numbers; a type of None is that
    of a parameter that is None. Pointers are divisible by 16, or else parameters in `multiples`.
    """
    constants = constants | {name: None for name, type in types.items() if type is None}
    constants = {name: value for name, value in constants.items() if name in kernel.arg_names}
    types = types | dict.fromkeys(constants, "constexpr")
    signature = {
        name: types.get(name) or ("fp32" if name.startswith("scale") else "i32")
        for name in kernel.arg_names
    }
    if multiples is None:
        multiples = [name for name, type in signature.items() if type.startswith("*")]
    numbers = [i for i, name in enumerate(kernel.arg_names) if name in multiples]
    aligned = {(i,): [["tt.divisibility", 16]] for i in numbers}
    is_amd = isinstance(target, str)
    gpu = GPUTarget("cuda", target, 32)
    if is_amd:
        gpu = GPUTarget("hip", target, 64 if target.startswith("gfx9") else 32)
    source = source_type(kernel, signature, constants, aligned)
    with redirect_stdout(io.StringIO()) as log:
        # Triton's own call, which knows its ptxas and its options
        compiled = triton.compile(source, target=gpu, options={"num_warps": warps, **options})
    text = compiled.asm["amdgcn"] if is_amd else log.getvalue()
    assert is_amd or "Used" in text, "Triton printed no log of ptxas"
    spills = r"ScratchSize: (\d+)" if is_amd else r"(\d+) bytes spill stores"
    return {
        "spilled": sum(map(int, re.findall(spills, text))),
        "shared": compiled.metadata.shared,
        "warnings": re.findall(r"C7\d+", log.getvalue()),
    }


def box(rows, columns):
    """Return the type of a tensor map, or None without columns."""
    shape = 1, rows, 1, columns
    return f"tensordesc<{DTYPE}{list(shape)},{shared_layout(shape, DTYPE)!r}>" if columns else None


def boxes(rows, head_dim):
    """Return the types of tensor maps with so many `rows`, for both parts of the channels."""
    width, rest = split(head_dim)
    types = {name: box(n, width) for name, n in rows.items()}
    return types | {f"{name}1": box(n, rest) for name, n in rows.items()}


def plain(rows, columns):
    return f"tensordesc<fp32{[rows, columns]},{ROW_LAYOUT!r}>"


def forward(head_dim, retry):
    c = hopper_forward.CONFIGS[head_dim]
    constants = hopper_forward.constants_of(c, head_dim, 1, DTYPE, retry)
    types = SCALARS | boxes({"q": 64, "k": c.BN, "v": c.BN, "out": 64}, head_dim)
    return report(GluonASTSource, hopper_forward.forward_kernel, types, constants, 90, 4)


def backward(head_dim, ordered, group):
    c = hopper_backward.CONFIGS.get(head_dim)
    constants = hopper_backward.constants_of(c, head_dim, group, DTYPE, ordered)
    if c is None:
        large = hopper_backward.LARGE[head_dim]
        kernel, queries = large.kernel, hopper_backward.LARGE_QUERIES
        types = {name: box(queries, large.width) for name in ("q", "do")}
        types |= {name: box(large.box, large.width) for name in ("k", "v", "dk", "dv")}
    else:
        kernel, queries = hopper_backward.backward_kernel, c.BM
        rows = {"q": c.BM, "do": c.BM, "k": c.BN, "v": 64, "dk": 64, "dv": 64}
        types = boxes(rows, head_dim)
        types["dq1"] = plain(8, 256) if types["q1"] else None
    types |= SCALARS | {"lse2": plain(1, queries), "delta": plain(1, queries), "dq": plain(16, 256)}
    return report(GluonASTSource, kernel, types, constants, 90, 4)


def unpack(head_dim):
    """Compile the kernel that sorts dq's sums of heads computed as the next size."""
    size = hopper_size(head_dim)
    BM = hopper_backward.CONFIGS[size].BM if size <= 128 else 64
    types = {"sums": "*fp32", "out": "*bf16"}
    constants = {"D": head_dim, "PAD": size, "BM": BM}
    return report(ASTSource, hopper_backward.unpack_kernel, types, constants, 90, 8)


def of_hopper(*names):
    """Yield each name and the report on its kernel."""
    for name in names:
        *words, head_dim = name.split()
        if "unpack" in words:
            yield name, unpack(int(head_dim))
        elif "forward" in words:
            yield name, forward(int(head_dim), "retry" in words)
        else:
            group = 4 if "groups" in words else 1
            yield name, backward(int(head_dim), "ordered" in words, group)


# The other attention kernels, for the cards of TARGET

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


def of_attention(target, *sizes):
    """Yield the name and the report of each attention kernel but those of Hopper."""
    for head_size in map(int, sizes):
        for name in PORTABLE:
            yield f"{name} {head_size}", of_portable(target, name, head_size)
        for name in AMPERE if target in AMPERE_TILES and head_size <= 256 else ():
            yield f"{name} {head_size}", of_ampere(target, name, head_size)


# The kernels between the matmuls, and of decoding

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


def of_elementwise(target):
    """Yield the name and the report of each kernel between the matmuls, and of decoding."""
    cases = {
        "bf16": [*of_one_dtype(target, "bf16"), *in_16_bits()],
        "fp32": [*of_one_dtype(target, "fp32"), *of_decoding(target, 128, 4)],
    }
    for D in (64, 128, 256):
        cases["bf16"] += of_decoding(target, D, 2)
    for dtype, kernels in cases.items():
        for name, kernel, warps, aligned, constants in kernels:
            types = {name: KINDS.get(name, f"*{dtype}") for name in kernel.arg_names}
            found = report(ASTSource, kernel, types, constants, target, warps, aligned)
            yield f"{name} {dtype}", found


if __name__ == "__main__":
    reports = {"hopper": of_hopper, "attention": of_attention, "elementwise": of_elementwise}
    words = [int(word) if word.isdigit() else word for word in sys.argv[2:]]
    json.dump(dict(reports[sys.argv[1]](*words)), sys.stdout)
