"""The kernels compile for GPUs that are not there: they fit, and on Hopper ptxas keeps their
products asynchronous.

Each kernel is compiled for each head size, with dq ordered and not. Each case takes seconds. Left
out is what hardly differs from another case: the forward's retry, but for 64 channels, the only
size whose retry has a loop of its own for masked tiles; groups of heads without short windows, but
for 128 channels, where they change the order of walks; softcaps for 96 channels, which have the
loops of 64 and 128; and parts of the scores alone that another case has together.

compiled.json has what each version of the compiler said of these sources, so that only other ones
take minutes: after a change of kernels, LONGCTX_RECORD=1 pytest tests/kernels/test_compile.py.
"""

import hashlib
import json
import os
import warnings
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import triton

from tests.processes import PYTHONPATH, ROOT, finished

# the forward spills up to 172 bytes on 3.8 and 3.9, the backward of 64 up to 136 on 3.9
TUNED = ("3.6.", "3.7.")  # versions of Triton that tiles and registers were chosen with
# in seconds; the others take half a minute and more
FAST = ("backward 64", *(f"unpack {head_dim}" for head_dim in (64, 88, 128, 184, 256)))
SIZES = (64, 96, 128, 192, 256)
SLOW = (
    *("forward retry 64", "forward sinks 128", "forward softcap 64", "forward softcap 128"),
    *("forward short 64", "forward packed 64", "forward short 256", "forward bias sinks 64"),
    *("ordered backward softcap of groups 64", "backward bias softcap 128"),
    *("backward 128", "backward of groups 128", "ordered backward 128"),
    *("backward softcap 192", "backward softcap 256", "ordered backward 192"),
    *(f"{kernel} bias {size}" for kernel in ("forward", "backward") for size in (64, 96, 192, 256)),
    *(f"backward short of groups {size}" for size in SIZES),
    *(f"forward {size}" for size in (*SIZES, "packed 128")),
    *("forward bias 128", "backward 96", "backward 192", "backward 256", "ordered backward 256"),
)
AMPERE = ("80", "86", "120")  # have the kernels for mma.sync
# every kernel, in few sizes: KiB of shared memory, words of compile_report.py
EVERY = (
    (227, "90", "hopper", "sinks 64", "ordered bias 192", "bias 256"),
    (163, "80", "attention", "64"),
    (227, "90", "elementwise"),
)


RECORD, SCRIPT = (Path(__file__).with_name(x) for x in ("compiled.json", "compile_report.py"))
FILES = [
    x for kind in ("py", "json") for x in sorted((ROOT / "longctx/kernels").rglob(f"*.{kind}"))
]
SOURCES = hashlib.sha256(b"".join(x.read_bytes() for x in [SCRIPT, *FILES])).hexdigest()[:16]


def case_of(version, words):
    return " ".join([SOURCES, version, *words])


def recorded():
    return json.loads(RECORD.read_text())


def compile_all(*words, version=triton.__version__, path=PYTHONPATH):
    """Return the compiler's report on each kernel; `words` are those of compile_report.py."""
    case, record = case_of(version, words), recorded()
    if case not in record:
        # a process of its own: there is only one Triton in each, the compiler or the interpreter
        compiler = finished(SCRIPT, words, ROOT, PYTHONPATH=path)
        assert compiler.returncode == 0, f"{words}, {path}: {compiler.stderr[-2000:]}"
        record[case] = json.loads(compiler.stdout)
        if os.environ.get("LONGCTX_RECORD"):
            lines = (f"{json.dumps(x)}: {json.dumps(record[x])}" for x in record if SOURCES in x)
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
def test_newest_triton_compiles_every_kernel():
    # the newest of the index, not that of constraints.txt
    words = ("pip", "install", "-q", "--retries=1", "--no-deps", "--no-compile", "triton")
    asked = ("--dry-run", "--ignore-installed", "--report=-")
    found = finished("-m", (*words, *asked), ROOT, PIP_CONSTRAINT="")
    if found.returncode:
        pytest.skip(f"no Triton from a package index: {found.stderr[-200:]}")
    version = json.loads(found.stdout)["install"][0]["metadata"]["version"]
    spilled = {}
    with TemporaryDirectory(prefix="triton-") as folder:
        if any(case_of(version, case) not in recorded() for _, *case in EVERY):
            finished(
                "-m", (*words, f"--target={folder}"), ROOT, PIP_CONSTRAINT=""
            ).check_returncode()
        path = f"{folder}{os.pathsep}{PYTHONPATH}"
        for shared, *case in EVERY:
            reports = compile_all(*case, version=version, path=path)
            assert {k: r for k, r in reports.items() if r["shared"] > shared * 1024} == {}, version
            spilled |= {k: r["spilled"] for k, r in reports.items() if r["spilled"]}
    # pytest's summary says which version it was
    warnings.warn(f"Triton {version} compiles every kernel; bytes spilled: {spilled}", stacklevel=1)


@pytest.mark.parametrize(
    "kernels", [FAST, pytest.param(SLOW, marks=pytest.mark.slow)], ids=("fast", "slow")
)
def test_hopper_products_stay_asynchronous(kernels):
    reports = compile_all("90", "hopper", *kernels)
    assert len(reports) == len(kernels)
    warnings = {name: report["warnings"] for name, report in reports.items()}
    assert not any(warnings.values()), f"C7512: ptxas serializes the products: {warnings}"
    few = {"ordered backward 192": 16, "forward sinks 128": 4, "forward softcap 128": 4}
    few |= {"backward softcap 192": 28, "backward bias softcap 128": 24, "backward bias 192": 28}
    few |= {"short of groups 192": 12, "short of groups 256": 8, "forward softcap 64": 240}
    few["packed 128"] = 28
    few |= {"forward bias 128": 4, "forward bias 256": 4, "bias 64": 8, "of groups 64": 48}
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


# The other attention kernels, for cards that people own; sm_89 runs the code of sm_86. A size for
# each class of tiles: those of 96 channels are the portable kernels' of 128. sm_86 and sm_120 have
# the same tiles, so each has some of the sizes. Heads of 512 are for the least shared memory. RDNA
# 3 is compiled for heads of 64 alone: its compiler takes a minute for the wide ones. Most spill:
# tiles of 128 channels need more registers than mma.sync leaves.

# target → KiB of shared memory that a program may have, largest spill in bytes with the versions of
# Triton in TUNED, sizes of heads
CARDS = {
    "80": (163, 1300, "96 128 256"),  # A100
    "86": (99, 1300, "96 256"),  # A10, RTX 3090; as sm_89: L4, L40S, RTX 4090
    "90": (227, 400, "128 256"),  # H100, H200, if kernel=portable
    "100": (227, 1400, "64 128 256"),  # B200
    "120": (99, 1600, "64 128 512"),  # RTX 5090, RTX PRO 6000
    "gfx942": (64, 0, "64 256 512"),  # MI300X
    "gfx1100": (64, 2000, "64"),  # RX 7900
}
CASES = [pytest.param(x, sizes, marks=pytest.mark.slow) for x, (_, _, sizes) in CARDS.items()]


@pytest.mark.parametrize(("target", "sizes"), [("80", "64"), *CASES])
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
