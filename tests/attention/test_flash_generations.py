"""flash with the kernels of one generation of GPUs, ampere and hopper: the rule over the whole
grid, sums in order, and what they are refused for.
"""

import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from longctx.attention import Mask, attention, check, kernels_run
from longctx.kernels import HAS_TRITON, flash_op
from longctx.kernels.attention import HOPPER_SIZES, IMPLEMENTATIONS, hopper_size
from tests.attention import rule
from tests.attention.rule import DEVICE, FREE, GRID, ON_GPU, Case

if HAS_TRITON and ON_GPU:  # Gluon has no interpreter
    from longctx.kernels.attention import ampere, hopper_backward, hopper_forward

AMPERE_SIZES = IMPLEMENTATIONS["triton-ampere"].head_sizes
BF16, FP16 = torch.bfloat16, torch.float16
ON_HOPPER = (pytest.mark.gpu, pytest.mark.hopper)
every_size = pytest.mark.parametrize("head_dim", HOPPER_SIZES)
both_dtypes = pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)


def on_hopper(test):
    return pytest.mark.gpu(pytest.mark.hopper(test))


@pytest.fixture
def options(request, monkeypatch):
    """The options that choose a kernel; of Ampere's with the tiles of cards with so many KiB of
    shared memory, of Hopper's ordered ones by what torch is asked for.
    """
    name, _, KiB = request.param.partition("-")
    if name == "ordered":
        request.getfixturevalue("deterministic")
        return {}
    if KiB:
        monkeypatch.setattr(ampere, "shared_memory", lambda device: int(KiB))
    return {"kernel": name}


def kernels(names, sizes, dtypes, marks):
    return [pytest.param(x, D, to, marks=marks) for x in names for D in sizes for to in dtypes]


AMPERE = ["ampere-163", "ampere-99"]
RULE = [
    *kernels(AMPERE, AMPERE_SIZES, [BF16, FP16], pytest.mark.gpu),
    *kernels(["hopper"], [*HOPPER_SIZES, 72, 88, 136, 248], [BF16, FP16], ON_HOPPER),
    *kernels(["ordered"], HOPPER_SIZES, [BF16], ON_HOPPER),
]


@pytest.mark.parametrize(("options", "head_dim", "dtype"), RULE, indirect=["options"], ids=str)
@pytest.mark.parametrize("case", GRID + FREE, ids=str)
def test_rule(case, options, head_dim, dtype):
    rule.check(replace(case, D=head_dim), "flash", dtype, **options)
    assert kernels_run()["flash"] == f"triton-{options.get('kernel', 'hopper-ordered')}"


CHANGED = (
    *(Case(2, 300, 300, Hq=4, Hkv=2, mask=mask) for mask in ("causal", "documents", "intervals")),
    *(Case(2, 1024, 1024, Hq=8, Hkv=1, window=window) for window in (None, 128)),
)


@pytest.mark.parametrize(("options", "head_dim", "dtype"), RULE, indirect=["options"], ids=str)
@pytest.mark.parametrize("case", CHANGED, ids=str)
def test_rule_with_sinks(case, options, head_dim, dtype):
    """Sinks that take little, and nearly all; some queries see nothing else."""
    sinks = torch.linspace(-4.0, 12.0, case.Hq, device=DEVICE)
    rule.check(replace(case, D=head_dim), "flash", dtype, sinks=sinks, **options)


