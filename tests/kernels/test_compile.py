"""The kernels compile for GPUs that are not there: they fit, and on Hopper ptxas keeps their
products asynchronous.
"""

import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import triton

SHARED_MEMORY = {"sm90": 227 * 1024, "any": 99 * 1024}  # bytes that a program may have
# the forward spills up to 172 bytes on 3.8 and 3.9, the backward of 64 up to 136 on 3.9
TUNED = ("3.6.", "3.7.")
# in seconds; the others take half a minute and more
FAST = ("backward 64", *(f"unpack {head_dim}" for head_dim in (64, 88, 128, 184, 256)))
PARTS = ("forward retry", "ordered backward", "backward of groups", "ordered backward of groups")
OWN_TILES = (
    *(f"{part} {size}" for part in ("forward", "backward") for size in (96, 192, 256)),
    "ordered backward 96",
    "ordered backward 192",
    "ordered backward 256",
)
WIDE = ("backward 256", "ordered backward 256")  # take more, and need little L1 cache
GROUPS = (  # those that one process compiles, for there is only one Triton in each
    FAST,
    ("forward 64", "forward 128", "backward 128", "sm90"),
    (*(f"{part} {size}" for part in PARTS for size in (64, 128)), "any"),
    OWN_TILES,
)


@functools.cache
def compile_all(names):
    script = Path(__file__).with_name("compile_report.py")
    env = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    folders = [str(script.parents[2]), env.get("PYTHONPATH")]
    env["PYTHONPATH"] = os.pathsep.join(filter(None, folders))
    command = [sys.executable, script, *names]
    compiler = subprocess.run(command, capture_output=True, text=True, env=env)
    assert compiler.returncode == 0, compiler.stderr[-2000:]
    return json.loads(compiler.stdout)


def report(name):
    """What the compiler says of `name`, compiled with all others of its group."""
    return compile_all(next(group for group in GROUPS if name in group))[name]


def each(hopper):
    """The names of Hopper kernels, or of architectures."""
    return [
        pytest.param(name, marks=() if name in FAST else pytest.mark.slow)
        for group in GROUPS
        for name in group
        if (name not in SHARED_MEMORY) == hopper
    ]


@pytest.mark.parametrize("kernel", each(hopper=True))
def test_products_stay_asynchronous_and_fit(kernel):
    assert report(kernel)["warnings"] == [], "C7512: ptxas serializes the products"
    # more than 195 would leave less than 60 KiB of L1 cache
    assert report(kernel)["shared"] <= (227 if kernel in WIDE else 195) * 1024


@pytest.mark.skipif(
    not triton.__version__.startswith(TUNED),
    reason="tiles and registers were chosen with Triton 3.6 and 3.7",
)
@pytest.mark.parametrize("kernel", each(hopper=True))
def test_nothing_spills(kernel):
    assert report(kernel)["spilled"] == 0


@pytest.mark.parametrize("arch", each(hopper=False))
def test_every_shipped_tile_fits(arch):
    sizes = report(arch)
    assert sizes
    assert {key: size for key, size in sizes.items() if size > SHARED_MEMORY[arch]} == {}
