"""Where the time of a step goes: parts of traces, lengths at which attention takes over, gains."""

import pytest

from benchmarks import trace
from benchmarks.step import gains, of, turning_length
from benchmarks.trace import (
    ATTENTION,
    COPIES,
    DATA,
    IDLE,
    LOSS,
    MATRICES,
    OPTIMIZER,
    OTHER,
    PARTS,
    SMALL,
    time_by_part,
)

MARK = "user_annotation"


def event(name, ts, dur, cat="cpu_op", tid=1, number=None, **args):
    args |= {} if number is None else {"Sequence number": number}
    times = {"ts": ts, "dur": dur, "pid": 1, "tid": tid}
    return {"ph": "X", "cat": cat, "name": name, "args": args} | times


def spent(*events):
    return {part: us for part, us in time_by_part(list(events)).items() if us}


def test_each_operator_of_a_cpu_counts_for_itself() -> None:
    data = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"
    assert spent(
        event(trace.MODEL, 0, 100, MARK),
        event(trace.RANGE + ATTENTION, 10, 50, MARK),
        event("aten::softmax", 20, 30),
        event("aten::linear", 60, 30),
        event("aten::mm", 61, 20),
        event("Optimizer.step#AdamW.step", 100, 7, MARK),
        event(data, 110, 5, MARK),
        event("aten::add", 120, 2),
    ) == {ATTENTION: 50, MATRICES: 30, SMALL: 20, OPTIMIZER: 7, DATA: 5, OTHER: 2}


def test_backward_belongs_to_its_forward() -> None:
    loss = event(trace.RANGE + LOSS, 0, 10, MARK)
    backward = event(trace.BACKWARD + "MulBackward0", 30, 4, tid=2, number=7)
    assert spent(loss, event("aten::mul", 1, 5, number=7), backward) == {LOSS: 14}
    # The last operator of a number is the one that used it.
    later = [event(trace.RANGE + ATTENTION, 20, 10, MARK), event("aten::mul", 20, 10, number=7)]
    times = spent(loss, event("aten::ones", 1, 9, number=7), *later, backward)
    assert times == {LOSS: 10, ATTENTION: 14}


def test_gpu_kernels_count_once_by_their_launch() -> None:
    data = "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__"
    times = spent(
        event(trace.MODEL, 0, 50, MARK),
        event("longctx::flash_forward", 5, 10),
        event("aten::mm", 20, 5),
        event("cudaLaunchKernel", 21, 1, "cuda_runtime", correlation=2),
        event("cuLaunchKernelEx", 6, 1, "cuda_driver", correlation=1),
        event("cuLaunchKernel", 30, 1, "cuda_driver", correlation=3),
        event("cuLaunchKernel", 32, 1, "cuda_driver", correlation=4),
        event(data, 395, 20, MARK),
        event("forward_kernel", 100, 100, "kernel", tid=7, correlation=1),
        event("nvjet_sm90", 150, 100, "kernel", tid=8, correlation=2),
        event("triton_poi_fused_mul_silu_0", 300, 30, "kernel", tid=7, correlation=3),
        event("triton_red_fused_add_rsqrt_1", 330, 10, "kernel", tid=7, correlation=4),
        event("Memcpy HtoD (Pinned -> Device)", 190, 30, "gpu_memcpy", tid=9),
        event("Memcpy HtoD (Pinned -> Device)", 390, 10, "gpu_memcpy", tid=9),
    )
    assert times == {ATTENTION: 100, MATRICES: 80, SMALL: 10, COPIES: 10, DATA: 15}


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("forward_kernel", ATTENTION),
        ("backward_192_kernel", ATTENTION),
        ("swiglu_backward_kernel", MATRICES),
        ("quantize_kernel", MATRICES),
        ("cross_entropy_kernel", LOSS),
        ("rms_norm_backward_kernel", SMALL),
        ("rope_backward_kernel", SMALL),
        ("multi_tensor_adamw_kernel", OPTIMIZER),
    ],
)
def test_captured_kernels_count_by_their_names(name, part) -> None:
    launch = event("cudaGraphLaunch", 5, 1, "cuda_runtime", correlation=1)
    assert spent(launch, event(name, 10, 7, "kernel", tid=7, correlation=1)) == {part: 7}


def row(tokens, attention, matrices, backend="flash", failed=None):
    ms = {ATTENTION: attention, MATRICES: matrices}
    total = attention + matrices
    shares = {part: time / total for part, time in ms.items()}
    speed = {"tokens_per_step": 1000, "tokens_per_second": 1000 * 1000 / total}
    point = {"tokens": tokens, "backend": backend, "failed": failed}
    return point | {"ms": ms, "shares": shares} | speed


@pytest.mark.parametrize(
    ("times", "expected"),
    [
        ([(1000, 1.0, 4.0), (2000, 3.0, 4.0), (4000, 7.0, 4.0)], (2500, True)),
        ([(1000, 1.0, 4.0), (2000, 2.0, 4.0)], (4000, False)),
        ([(1000, 5.0, 4.0), (2000, 9.0, 4.0)], (1000, False)),
        ([(1000, 1.0, 4.0), (2000, 1.0, 4.0)], None),
        ([], None),
    ],
)
def test_lines_cross_at_the_turning_length(times, expected) -> None:
    found = turning_length([row(*point) for point in times])
    assert (found and (found["tokens"], found["measured"])) == expected


def test_gains_are_ratios_of_whole_steps() -> None:
    rows = [row(512, 2.0, 8.0), row(512, 12.0, 8.0, "naive")]
    rows.append(row(512, 1, 1, "sdpa", failed="out of memory"))
    gain = {"over naive": 2.0, "over sdpa": "out of memory", "left in attention": 1.25}
    assert gains(rows) == [{"tokens": 512} | gain]
    assert of(rows, "sdpa") == []


@pytest.mark.slow
def test_a_profiled_step_sums_to_the_step(result_of, tmp_path, capsys) -> None:
    model = ["model=tiny", "model.layers=2", "model.vocab_size=512", "accumulate=1"]
    own = ["lengths=128,257", "backends=naive,flash", "steps=1"]
    report = result_of("step", *own, *model, "batch_size=4", "workers=0", "device=cpu")
    points = [(point["tokens"], point["backend"]) for point in report["rows"]]
    assert points == [(n, backend) for n in (128, 257) for backend in ("naive", "flash")]
    for point in report["rows"]:
        shares = point["shares"]
        assert sum(shares.values()) == pytest.approx(1)
        assert shares[OTHER] < 0.3  # a step of some 10 ms, on a machine that may be busy
        assert set(shares) == set(PARTS)
        assert all(shares[part] > 0 for part in PARTS if part not in (OTHER, COPIES, IDLE))
    per_layer = 128 * (4 + 2 * 2) * 32 + 128 * 128 + 3 * 128 * 384  # weights of a layer's products
    assert report["turns_by_flops"] == pytest.approx((2 * per_layer + 512 * 128) / (2 * 128))
    assert (tmp_path / "result.png").exists()
    assert capsys.readouterr().out