@pytest.mark.parametrize(("options", "head_dim", "dtype"), RULE, indirect=["options"], ids=str)
@pytest.mark.parametrize("case", CHANGED, ids=str)
def test_rule_with_a_key_bias(case, options, head_dim, dtype):
    """Heads that forget at once, and hardly; some biases are larger than bf16 or fp32 resolve."""
    slopes = 2.0 ** torch.arange(1.0, 1.0 - 2 * case.Hq, -2.0, device=DEVICE)
    bias = slopes[:, None] * torch.arange(case.Tk, device=DEVICE) + 2.0**18
    sinks = bias[:, case.Tk // 2]
    for changed in ({}, {"sinks": sinks, "softcap": 20.0}):
        changed |= {"key_bias": bias.expand(case.B, -1, -1)}
        rule.check(replace(case, D=head_dim), "flash", dtype, **changed, **options)


@pytest.mark.parametrize(("options", "head_dim", "dtype"), RULE, indirect=["options"], ids=str)
@pytest.mark.parametrize("case", CHANGED, ids=str)
@pytest.mark.parametrize("softcap", [3.0, 20.0, 1e6])
def test_rule_with_a_softcap(softcap, case, options, head_dim, dtype):
    """Scores of 9 and more: most are near the softcap, few are, none is."""
    case = replace(case, D=head_dim)
    large = [3 * x for x in rule.inputs(case, dtype)]
    sinks = torch.linspace(-4.0, 3.0, case.Hq, device=DEVICE) if softcap == 20 else None
    rule.check(case, "flash", dtype, large, softcap=softcap, sinks=sinks, **options)


@pytest.mark.parametrize(
    ("major", "head_dim", "expected"),
    [
        *((7, 128, "portable"), (8, 128, "ampere"), (8, 80, "portable")),
        *((9, 128, "hopper"), (10, 128, "portable"), (12, 96, "ampere")),
    ],
)
def test_auto_by_generation(major, head_dim, expected, monkeypatch):
    gpu, half = torch.device("cuda", 0), BF16
    properties = SimpleNamespace(major=major)
    monkeypatch.setattr(flash_op, "_properties", lambda device: properties)
    assert flash_op.implementation(gpu, half, head_dim) == f"triton-{expected}"
    assert flash_op.implementation(gpu, torch.float32, head_dim) == "triton-portable"


@pytest.mark.filterwarnings("error:.*lru_cache")
def test_auto_is_compiled_without_a_warning(monkeypatch):
    hopper, gpu = SimpleNamespace(major=9), torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: hopper)

    def choose(x):
        return x, flash_op.implementation(gpu, BF16, 128)

    compiled = torch.compile(choose, backend="eager", fullgraph=True)
    assert compiled(torch.zeros(1))[1] == "triton-hopper"


@pytest.mark.parametrize(
    ("kernel", "device", "dtype", "head_dim", "message"),
    [
        ("ampere", DEVICE, BF16, 80, "head sizes in "),
        ("hopper", "cpu", FP16, 128, "on a Hopper GPU; use attention.options.kernel=portable"),
        pytest.param("hopper", DEVICE, torch.float32, 128, "takes bf16 and fp16", marks=ON_HOPPER),
        pytest.param("hopper", DEVICE, FP16, 60, "head sizes in ", marks=ON_HOPPER),
    ],
)
def test_refusals(kernel, device, dtype, head_dim, message):
    with pytest.raises(ValueError, match=message):
        check("flash", device=device, dtype=dtype, head_dim=head_dim, options={"kernel": kernel})


def test_sizes_are_padded_to_the_next_that_has_tiles():
    sizes = [hopper_size(d) for d in (64, 72, 96, 104, 136, 256)]
    assert sizes == [64, 96, 96, 128, 192, 256]
    taken = IMPLEMENTATIONS["triton-hopper"].head_sizes
    assert {hopper_size(d) for d in taken} == set(HOPPER_SIZES)


@on_hopper
@both_dtypes
@every_size
@pytest.mark.parametrize(
    ("mask", "window"), [("causal", None), ("full", None), ("causal", 900), ("intervals", None)]
)
def test_scores_far_from_the_first_maximum(mask, window, head_dim, dtype):
    """Rows that keep the maximum of their first tiles of keys, and scores that leave every float's
    range around it, up or down.
    """
    case = Case(2, 1024, 1024, Hq=4, Hkv=2, D=head_dim, mask=mask, window=window)
    q, k, v, do = rule.inputs(case, dtype)
    if mask == "intervals":
        # most rows see none of the masked tile, then full tiles, of small scores alone
        case.build_mask = lambda: Mask.intervals(
            torch.arange(1024)[None].clamp(max=400), torch.full((1, 1024), 1023)
        )
        q, k = q / 10 + 4, k / 10 - 4
    else:
        q, k = q / 10 + 1, k + 0
        k[:, 300:340] += 12
    rule.check(case, "flash", dtype, tensors=[q, k, v, do], kernel="hopper")


