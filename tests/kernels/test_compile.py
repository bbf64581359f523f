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
FAST = ["forward 64", "forward 128", "backward 64", "backward 128", "sm90"]
PARTS = ("forward retry", "ordered backward", "backward of groups", "ordered backward of groups")
SLOW = [*(f"{part} {size}" for part in PARTS for size in (64, 128)), "any"]


@functools.cache
def compile_all(names):
    script = Path(__file__).with_name("compile_report.py")
    env = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    folders = [str(script.parents[2]), env.get("PYTHONPATH")]
    env["PYTHONPATH"] = os.pathsep.join(filter(None, folders))
    command = [sys.executable, script, *names]
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


def report(name):
    """What the compiler says of `name`, compiled with all others that are as slow."""
    return compile_all(tuple(FAST if name in FAST else SLOW))[name]


def each(hopper):
    """The names of Hopper kernels, or of architectures."""
    return [
        pytest.param(name, marks=pytest.mark.slow if name in SLOW else ())
        for name in FAST + SLOW
        if (name not in SHARED_MEMORY) == hopper
    ]


@pytest.mark.slow
@pytest.mark.parametrize("kernel", each(hopper=True))
def test_products_stay_asynchronous_and_fit(kernel):
    assert report(kernel)["warnings"] == [], "C7512: ptxas serializes the products"
    assert report(kernel)["shared"] <= 195 * 1024  # more would leave less than 60 KiB of L1 cache


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
