"""Compile kernels for GPUs that need not be there; print as JSON what the compiler says of each.

    compile_report.py 90 hopper NAME ...          such as "forward 96" "unpack 88"; "96": all of 96
    compile_report.py TARGET attention SIZE ...   of heads, for other cards, such as 80 gfx942;
                                                  "64 bias" with a key bias
    compile_report.py TARGET elementwise          between the matmuls, and of decoding

The package launches its kernels for tensors of a CPU, and in the place of each launch Triton
compiles for TARGET. A script of its own: it needs Triton's compiler, and the other tests of a
machine without a GPU run in Triton's interpreter.
"""

import io
import json
import re
import sys
from contextlib import redirect_stdout

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from longctx.attention import Mask
from longctx.kernels.attention import (
    Intervals,
    Saved,
    Scores,
    ampere,
    decoding,
    hopper_backward,
    hopper_forward,
    launch,
    portable,
)
from longctx.kernels.elementwise.adamw_update import adamw_
from longctx.kernels.elementwise.cross_entropy import cross_entropy_, multiply_
from longctx.kernels.elementwise.quantize import quantize
from longctx.kernels.elementwise.rms_norm import rms_norm, rms_norm_backward
from longctx.kernels.elementwise.rotary import rope, rope_backward
from longctx.kernels.elementwise.swiglu import swiglu, swiglu_backward

# a cached kernel comes without what ptxas said of it
triton.knobs.compilation.always_compile = True
triton.knobs.nvidia.dump_ptxas_log = True
AMPERE_TILES = {80: 163, 86: 99, 120: 99}  # of the cards that take them: KiB of shared memory
TOKENS, LONG = 333, 8333  # that 16 does not divide; from 8,192 on some kernels have other tiles
BF16, FP32 = torch.bfloat16, torch.float32
SPANS = "short", "medium", "packed", "window", "brief"


