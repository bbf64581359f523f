"""Compile Hopper's kernels for a GPU that need not be there; print as JSON what the compiler says.

    compile_report.py NAME ...     such as "forward 96" "ordered backward of groups 64" "unpack 88"

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

from longctx.kernels.attention import hopper_backward, hopper_forward, hopper_size
from longctx.kernels.attention.hopper_primitives import ROW_LAYOUT, shared_layout, split

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


def of_hopper(name):
    *words, head_dim = name.split()
    if "unpack" in words:
        return unpack(int(head_dim))
    if "forward" in words:
        return forward(int(head_dim), "retry" in words)
    return backward(int(head_dim), "ordered" in words, 4 if "groups" in words else 1)


if __name__ == "__main__":
    json.dump({name: of_hopper(name) for name in sys.argv[1:]}, sys.stdout)
