"""The correctness rule that every backend is held to, and the grid of shapes and masks that it is
held to on.

For the output and every gradient: max |x − x64| <= 2 · max |x_naive − x64| + a rounding floor,
where x64 is naive attention in fp64 and x_naive is naive attention in the precision under test
(flash-attention's own rule).
"""

from dataclasses import dataclass

import torch

from longctx.attention import Mask, attention

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ON_GPU = DEVICE == "cuda"


@dataclass
class Case:
    """B rows, Tq queries, Tk keys, Hq and Hkv heads of size D."""

    B: int
    Tq: int
    Tk: int
    Hq: int = 2
    Hkv: int = 2
    D: int = 32
    mask: str = "causal"
    window: int | None = None

    def __str__(self) -> str:
        window = f"-w{self.window}" if self.window else ""
        return f"{self.mask}{window}-{self.B}x{self.Tq}x{self.Tk}-h{self.Hq}.{self.Hkv}-d{self.D}"

    def build_mask(self) -> Mask:
        if self.mask == "full":
            return Mask.full()
        if self.mask == "causal":
            return Mask.causal(self.window)
        if self.mask == "first keys":
            first = torch.zeros(self.B, self.Tq, dtype=torch.long)
            return Mask.intervals(first, first + self.Tk // 8)
        g = torch.Generator().manual_seed(self.Tq)
        if self.mask == "documents":
            ids = torch.randint(0, 5, (self.B, self.Tq), generator=g).sort(1).values
            return Mask.documents(ids, self.window)
        first = torch.randint(0, self.Tk + 1, (self.B, self.Tq), generator=g).sort(1).values
        # -1 and 0: sees nothing
        length = torch.randint(-1, self.Tk // 2 + 2, (self.B, self.Tq), generator=g)
        return Mask.intervals(first, (first + length - 1).clamp(max=self.Tk - 1).cummax(1).values)


# On a CPU kernels are interpreted, in tiles of 32 × 16: half the size walks over as many
SIZE = 2 if ON_GPU else 1
LENGTHS = (1, 63, 64, 65, 127, 129, 257, 799, 1023, 4224) if ON_GPU else (1, 33, 65)
ROWS = HEADS = 2 if ON_GPU else 1  # the interpreter takes a second for a row; other cases have two
GRID = [
    *(Case(ROWS, T, T) for T in LENGTHS),
    *(Case(1, a * SIZE, b * SIZE) for a, b in ((1, 33), (31, 65), (65, 31))),
    Case(1, 65 * SIZE, 33 * SIZE, mask="full"),
    Case(1, 31 * SIZE, 49 * SIZE, Hq=6, Hkv=2),
    Case(2, 65 * SIZE, 65 * SIZE, Hq=2, Hkv=1, mask="documents"),
    Case(1, 65 * SIZE, 65 * SIZE, Hq=4, Hkv=2, mask="documents", window=8 * SIZE),
    Case(1, 33 * SIZE, 65 * SIZE, window=16),
]
if ON_GPU:
    GRID += [Case(2, 799, 799, Hq=4, Hkv=2, mask="documents"), Case(1, 1023, 1023, window=100)]
FREE = [Case(2, 39, 47, mask="intervals"), Case(1, 129, 65, Hq=4, Hkv=2, mask="intervals")]
FREE = FREE if ON_GPU else FREE[:1]
SIZES = (16, 24, 64, 80, 96, 128, 192, 256, 512)
HEAD_SIZES = [Case(1, 33 * SIZE, 33 * SIZE, HEADS, HEADS, D=D) for D in SIZES]
NAMES = ("out", "lse", "dq", "dk", "dv")


def inputs(case: Case, dtype: torch.dtype) -> list[torch.Tensor]:
    """q, k, v, do of the case, on the device under test."""
    g = torch.Generator().manual_seed(case.Tq * 7 + case.Tk)
    of_q, of_k = (case.B, case.Tq, case.Hq, case.D), (case.B, case.Tk, case.Hkv, case.D)
    shapes = of_q, of_k, of_k, of_q
    return [torch.randn(shape, generator=g).to(DEVICE, dtype) for shape in shapes]


def run(tensors, mask, backend, dtype, sinks=None, key_bias=None, **options):
    """out, lse, dq, dk, dv, then dsinks and dkey_bias if there are any, in fp64."""
    leaves = [x.detach().to(dtype).requires_grad_() for x in tensors[:3]]
    for name, x in (("sinks", sinks), ("key_bias", key_bias)):
        if x is not None:
            options[name] = x.detach().requires_grad_()
            leaves.append(options[name])
    out, lse = attention(*leaves[:3], mask=mask, backend=backend, return_lse=True, **options)
    grads = torch.autograd.grad(out, leaves, tensors[3].to(dtype))
    return [x.detach().double() for x in (out, lse, *grads)]


def check_equal_runs(case: Case, tensors, times: int, names=NAMES, **options) -> None:
    """Assert that `times` more runs of flash equal a first one, bit for bit, gradients too."""
    expected = run(tensors, case.build_mask(), "flash", torch.bfloat16, **options)
    for _ in range(times):
        actual = run(tensors, case.build_mask(), "flash", torch.bfloat16, **options)
        for name, x, y in zip(NAMES, actual, expected, strict=True):
            assert name not in names or torch.equal(x, y), name


def check(case: Case, backend: str, dtype=torch.float32, tensors=None, **options) -> None:
    """Assert the rule for `backend` on `case`; `options` have parts of `Scores`, too."""
    tensors = inputs(case, dtype) if tensors is None else tensors
    mask = case.build_mask()
    scores = {name: options.pop(name, None) for name in ("softcap", "sinks", "key_bias")}
    exact = run(tensors, mask, "naive", torch.float64, **scores)
    plain = run(tensors, mask, "naive", dtype, **scores)
    actual = run(tensors, mask, backend, dtype, **scores, **options)
    learned = [f"d{name}" for name in ("sinks", "key_bias") if scores[name] is not None]
    for name, x, y, z in zip((*NAMES, *learned), actual, plain, exact, strict=True):
        assert not x.isnan().any(), f"{name} has NaN"
        if name == "lse":
            blind = z == float("-inf")
            assert torch.equal(x == float("-inf"), blind), "-inf where nothing is seen alone"
            x, y, z = (t.nan_to_num(neginf=0.0) for t in (x, y, z))
        epsilon = torch.finfo(torch.float32 if name == "lse" else dtype).eps
        floor = epsilon * (8 + 2 * z.abs().max().item())
        error, allowed = (x - z).abs().max().item(), 2 * (y - z).abs().max().item() + floor
        assert error <= allowed, f"{name}: error {error:.2e} above {allowed:.2e}"