@on_hopper
@every_size
@pytest.mark.parametrize(
    "case",
    [
        Case(1, 3000, 3000, Hq=16, Hkv=8),
        Case(1, 3000, 3000, Hq=16, Hkv=8, mask="documents"),
        Case(10, 200, 1000, Hq=16, Hkv=16, mask="first keys"),
    ],
    ids=str,
)
def test_more_tiles_than_processors(case, head_dim, monkeypatch):
    """A program's second tile of keys; of grouped heads of 128 channels its walk over the queries
    goes the other way, and of keys that nobody sees it is empty. Sums of dq are zeroed ahead.
    """
    monkeypatch.setattr(hopper_backward, "heads_in_l2", lambda *_: 3)
    rule.check(replace(case, D=head_dim), "flash", BF16, kernel="hopper")
    assert kernels_run()["flash"] == "triton-hopper"


@pytest.fixture
def deterministic():
    # naive's matrix products would want an environment variable: warn_only
    torch.use_deterministic_algorithms(True, warn_only=True)


@on_hopper
@every_size
@pytest.mark.parametrize(
    ("mask", "window"), [("causal", None), ("full", None), ("documents", None), ("causal", 1500)]
)
def test_ordered_gives_the_same_bits(mask, window, head_dim, deterministic):
    """More tiles than processors, several heads of a group, and a chain of all tiles of a head;
    then 250 times the same.
    """
    case = Case(1, 9000, 9000, Hq=8, Hkv=4, D=head_dim, mask=mask, window=window)
    rule.check_equal_runs(case, rule.inputs(case, BF16), 250)
    assert kernels_run()["flash"] == "triton-hopper-ordered"


@on_hopper
@every_size
def test_a_key_bias_of_any_level_gives_the_same_bits(head_dim):
    """Of dq too, if it is ordered; without it of all else, since a program owns its keys."""
    tensors = rule.inputs(Case(2, 2000, 2000, Hq=4, Hkv=2, D=head_dim), BF16)
    rising = torch.arange(2000.0, device=DEVICE).mul(0.125).expand(1, 4, -1)
    for is_ordered in (False, True):
        torch.use_deterministic_algorithms(is_ordered, warn_only=True)
        first, *others = (
            rule.run(tensors, Mask.causal(), "flash", BF16, key_bias=rising + level)
            for level in (0.0, 2.0**20, *[0.0] * 20)
        )
        for other in others:
            same = [torch.equal(x, y) for x, y in zip(first[2:], other[2:], strict=True)]
            assert all(same[0 if is_ordered else 1 :]) and torch.equal(first[0], other[0])


@on_hopper
@every_size
@pytest.mark.parametrize("window", [None, 1500])
def test_ordered_ends_under_load(window, head_dim, deterministic):
    """A processor that is full all the time delays the warps of a tile that pass the turn on, until
    after the tile that has it then.
    """
    torch.manual_seed(0)
    shape = 4, 4096, 3072 // head_dim, head_dim
    q, k, v, do = (torch.randn(shape, device=DEVICE, dtype=BF16) for _ in range(4))
    inputs = [x.requires_grad_() for x in (q, k, v)]
    out = attention(*inputs, mask=Mask.causal(window))
    assert kernels_run()["flash"] == "triton-hopper-ordered"
    for _ in range(8):
        for _ in range(50):
            torch.autograd.grad(out, inputs, do, retain_graph=True)
        done = torch.cuda.Event()
        done.record()
        while not done.query():  # for ever, if a tile waits for a turn that never comes
            time.sleep(0.01)


