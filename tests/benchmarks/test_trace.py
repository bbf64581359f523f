"""Where time went, from traces: nothing twice, backward where its forward was, and what the
compiler fused by its name.
"""

from benchmarks import trace
from benchmarks.trace import (
    ATTENTION,
    COPIES,
    DATA,
    LOSS,
    MATRICES,
    OPTIMIZER,
    OTHER,
    SMALL,
    time_by_part,
)


def event(name, ts, dur, cat="cpu_op", tid=1, **args):
    return {
        "ph": "X",
        "cat": cat,
        "name": name,
        "ts": ts,
        "dur": dur,
        "pid": 1,
        "tid": tid,
        "args": args,
    }


def spent(*events):
    return {part: us for part, us in time_by_part(list(events)).items() if us}


def test_on_a_cpu_each_operator_counts_for_itself():
    assert spent(
        event(trace.MODEL, 0, 100, "user_annotation"),
        event(trace.RANGE + ATTENTION, 10, 50, "user_annotation"),
        event("aten::softmax", 20, 30),
        event("aten::linear", 60, 30),
        event("aten::mm", 61, 20),
        event("Optimizer.step#AdamW.step", 100, 7, "user_annotation"),
        event(
            "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", 110, 5, "user_annotation"
        ),
        event("aten::add", 120, 2),
    ) == {ATTENTION: 50, MATRICES: 30, SMALL: 20, OPTIMIZER: 7, DATA: 5, OTHER: 2}


def test_backward_belongs_where_forward_was():
    times = spent(
        event(trace.RANGE + LOSS, 0, 10, "user_annotation"),
        event("aten::mul", 1, 5, **{"Sequence number": 7}),
        event(trace.BACKWARD + "MulBackward0", 30, 4, tid=2, **{"Sequence number": 7}),
    )
    assert times == {LOSS: 14}


def test_the_last_operator_used_a_number():
    times = spent(
        event(trace.RANGE + LOSS, 0, 10, "user_annotation"),
        event("aten::ones", 1, 9, **{"Sequence number": 7}),
        event(trace.RANGE + ATTENTION, 20, 10, "user_annotation"),
        event("aten::mul", 20, 10, **{"Sequence number": 7}),
        event(trace.BACKWARD + "MulBackward0", 30, 4, tid=2, **{"Sequence number": 7}),
    )
    assert times == {LOSS: 10, ATTENTION: 14}


def test_gpu_kernels_count_once_by_their_launch():
    times = spent(
        event(trace.MODEL, 0, 50, "user_annotation"),
        event("longctx::flash_forward", 5, 10),
        event("cuLaunchKernelEx", 6, 1, "cuda_driver", correlation=1),
        event("aten::mm", 20, 5),
        event("cudaLaunchKernel", 21, 1, "cuda_runtime", correlation=2),
        event("cuLaunchKernel", 30, 1, "cuda_driver", correlation=3),
        event("cuLaunchKernel", 32, 1, "cuda_driver", correlation=4),
        event(
            "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__",
            395,
            20,
            "user_annotation",
        ),
        event("forward_kernel", 100, 100, "kernel", tid=7, correlation=1),
        event("nvjet_sm90", 150, 100, "kernel", tid=8, correlation=2),
        event("triton_poi_fused_mul_silu_0", 300, 30, "kernel", tid=7, correlation=3),
        event("triton_red_fused_add_rsqrt_1", 330, 10, "kernel", tid=7, correlation=4),
        event("Memcpy HtoD (Pinned -> Device)", 190, 30, "gpu_memcpy", tid=9),
        event("Memcpy HtoD (Pinned -> Device)", 390, 10, "gpu_memcpy", tid=9),
    )
    assert times == {ATTENTION: 100, MATRICES: 80, SMALL: 10, COPIES: 10, DATA: 15}


def test_captured_kernels_count_by_their_names():
    names = {
        "forward_kernel": ATTENTION,
        "wide_backward_kernel": ATTENTION,
        "swiglu_backward_kernel": MATRICES,
        "quantize_kernel": MATRICES,
        "cross_entropy_kernel": LOSS,
        "rms_norm_backward_kernel": SMALL,
        "rope_backward_kernel": SMALL,
        "multi_tensor_adamw_kernel": OPTIMIZER,
    }
    for name, part in names.items():
        times = spent(
            event("cudaGraphLaunch", 5, 1, "cuda_runtime", correlation=1),
            event(name, 10, 7, "kernel", tid=7, correlation=1),
        )
        assert times == {part: 7}, name
