"""The self-test: right kernels pass, those of a bad compiler do not, and it runs once."""

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch

from longctx.attention import Mask, attention
from longctx.kernels.attention import fingerprint, flash_op, selftest, tiled
from longctx.kernels.attention.selftest import SelfTestFailed, Variant, check, trust

CPU = torch.device("cpu")
PARTS = ("forward", "backward")
SIZES = ((64, 1, 0), (80, 3, 0), (128, 1, 2048))  # of heads, of their groups, of rows


def run(part, implementation="torch-tiled", device=CPU):
    return getattr(flash_op.kernels(implementation, device), part)


RIGHT = [
    *(("torch-tiled", x, *size) for x in (torch.float32, torch.bfloat16) for size in SIZES),
    pytest.param("triton-portable", torch.float16, 32, 1, 0, marks=pytest.mark.no_gpu),
]


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize(("implementation", "dtype", "head_dim", "group", "bucket"), RIGHT)
def test_right_kernels_pass(implementation, part, dtype, head_dim, group, bucket, monkeypatch):
    if implementation == "triton-portable":
        monkeypatch.setenv("TRITON_INTERPRET", "1")
    function = run(part, implementation)
    copies, several = 2, [(False, False), (False, True), (True, False), (True, True)]
    # tiles on a CPU round out before its sink scales it, and again
    several = several[:2] if dtype == torch.bfloat16 else several
    if implementation == "triton-portable":  # interpreted, it takes seconds
        copies, several = 1, several[::3]
    for has_sinks, has_bias in several:
        shapes = head_dim, group, bucket, copies, Variant(has_sinks, "packed", has_bias, has_sinks)
        assert check(part, function, CPU, dtype, *shapes) is None


CHANGED = {
    Variant(has_softcap=True): lambda scores: scores._replace(softcap=3.0),
    Variant(has_sinks=True): lambda scores: scores._replace(sinks=scores.sinks + 0.01),
    Variant(has_bias=True): lambda scores: scores._replace(key_bias=scores.key_bias.roll(1, 2)),
}


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("variant", CHANGED)
def test_kernels_of_other_scores_fail(variant, part):
    def broken(*args):
        return run(part)(*args[:-1], CHANGED[variant](args[-1]))

    assert check(part, broken, CPU, torch.float32, 64, 3, 0, 1, variant)


def test_a_wrong_gradient_of_the_bias_fails():
    def wrong(*args):
        gradients = run("backward")(*args)
        return gradients._replace(dkey_bias=1.001 * gradients.dkey_bias)

    wanted = torch.float32, 64, 3, 0, 1, Variant(has_bias=True)
    assert check("backward", wrong, CPU, *wanted).startswith("dkey_bias")


def late(values, rows):
    """As if a register had been overwritten by the next tile's."""
    values[:, rows] = values[:, rows].roll(1, -1)
    return values


