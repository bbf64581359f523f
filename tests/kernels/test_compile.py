"""The kernels compile for GPUs that are not there: they fit, and on Hopper ptxas keeps their
products asynchronous.

A test compiles many kernels in one process: imports take longer than a kernel, and with a test for
each kernel every worker of pytest-xdist would compile them all. Each kernel is compiled for each
head size, with dq ordered and not. Left out is what hardly differs from another case: the forward's
retry, but for 64 channels, the only size whose retry has a loop of its own for masked tiles; and
groups of heads, but for 128 channels not ordered, where they change the order of walks, and for 64
ordered, where they take the place of the case without groups.
"""

import json

import pytest
import triton

from tests.processes import ROOT, finished

# the forward spills up to 172 bytes on 3.8 and 3.9, the backward of 64 up to 136 on 3.9
TUNED = ("3.6.", "3.7.")  # versions of Triton that tiles and registers were chosen with
# in seconds; the others take half a minute and more
FAST = ("backward 64", *(f"unpack {head_dim}" for head_dim in (64, 88, 128, 184, 256)))
SLOW = (
    *("forward retry 64", "ordered backward of groups 64"),
    *("backward 128", "backward of groups 128", "ordered backward 128"),
    *(f"forward {head_dim}" for head_dim in (64, 96, 128, 192, 256)),
    *(f"{order}backward {head_dim}" for order in ("", "ordered ") for head_dim in (96, 192, 256)),
)
# bytes stored, of numbers that are needed once for a tile of keys
SPILLED = {"ordered backward 192": 16}


def compile_all(*words):
    """Return the compiler's report on each kernel; `words` are those of compile_report.py."""
    # a process of its own: there is only one Triton in each, the compiler or the interpreter
    compiler = finished(ROOT / "tests/kernels/compile_report.py", words, ROOT)
    assert compiler.returncode == 0, compiler.stderr[-2000:]
    return json.loads(compiler.stdout)


@pytest.mark.parametrize(
    "kernels", [FAST, pytest.param(SLOW, marks=pytest.mark.slow)], ids=("fast", "slow")
)
def test_hopper_products_stay_asynchronous(kernels):
    reports = compile_all("hopper", *kernels)
    assert reports.keys() == set(kernels)
    warnings = {name: report["warnings"] for name, report in reports.items()}
    assert not any(warnings.values()), f"C7512: ptxas serializes the products: {warnings}"
    sizes = {name: report["shared"] for name, report in reports.items()}
    assert {name: size for name, size in sizes.items() if size > 227 * 1024} == {}
    if triton.__version__.startswith(TUNED):
        spilled = {name: report["spilled"] for name, report in reports.items()}
        assert {name: n for name, n in spilled.items() if n > SPILLED.get(name, 0)} == {}


@pytest.mark.slow
@pytest.mark.parametrize("target", ["80", "90", "120", "gfx1100"])
def test_little_spills_between_the_matmuls(target):
    reports = compile_all("elementwise", target)
    # RDNA 3 has no matrix units for fp32, which decodes in six products of bf16
    most = {"120": 4, "gfx1100": 3700}.get(target, 0)
    assert max(report["spilled"] for report in reports.values()) <= most


# The other attention kernels, for cards that people own. sm_89 runs the code of sm_86. RDNA 3 is
# compiled for heads of 64 alone: its compiler takes a minute for the wide ones.

# target → (KiB of shared memory that a program may have, largest spill in bytes with the versions
# of Triton in TUNED). Most spill: tiles of 128 channels need more registers than mma.sync leaves.
AMPERE = ("80", "86", "120")  # have the kernels for mma.sync, which spill up to 260 bytes
CARDS = {
    "80": (163, 1300),  # A100
    "86": (99, 1300),  # A10, RTX 3090; as sm_89: L4, L40S, RTX 4090
    "90": (227, 400),  # H100, H200, if kernel=portable
    "100": (227, 1400),  # B200
    "120": (99, 1600),  # RTX 5090, RTX PRO 6000
    "gfx942": (64, 0),  # MI300X
    "gfx1100": (64, 2000),  # RX 7900
}


def check_fits(target: str, *sizes: str) -> None:
    shared, spilled = CARDS[target]
    reports = compile_all("attention", target, *sizes)
    assert len(reports) == (6 if target in AMPERE else 3) * len(sizes)
    assert {k: r for k, r in reports.items() if r["shared"] > shared * 1024} == {}
    if triton.__version__.startswith(TUNED):
        limits = {name: 260 if "ampere" in name else spilled for name in reports}
        assert {k: r for k, r in reports.items() if r["spilled"] > limits[k]} == {}


def test_heads_of_64_fit_an_a100():
    check_fits("80", "64")


@pytest.mark.slow
def test_heads_of_512_fit():
    """Tiles that are short of registers keep parts of their sums elsewhere."""
    for target in ("120", "gfx942"):  # with the least shared memory
        reports = compile_all("attention", target, "512")
        assert len(reports) == 3
        assert max(report["shared"] for report in reports.values()) <= CARDS[target][0] * 1024
        assert max(report["spilled"] for report in reports.values()) < 3200


@pytest.mark.slow
@pytest.mark.parametrize("target", CARDS)
def test_every_head_size_fits(target: str) -> None:
    # one size for each class of tiles; those of 96 channels are the portable kernels' of 128
    sizes = {"80": ("96", "128", "256"), "86": ("64", "96", "128", "256"), "gfx1100": ("64",)}
    check_fits(target, *sizes.get(target, ("64", "128", "256")))
