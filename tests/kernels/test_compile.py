"""The kernels compile for GPUs that are not there: they fit, and on Hopper ptxas keeps their
products asynchronous.

compiled.json has what each version of the compiler said of these sources, so that only other ones
take minutes: after a change of kernels, LONGCTX_RECORD=1 pytest tests/kernels/test_compile.py.
"""

import functools
import hashlib
import json
import os
import re
import warnings
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import triton
import yaml

from tests.processes import PYTHONPATH, ROOT, finished, install, newest_version

TUNED = ("3.6.", "3.7.")  # versions that tiles and registers were chosen with; 3.9 spills more
HOPPER, EVERY, CARDS = yaml.safe_load((ROOT / "tests/kernels/cases.yaml").read_text()).values()
LIVE = ("120", "attention", "64 bias")  # compiled each time, to what is recorded
AMPERE = ("80", "86", "120")  # have the kernels for mma.sync
RECORD, SCRIPT = (Path(__file__).with_name(x) for x in ("compiled.json", "compile_report.py"))
PACKAGE = ROOT / "longctx/kernels"
KINDS = {
    "hopper": [*PACKAGE.glob("attention/hopper_*ward.py")],
    "attention": [PACKAGE / "attention/portable.py", PACKAGE / "attention/ampere.py"],
    "elementwise": [PACKAGE / "attention/decoding.py", *PACKAGE.glob("elementwise/*.py")],
}


@functools.cache
def digest_of(kind):
    """Return a hash of the files that make kernels of this kind, with what they import."""
    found, left = {SCRIPT, *PACKAGE.rglob("*.json"), *PACKAGE.rglob("__init__.py")}, KINDS[kind]
    while left := [x for x in left if x not in found]:
        found |= {*left}
        texts = "".join(x.read_text() for x in left)
        names = re.findall(r"^ *from longctx\.kernels\.(\w+)\.(\w+) import", texts, re.MULTILINE)
        left = [PACKAGE / folder / f"{name}.py" for folder, name in names]
    return hashlib.sha256(b"".join(x.read_bytes() for x in sorted(found))).hexdigest()[:16]


def compile_all(*words, version=triton.__version__, place=None):
    """Return the compiler's report on each kernel; `words` are those of compile_report.py. Another
    version than the installed one is installed in the folder `place`.
    """
    record, case = json.loads(RECORD.read_text()), " ".join([digest_of(words[1]), version, *words])
    if case not in record or words == LIVE:
        if place and not os.listdir(place):
            install(f"triton=={version}", "--no-deps", f"--target={place}")
        path = os.pathsep.join(filter(None, [place, PYTHONPATH]))
        # a process of its own: there is only one Triton in each, the compiler or the interpreter
        compiler = finished(SCRIPT, words, ROOT, PYTHONPATH=path)
        assert compiler.returncode == 0, f"{words}, {path}: {compiler.stderr[-2000:]}"
        report = json.loads(compiler.stdout)
        assert record.setdefault(case, report) == report
        if os.environ.get("LONGCTX_RECORD"):
            new = (*map(digest_of, KINDS),)
            lines = (f'"{x}": {json.dumps(y)}' for x, y in record.items() if x.startswith(new))
            RECORD.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    return record[case]


def test_walks_take_each_tile_of_each_head_once():
    steps = "[query_tile.fn(x, 7, 3, False, 2, how.value) for x in range(6)]"
    names = "from longctx.kernels.attention.hopper_order import *"
    walks = f"{names}; print([{steps} for how in (UP, DOWN, BY_HEAD)])"
    walked = finished("-c", (walks,), ROOT)
    up, down, by_head = json.loads(walked.stdout.replace("(", "[").replace(")", "]"))
    assert up == [[7, 0], [7, 1], [8, 0], [8, 1], [9, 0], [9, 1]]
    assert down == sorted(up, key=lambda step: -step[0])
    assert by_head == sorted(up, key=lambda step: step[1])


@pytest.mark.slow
@pytest.mark.parametrize("version", ["3.6.0", "newest"])
def test_oldest_and_newest_triton_compile_every_kernel(version):
    version, spilled = newest_version("triton") if version == "newest" else version, {}
    with TemporaryDirectory(prefix="triton-") as folder:
        for shared, *case in EVERY:
            reports = compile_all(*case, version=version, place=folder)
            assert {k: r for k, r in reports.items() if r["shared"] > shared * 1024} == {}, version
            spilled |= {k: r["spilled"] for k, r in reports.items() if r["spilled"]}
    # pytest's summary says which version it was
    warnings.warn(f"Triton {version} compiles every kernel; bytes spilled: {spilled}", stacklevel=1)


@pytest.mark.parametrize("which", ["fast", pytest.param("slow", marks=pytest.mark.slow)])
def test_hopper_products_stay_asynchronous(which):
    kernels, few = HOPPER[which], HOPPER["spilled"]
    reports = compile_all("90", "hopper", *kernels)
    assert len(reports) == len(kernels)
    warnings = {name: report["warnings"] for name, report in reports.items()}
    assert not any(warnings.values()), f"C7512: ptxas serializes the products: {warnings}"
    check_fits(reports, 227, lambda name: max(few[x] if x in name else 0 for x in few))


def check_fits(reports, shared, spilled):
    """Assert that kernels have at most `shared` KiB, and spill at most `spilled(name)` bytes."""
    assert {k: r for k, r in reports.items() if r["shared"] > shared * 1024} == {}
    if triton.__version__.startswith(TUNED):
        assert {k: r for k, r in reports.items() if r["spilled"] > spilled(k)} == {}


@pytest.mark.slow
@pytest.mark.parametrize("target", ["90", "120", "gfx1100"])
def test_little_spills_between_the_matmuls(target):
    reports = compile_all(target, "elementwise")
    # RDNA 3 has no matrix units for fp32, which decodes in six products of bf16
    most = {"120": 4, "gfx1100": 3700}.get(target, 0)
    assert max(report["spilled"] for report in reports.values()) <= most


SLOW = [pytest.param(x, sizes, marks=pytest.mark.slow) for x, (_, _, sizes) in CARDS.items()]


@pytest.mark.parametrize(("target", "sizes"), [("80", "64"), *SLOW])
def test_every_head_size_fits(target, sizes):
    reports = compile_all(target, "attention", *sizes.split())
    kernels = {"forward", "dkv", "dq", "delta"} | ({"ampere"} if target in AMPERE else set())
    assert all(any(kernel in name for name in reports) for kernel in kernels)

    def most(name):
        if name.endswith("512"):  # short of registers, they keep parts of their sums elsewhere
            return 3200
        return 260 if "ampere" in name else CARDS[target][1]

    check_fits(reports, CARDS[target][0], most)


@pytest.mark.slow
@pytest.mark.parametrize(("target", "size"), [("80", 64), ("80", 256), ("86", 96), ("120", 64)])
def test_kernels_with_a_key_bias_fit(target, size):
    reports = compile_all(target, "attention", f"{size} bias")
    assert any(name.startswith("ampere backward") for name in reports)
    # Those called portable are not chosen on these cards
    of_ampere = 270 if size == 256 else 190
    check_fits(reports, CARDS[target][0], lambda x: 2000 if x.startswith("port") else of_ampere)