@on_hopper
@every_size
def test_ordered_rows_of_one_and_of_several_documents(head_dim, deterministic):
    """Their tiles of keys add to dq in opposite directions."""
    case = Case(3, 1023, 1023, Hq=8, Hkv=4, D=head_dim)
    lengths = torch.tensor([[2000], [170], [600]], device=DEVICE)
    ids = torch.arange(1023, device=DEVICE)[None] // lengths
    case.build_mask = lambda: Mask.documents(ids)
    tensors = list(rule.inputs(case, BF16))
    rule.check(case, "flash", BF16, tensors=tensors)
    assert kernels_run()["flash"] == "triton-hopper-ordered"
    rule.check_equal_runs(case, tensors, 50)


@on_hopper
@pytest.mark.filterwarnings("error:.*lru_cache")
def test_auto_is_ordered_if_runs_must_repeat():
    q = torch.randn(1, 100, 2, 64, device="cuda", dtype=BF16, requires_grad=True)
    attend = torch.compile(attention, fullgraph=True)
    for call in (attention, attend):
        call(q, q, q).sum().backward()
        assert kernels_run()["flash"] == "triton-hopper"
        torch.use_deterministic_algorithms(True)
        try:
            call(q, q, q).sum().backward()
            assert kernels_run()["flash"] == "triton-hopper-ordered"
        finally:
            torch.use_deterministic_algorithms(False)
    attention(*(x.float() for x in (q, q, q)))
    assert kernels_run()["flash"] == "triton-portable", "32 bits"


@on_hopper
@both_dtypes
@every_size
@pytest.mark.parametrize("score_scale", [1, 2, 4])
@pytest.mark.parametrize("place", [0, 347])
def test_errors_where_one_key_draws_nearly_all_weight(place, score_scale, head_dim, dtype):
    """A sink of 0 to 30 nats above the others, which the maximum that rows keep does not know."""
    case = Case(1, 1024, 1024, Hq=4, Hkv=4, D=head_dim)
    for nats in (0, 8, 16, 20, 25, 30):
        q, k, v, do = (x.float() for x in rule.inputs(case, torch.float32))
        q, k = q * score_scale**0.5, k * score_scale**0.5
        q[..., 0], k[..., 0] = 4.0, 0.0
        k[:, place, :, 0] = nats * head_dim**0.5 / 4
        tensors = [x.to(dtype) for x in (q, k, v, do)]
        mask = case.build_mask()
        exact = rule.run(tensors, mask, "naive", torch.float64)
        ours = rule.run(tensors, mask, "flash", dtype, kernel="hopper")
        theirs = rule.run(tensors, mask, "sdpa", dtype, kernel="flash")
        for name, x, y, z in zip(rule.NAMES, ours, theirs, exact, strict=True):
            error, allowed = ((t - z).abs().max().item() for t in (x, y))
            floor = 1e-4 * z.abs().max().item() + 1e-5
            assert error <= 3 * allowed + floor, f"{name}, {nats} nats: {error:.1e}, {allowed:.1e}"


@on_hopper
@both_dtypes
@every_size
@pytest.mark.parametrize("has_bias", [False, True])
def test_relaunches_give_the_first_calls_bits(has_bias, head_dim, dtype, deterministic):
    """They go another way, with what the first call kept, and other tensors."""
    case = Case(2, 333, 333, Hq=4, Hkv=2, D=head_dim)
    bias = torch.arange(333.0, device=DEVICE).div(8).expand(2, 4, -1) if has_bias else None
    mask = case.build_mask().bind(2, 333, 333, DEVICE)
    for module in (hopper_forward, hopper_backward):
        module._launches.clear()
    first = [x + 0 for x in rule.inputs(case, dtype)]
    expected = rule.run(first, mask, "flash", dtype, key_bias=bias)
    other = [x * 2 for x in first]
    rule.run(other, mask, "flash", dtype, key_bias=bias)
    again = rule.run([x + 0 for x in first], mask, "flash", dtype, key_bias=bias)
    assert hopper_forward._launches and hopper_backward._launches
    assert all(torch.equal(x, y) for x, y in zip(again, expected, strict=True))