class Compiler:
    """In the place of Triton's driver: it compiles what is launched, for a target such as 90 or
    gfx942, and keeps the largest figures of each kernel and `case`.
    """

    def __init__(self, target: int | str) -> None:
        self.target, self.is_amd = target, isinstance(target, str)
        self.reports: dict[str, dict] = {}
        self.case, self.is_wanted = "", lambda kernel, constants: True

    def get_current_target(self):
        if self.is_amd:
            return GPUTarget("hip", self.target, 64 if self.target.startswith("gfx9") else 32)
        return GPUTarget("cuda", self.target, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0

    def install(self):
        """Make the package and Triton believe that CPU tensors are on a GPU of the target."""
        driver.set_active(self)
        JITFunction.__getitem__ = lambda kernel, grid: (
            lambda *args, **kwargs: self.compile(kernel, grid, args, kwargs)
        )
        torch.cuda.current_device = lambda: -1  # get_device() of a CPU's tensors
        torch.version.hip = self.target if self.is_amd else None
        maps = not self.is_amd and self.target >= 90
        portable._use_tma = lambda q: maps and not q.shape[3] & (q.shape[3] - 1)
        ampere.shared_memory = lambda device: AMPERE_TILES[self.target]
        card = f"sm{self.target}"
        launch.architecture = lambda *_: card if card in launch.table() else "any"

    def compile(self, kernel, grid, args, kwargs):
        if self.is_wanted(kernel.__name__, kwargs):
            with redirect_stdout(io.StringIO()) as log:
                compiled = kernel.run(*args, grid=grid, warmup=True, **kwargs)
            text = compiled.asm["amdgcn"] if self.is_amd else log.getvalue()
            self.keep(kernel, compiled.metadata.shared, text)
        return {(grid[0], 1, 1): None}  # a launcher that nobody calls

    def keep(self, kernel, shared, text):
        """Keep the figures of `text`, without any if the kernel was compiled before."""
        file = kernel.__module__.rpartition(".")[2]
        spilled = re.findall(r"ScratchSize: (\d+)|(\d+) bytes spill stores", text)
        if not spilled:
            return
        figures = self.reports.setdefault(
            f"{file} {kernel.__name__} {self.case}", {"spilled": 0, "shared": 0, "warnings": []}
        )
        figures["spilled"] = max(figures["spilled"], sum(int(a or b) for a, b in spilled))
        figures["shared"] = max(figures["shared"], shared)
        figures["warnings"] += re.findall(r"C7\d+", text)


def attend(forward, backward, head_dim, words=(), tokens=TOKENS, **options):
    """Launch a forward and a backward of causal attention, with what `words` name."""
    heads = 24 if "groups" in words else 3
    q, k, v = (torch.zeros(1, tokens, n, head_dim, dtype=BF16) for n in (heads, 3, 3))
    span = next((word for word in words if word in SPANS), "long")
    mask = Mask.causal().bind(1, tokens, tokens, "cpu")
    intervals = Intervals(mask.first, mask.last, mask.qfirst, mask.qlast, span, mask.first)
    sinks = torch.zeros(heads) if "sinks" in words else None
    bias = torch.zeros(1, heads, tokens) if "bias" in words else None
    scores = Scores(head_dim**-0.5, 30.0 if "softcap" in words else None, sinks, bias)
    out, lse = forward(q, k, v, intervals, scores)
    backward(out, None, Saved(q, k, v, out, lse), intervals, scores, **options)


def of_hopper(compiler, *names):
    for name in names:
        *words, head_dim = name.split()
        kind = next((word for word in ("forward", "backward", "unpack") if word in words), "")
        compiler.case = name
        for module in (hopper_forward, hopper_backward):
            module._launches.clear()  # or the same shapes are launched another way
        hopper_backward.heads_in_l2 = lambda *_, few="ahead" in words: 1 if few else 1 << 20
        compiler.is_wanted = lambda kernel, _, kind=kind: kernel.startswith(kind)
        passes = hopper_forward.forward, hopper_backward.backward
        attend(*passes, int(head_dim), words, ordered="ordered" in words)


def of_attention(compiler, *sizes):
    for name in sizes:
        compiler.case, (size, *words) = name, name.split()
        for tokens in (TOKENS, LONG):
            also = ["sinks"] if tokens == LONG else []
            attend(portable.forward, portable.backward, int(size), [*words, *also], tokens)
        if compiler.target in AMPERE_TILES and int(size) <= 256:
            for also in ([], ["sinks"]):
                attend(ampere.forward, ampere.backward, int(size), [*words, *also])


def of_elementwise(compiler):
    def zeros(*shape, dtype):
        return torch.zeros(shape, dtype=dtype)

    one = torch.ones(())
    for dtype in (BF16, FP32):
        for V in (300, 50304, 128256):
            compiler.case = f"{V} {dtype}"
            target, loss = torch.zeros(2, dtype=torch.long), torch.zeros(2)
            cross_entropy_(zeros(2, V, dtype=dtype), target, loss, one, 0.0, torch.zeros(2))
        compiler.case = str(dtype)
        # GPUs before 8.9 have no FP8, AMD's another one
        if not compiler.is_amd and compiler.target >= 89:
            quantize(zeros(TOKENS, 768, dtype=dtype), None, torch.float8_e4m3fn, True, True)
        p, m, v = torch.zeros(3, TOKENS)
        adamw_(p, zeros(TOKENS, dtype=dtype), m, v, one, torch.zeros(3), (0.9, 0.95), 1e-8)
        for D in (64, 128, 256) if dtype == BF16 else (128,):
            compiler.case = f"{D} {dtype}"
            k = zeros(1, TOKENS, 2, D, dtype=dtype)
            ends = torch.zeros(2, 1, dtype=torch.int32)
            decoding.decode(zeros(1, 8, D, dtype=dtype), k, k, *ends, 0.1, 5)
    for width in (384, 8192):
        compiler.case = str(width)
        act, gate_up = zeros(TOKENS, width, dtype=BF16), zeros(TOKENS, 2 * width, dtype=BF16)
        swiglu(gate_up)
        swiglu_backward(gate_up, act)
    for C in (768, 2048, 4096):
        compiler.case = str(C)
        x, weight = zeros(TOKENS, C, dtype=BF16), torch.ones(C)
        rms_norm(x, x, weight, 1e-5)
        rms_norm_backward(x, x, torch.zeros(TOKENS), weight, x)
    for D in (64, 128, 256):
        compiler.case = str(D)
        cos = torch.zeros(TOKENS, D // 2)
        q, k = rope(zeros(TOKENS, 48 * D, dtype=BF16), cos, cos, 32, 8)
        rope_backward(q, k, k, cos, cos)
    multiply_(zeros(TOKENS, dtype=BF16), one)


if __name__ == "__main__":
    compiler = Compiler(int(sys.argv[1]) if sys.argv[1].isdigit() else sys.argv[1])
    compiler.install()
    works = {"hopper": of_hopper, "attention": of_attention, "elementwise": of_elementwise}
    works[sys.argv[2]](compiler, *sys.argv[3:])
    json.dump(compiler.reports, sys.stdout)
