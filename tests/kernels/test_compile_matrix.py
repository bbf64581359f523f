"""The attention kernels, but those of Hopper, compile for cards that people own, and fit them.

sm_89 runs the code of sm_86. RDNA 3 is compiled for heads of 64 alone: its compiler takes a minute
for the wide ones. Kernels between the matmuls and of decoding have a test in test_compile.py.
"""

import pytest
import triton

from tests.kernels.test_compile import TUNED, compile_all

SIZES = ("64", "96", "128", "256")  # of heads, one for each class of tiles
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
    reports = compile_all([target, "--", *sizes], "compile_matrix.py")
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
    for target in ("80", "90", "120", "gfx942"):
        reports = compile_all([target, "--", "512"], "compile_matrix.py")
        assert len(reports) == 3
        assert max(report["shared"] for report in reports.values()) <= CARDS[target][0] * 1024
        assert max(report["spilled"] for report in reports.values()) < 3200


@pytest.mark.slow
@pytest.mark.parametrize("target", CARDS)
def test_every_head_size_fits(target: str) -> None:
    # the portable kernels take the tiles of 128 channels for 96
    portable = [size for size in SIZES if size != "96"]
    sizes = SIZES if target in AMPERE else portable
    check_fits(target, *(sizes if target != "gfx1100" else SIZES[:1]))