ONE_VALUE = tuple(map(torch.tensor, (0, 700, 0, 7)))
BROKEN = {
    "one value": lambda x: x.index_put(ONE_VALUE, x.max() + 1),
    "a column late": lambda x: late(x.clone(), slice(640, 648)),
    "a tile left out": lambda x: x.clone().index_fill_(1, torch.arange(512, 576), 0),
    "NaN": lambda x: x.clone().index_fill_(1, torch.tensor([5]), float("nan")),
    "a part in a thousand too large in fp32, a hundredth in bf16": lambda x: (
        x * (1.001 if x.dtype == torch.float32 else 1.01)
    ),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("wrong", list(BROKEN))
def test_broken_kernels_fail(wrong, dtype):
    for part, names in (("forward", ["out"]), ("backward", ["dq", "dk", "dv"])):
        for place, name in enumerate(names):

            def broken(*args, part=part, place=place):
                results = list(run(part)(*args))
                results[place] = BROKEN[wrong](results[place])
                return results

            assert check(part, broken, CPU, dtype, 64).startswith(name)


def without_last_key(q, k, v, intervals, *others):
    last = intervals.last
    shorter = intervals._replace(last=torch.where(last == last.max(), last - 1, last))
    return run("forward")(q, k, v, shorter, *others)


def with_swapped_operands(q, k, v, *others):
    k = k.clone()
    k[:, [300, 301], :, :16] = k[:, [301, 300], :, :16]
    return run("forward")(q, k, v, *others)


def with_whole_tiles(q, k, v, intervals, *others):
    """As if each tile wrote all its 128 queries, after the next tile's."""
    out, lse = run("forward")(q, k, v, intervals, *others)
    for start, end in intervals.starts[0, :-1].unfold(0, 2, 1).tolist():
        out[:, end : start + 128] = 0
    return out, lse


def with_unlike_copies(*args):
    out, lse = run("forward")(*args)
    out[1, 100] += 0.5
    return out, lse


@pytest.mark.parametrize(
    "kernel", [without_last_key, with_swapped_operands, with_whole_tiles, with_unlike_copies]
)
def test_every_key_query_and_program_counts(kernel):
    assert check("forward", kernel, CPU, torch.bfloat16, 64, copies=2).startswith("out")


@pytest.fixture
def compiled(monkeypatch):
    """Flash as on a GPU whose compiler `state.wrong` breaks; `state.tests` counts self-tests."""
    state = SimpleNamespace(wrong=False, tests=0)

    def forward(q, *others):
        state.tests += q.shape[1] == selftest.QUERIES
        out, lse = tiled.forward(q, *others)
        return (out + 1 if state.wrong else out), lse

    monkeypatch.setattr(flash_op, "kernels", lambda *_: flash_op.Kernels(forward, None))
    monkeypatch.setattr(flash_op, "_needs_trust", lambda *_: True)
    monkeypatch.setattr(selftest, "_trusted", set())
    monkeypatch.setattr(selftest, "COPIES", 2)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    return state


def test_once_per_process_type_and_head_size(compiled):
    q = torch.randn(1, 40, 2, 16)
    for x in (q, q, q[:, :7], q.half(), torch.randn(1, 40, 2, 32)):
        attention(x, x, x, mask=Mask.causal())
    attention(q, q[:, :, :1], q[:, :, :1])
    assert compiled.tests == 4


def test_threads_that_ask_at_once_test_once(compiled):
    q = torch.randn(1, 40, 2, 16)
    with ThreadPoolExecutor(4) as pool:
        for asked in [pool.submit(attention, q, q, q) for _ in range(4)]:
            asked.result()
    assert compiled.tests == 1


def test_failure_names_kernel_machine_and_remedy(compiled):
    compiled.wrong = True
    q = torch.randn(1, 4, 1, 16)
    for _ in range(2):
        with pytest.raises(SelfTestFailed) as error:
            attention(q, q, q)
        message = str(error.value)
        parts = ["forward kernel triton-portable", "on cpu", "Triton 3", "float32", "head size 16"]
        parts += ["out has", "attention=sdpa", "TRITON_PTXAS_PATH"]
        assert [part for part in parts if part not in message] == []
        assert "kernel=portable" not in message, "it is the portable one that fails"
    with pytest.raises(SelfTestFailed, match=r"kernel=portable, or attention=sdpa"):
        trust("forward", "triton-hopper", q, q, flash_op.kernels("", CPU).forward, Variant())


def test_inside_a_compiled_region(compiled):
    q = torch.randn(1, 20, 1, 16)
    run = torch.compile(lambda x: attention(x, x, x), backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(run(q), attention(q, q, q, backend="naive"))
    assert compiled.tests == 1


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_integers_are_the_same_everywhere(device):
    def one(x):
        x = (x + 3 * 0x9E3779B1) % 2**32
        for _ in range(2):
            x = (x ^ (x >> 16)) * 0x45D9F3B % 2**32
        return (x ^ (x >> 16)) % 100

    with torch.device(device):
        assert selftest.integers((4, 5), 3, 100).flatten().tolist() == [one(x) for x in range(20)]
        counts = selftest.integers((100_000,), 1, 5).long().bincount(minlength=5)
    assert counts.min() > 19_000


TYPES = ((torch.bfloat16, 64, 1), (torch.bfloat16, 96, 4), (torch.float16, 128, 4))
ON_GPU = [("portable", *case) for case in (*TYPES, (torch.float32, 64, 2))]
ON_GPU += [pytest.param("hopper", *case, marks=pytest.mark.hopper) for case in TYPES]


@pytest.mark.gpu
@pytest.mark.parametrize(("kernel", "dtype", "head_dim", "group"), ON_GPU)
@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize(("bucket", "copies"), [(0, 48), (8192, 4)])
def test_the_gpus_kernels_pass(kernel, part, dtype, head_dim, group, bucket, copies):
    device = torch.device("cuda", 0)
    function = run(part, f"triton-{kernel}", device)
    variant = Variant(span="long" if bucket else "packed")
    assert check(part, function, device, dtype, head_dim, group, bucket, copies, variant) is None


# What identifies kernels: versions and sources


def test_sources_are_the_files():
    hashes = fingerprint.sources("triton-hopper")
    hopper = {"hopper_primitives.py", "hopper_forward.py", "hopper_backward.py"}
    assert {"portable.py"} | hopper <= hashes.keys()
    assert fingerprint.sources("torch-tiled").keys() == {"tiled.py"}
    assert fingerprint.sources("torch matmul and softmax") == {}


@pytest.mark.gpu
def test_a_gpu_names_its_compilers():
    machine = fingerprint.machine(torch.device("cuda", 0))
    assert machine["triton"].startswith("3.")
    assert machine["driver"][0].isdigit()
