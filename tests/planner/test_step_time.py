"""What devices wait for one another: as measured, and the bytes of each way to share a row."""

from dataclasses import replace
from typing import Any

import pytest

from longctx.planner import step_time
from longctx.planner.peak_memory import _Step, predict
from longctx.planner.step_time import attention_exchange, waiting_for_weights
from longctx.spec.hardware import GIB
from longctx.spec.step import Workload
from tests.planner.steps import FIGURES, H200, one_b, with_policy, workload


def step(policy: str, *overrides: str, **changes: Any) -> Workload:
    """A step of 1b under a memory policy; keyword arguments replace what it is."""
    work = one_b("batch_size=1", "accumulate=1", *overrides)
    return replace(with_policy(work, policy), **changes)


def shared(ranks: int, method: str = "ulysses", **changes: Any) -> Workload:
    """A row of 262,144 tokens on so many devices, which also share the weights."""
    words = [f"devices={ranks}", f"context.degree={ranks}", "strategy.name=fsdp", "seq_len=262144"]
    return step("balanced", *words, context_method=method, **changes)


# torch 2.11, two H200 of one machine: seconds per step and GiB per GPU
MEASURED = [
    (shared(2), 15.36, 38.5),
    (step("fast", "seq_len=65536", devices=2, strategy="fsdp"), 131072 / 52129, 75.6),
]


@pytest.mark.parametrize(("work", "seconds", "gib"), MEASURED)
def test_two_gpus_take_predicted_time_and_memory(work, seconds, gib):
    time = step_time.seconds(work, H200)
    assert time is not None and time.total == pytest.approx(seconds, rel=0.03)
    assert predict(work).peak / GIB == pytest.approx(gib, rel=0.02)


@pytest.mark.parametrize(("words", "documents", "measured"), FIGURES["away"])
def test_a_step_waits_for_tiles_from_the_host(words, documents, measured):
    each = replace(workload(*words.split(), seq_len=2048), batch_size=documents, accumulate=1)
    time = step_time.seconds(each, H200)
    assert time is not None and time.total == pytest.approx(measured, rel=0.08)


def test_bytes_of_each_method_go_over_the_link():
    assert waiting_for_weights(step("fast"), H200, 1.0) == 0  # on one device
    chip, n = replace(H200, link=1.0), 262144 // 4
    q, kv, layers = 32 * 64, 2 * 8 * 64, 16
    ulysses = attention_exchange(shared(4), chip)
    assert ulysses == 3 / 4 * n * (2 * q + kv + 4 * q + 2 * kv) * 2 * layers
    gathered = attention_exchange(shared(4, "allgather"), chip)
    # K and V of the three others, twice in bf16; parts of dK and dV in fp32
    assert gathered == pytest.approx(3 * n * kv * (2 * 2 + 4) * layers, rel=1e-6)


def test_a_window_needs_the_end_of_the_neighbour_only():
    chip = replace(H200, link=1.0)
    work = shared(4, model=replace(shared(4).model, window=1025))
    assert attention_exchange(work, chip) == 3 * 1024 * 2 * (2 * 8 * 64) * 16
    wide = shared(4, model=replace(work.model, window=65538))  # more than a rank has
    assert attention_exchange(wide, chip) == attention_exchange(shared(4), chip)
    sdpa = shared(4, model=work.model, attention=replace(work.attention, backend="sdpa"))
    assert attention_exchange(sdpa, chip) == attention_exchange(shared(4), chip)
    assert 0 < _Step(work).exchanged < _Step(shared(4)).exchanged / 4


def test_one_machine_does_not_use_the_network():
    slow = replace(H200, network=1e9)
    row = replace(shared(8), devices=16, machines=2)
    assert attention_exchange(row, slow) == attention_exchange(row, H200)
    for method in ("ulysses", "allgather"):
        wide = replace(shared(16, method), machines=2)
        inside = replace(wide, machines=1)
        assert attention_exchange(wide, slow) > attention_exchange(wide, H200)
        assert attention_exchange(wide, H200) > attention_exchange(inside, H200)


def test_latent_attention_has_heads_of_its_own():
    """Their channels and the rotary ones, as many heads for keys, and forward runs again."""
    asked = ["model.mixer=[mla]"], ["model.head_dim=128", "model.kv_heads=32"]
    steps = [step(policy, *words) for words in asked for policy in ("fast", "balanced")]
    latent, again, *wide = (step_time.attention_seconds(x, H200) for x in steps)
    assert wide == [latent, latent] and latent < again
