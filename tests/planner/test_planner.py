"""The plan: what compiled blocks really keep is what it says, measured peaks are near, and its
answers hang together.
"""

import json
from dataclasses import replace
from itertools import product
from math import inf
from typing import Any

import pytest

from benchmarks.cards import Case, run_of
from longctx.attention.description import AttentionConfig
from longctx.config.doors import OPTIMIZERS, OptimizerTraits
from longctx.config.layout_config import MemoryConfig
from longctx.planner import fitting, peak_memory
from longctx.planner.peak_memory import Memory, _Step, predict
from longctx.spec import hardware
from longctx.spec.hardware import GIB
from longctx.spec.step import Workload
from tests.planner.steps import FIGURES, H200, LONG, one_b, with_policy, workload
from tests.processes import ROOT


def test_measured_peaks_are_within_three_percent():
    for row in json.loads((ROOT / "results" / "memory.json").read_text())["rows"]:
        if row["failed"] or row["memory"] == "long":  # it held two tiles of 1b at a time
            continue
        names = {"layers": "model.layers", "lora": "lora.rank", "tokens": "seq_len"}
        keys = ("model", "layers", "memory", "tokens", "accumulate", "lora")
        words = [f"{names.get(x, x)}={row[x]}" for x in keys if row.get(x)]
        backend, _, kernel = row["backend"].partition(":")
        words += [f"attention.options.kernel={kernel}"] if kernel else []
        work = workload(*words, f"attention={backend}", "batch_size=1", "graphs=false")
        assert predict(work).peak / GIB == pytest.approx(row["measured_gib"], rel=0.03), row


def test_steps_under_caps_took_predicted_memory():
    rows = json.loads((ROOT / "results" / "caps.json").read_text())["rows"]
    for row in (x for x in rows if not x["failed"]):
        words = [x for x in row.get("overrides", ["lora.rank=16"]) if not x.startswith("memory")]
        step = workload(*words, *f"memory={row['memory']}".split(), seq_len=row["tokens"])
        if "cap" in row:  # a cell of the page of cards
            of_cell = run_of(Case(row["model"], row["way"]), row["layers"]).workload
            of_cell = replace(of_cell, memory=step.memory, batch_size=1, accumulate=1)
            step = replace(of_cell, seq_len=row["tokens"], validates=row.get("validated", True))
        assert predict(step).peak / GIB == pytest.approx(row["measured_gib"], rel=0.02), row["name"]


@pytest.mark.parametrize(("words", "rows", "tokens", "gib", "speed", "kernel"), FIGURES["measured"])
def test_models_take_measured_memory_and_time(words, rows, tokens, gib, speed, kernel):
    attention = AttentionConfig("flash", {"kernel": kernel})
    sizes = {"batch_size": rows, "seq_len": tokens, "accumulate": 1}
    step = replace(workload(*words.split(), attention=attention, **sizes), validates=speed is None)
    assert predict(step).peak / GIB == pytest.approx(gib, rel=0.02 if speed is None else 0.01)
    predicted = fitting.tokens_per_second(step, H200)
    tolerance = 0.08 if "lora" in words else 0.03
    assert speed is None or predicted == pytest.approx(speed, rel=tolerance)


def test_heads_and_outputs_cost_what_they_should():
    """All is on the host: of its 29 KB a token most are dx and do."""

    def of(*keys: str) -> Memory:
        keys = "keep_every=4", "offload=1", "mlp_tile=8192", *keys
        words = ["memory=balanced", *(f"memory.{key}" for key in keys)]
        step = workload("model=8b", "lora.rank=16", "lora.base=nf4", *words, seq_len=524288)
        return predict(replace(step, batch_size=1, accumulate=1))

    groups = "heads_at_once=1"
    each = of(), of(groups), of(groups, "attention_again=1")
    peaks = [x.peak - x.gpu[peak_memory.PARAMETERS] for x in each]
    assert peaks[1] == peaks[2] < 30e3 * 524288 < peaks[0] / 2
    # 8 inputs and 4 outputs, and a place for an input, instead of 8 and 32
    hosts = [x.host[peak_memory.KEPT] / 8192 / 524288 for x in each]
    assert hosts == pytest.approx([40, 41, 13], rel=0.02)


def test_texts_with_pass_keys_longer_than_rows_count():
    def naive(*keys: str) -> Workload:
        base = ("model=124m", "model.vocab_size=50304", "attention=naive", "memory=fast")
        return workload(*base, "passkey.enabled=true", *keys, seq_len=1024, batch_size=4)

    within, longer = naive("passkey.lengths=[512]"), naive("passkey.lengths=[512,32768]")
    assert predict(within).peak == predict(naive()).peak
    assert predict(longer).phase == "pass keys"
    assert predict(longer).gpu[peak_memory.ATTENTION] == 12 * 32768**2 * 12


@pytest.mark.parametrize(("words", "gpu", "name"), FIGURES["faster"])
def test_another_backend_is_named_if_it_is_clearly_faster(words, gpu, name):
    work = with_policy(one_b(*words.split(), seq_len=32768), "fast")
    line = fitting.faster_backend(work, ("flash", "sdpa"), hardware.chip(gpu, 79 * GIB))
    assert line.startswith(f"attention={name} is") if name else not line


def test_steps_in_graphs_take_a_backend_that_graphs_can_hold():
    work = with_policy(workload("model=124m", seq_len=1024, batch_size=4), "fast")
    name, reason = fitting.fastest_backend(work, ("sdpa", "naive"), H200)
    assert name == "naive" and reason.endswith("in CUDA graphs")
    eager = replace(work, graphs="false")
    assert fitting.fastest_backend(eager, ("sdpa", "naive"), H200)[0] == "sdpa"


def test_auto_takes_the_fastest_settings_that_fit():
    def decided(seq_len: int, *overrides: str) -> MemoryConfig:
        step = one_b(*overrides, seq_len=seq_len, batch_size=1)
        return fitting.decide(step, H200, 128 * GIB).memory

    assert [decided(n).recompute for n in (16384, 131072, 786432)] == ["none", "block", "block"]
    least = decided(2**24)  # nothing fits: what takes least of the GPU, and no more host memory
    assert (least.heads_at_once, least.mlp_tile, least.offload) == (1, 8192, 0)
    narrow = decided(786432, "memory.optimizer_state=bf16", "memory.mlp_tile=16384")
    assert (narrow.optimizer_state, narrow.mlp_tile) == ("bf16", 16384)


@pytest.mark.parametrize(("words", "gpu", "host", "lengths"), FIGURES["searched"])
def test_a_search_is_never_slower_than_a_policy(words, gpu, host, lengths):
    chip = hardware.chip(gpu)
    limits = fitting.room(chip), host * GIB
    for tokens in lengths:
        asked = workload(*words.split(), seq_len=tokens, batch_size=1, accumulate=1)
        found = fitting.first_that_fits(asked, *limits, chip)
        assert found is not None and fitting.fits(found, *limits)
        named = (with_policy(asked, name) for name in ("fast", "balanced"))
        speeds = [fitting.tokens_per_second(x, chip) for x in named if fitting.fits(x, *limits)]
        assert fitting.tokens_per_second(found, chip) >= fitting.AS_FAST * max(speeds)


@pytest.mark.parametrize(("words", "gpu", "host"), FIGURES["exhaustive"])
def test_a_search_finds_what_trying_everything_finds(words, gpu, host):
    chip = hardware.chip(gpu)
    limits = fitting.room(chip), host * GIB
    step = workload(*words.split(), seq_len=16384, batch_size=1, accumulate=1)
    names = [name for name in fitting.SEARCHED if getattr(step.memory, name) is None]
    each = product(step.memory.policies(), *(fitting.SEARCHED[name] for name in names))
    keys = [(policy, dict(zip(names, values, strict=True))) for policy, *values in each]
    keys += [("balanced", {"recompute_share": n / 16}) for n in range(1, 16)]
    filled = [replace(step.memory, **own).filled(policy) for policy, own in keys]
    # Heads at a time are searched with tiles alone
    open_heads = step.memory.heads_at_once is None
    filled = [x for x in filled if x.mlp_tile or not (x.heads_at_once and open_heads)]
    memories = [x for x in filled if not x.contradiction(x.policy)]
    unit, longest = 2048, 0
    for memory in memories:
        while fitting.fits(replace(step, seq_len=longest + unit, memory=memory), *limits):
            longest += unit
    found = fitting.longest([lambda n: replace(step, seq_len=n)], *limits, unit, chip=chip)
    assert found is not None and found.seq_len == longest
    for tokens in (longest // 2, longest):
        steps = [replace(step, seq_len=tokens, memory=memory) for memory in memories]
        fit = [fitting.tokens_per_second(x, chip) for x in steps if fitting.fits(x, *limits)]
        best = fitting.first_that_fits(replace(step, seq_len=tokens), *limits, chip)
        assert best is not None and fitting.fits(best, *limits)
        assert fitting.tokens_per_second(best, chip) >= fitting.AS_FAST * max(fit)
    none = replace(step, seq_len=99 * longest)
    each = (replace(none, memory=x) for x in memories)
    least = min(predict(x).peak for x in each if fitting.fits(x, inf, limits[1]))
    assert predict(fitting.smallest(none, limits[1])).peak == least


def test_a_step_has_few_micro_batches():
    def decided(gib: float, *overrides: str, **changes: Any) -> tuple[int, int, str]:
        chip = hardware.chip("NVIDIA H200", gib * GIB)
        work = fitting.decide(workload(*overrides, **changes), chip, 128 * GIB, merge=True)
        return work.batch_size, work.accumulate, work.memory.policy

    small = ("model=124m", "model.vocab_size=50304")
    fast = [decided(gib, *small) for gib in (139.8, 20, 11)]
    assert fast == [(16, 1, "fast"), (8, 2, "fast"), (4, 4, "fast")]
    assert decided(7, *small) == (4, 4, "balanced")
    assert decided(139.8, *small, seq_len=12288) == (5, 1, "fast")  # 61,440 tokens, as without it
    # Nothing fits; not the default
    large = [decided(gib, "model=1b", "memory=fast") for gib in (1, 37)]
    assert large == [(1, 16, "fast"), (2, 8, "fast")]
    assert fitting.decide(workload(*small), H200, 128 * GIB).accumulate == 4
    for devices in (2, 3, 8):
        work = replace(workload(*small, seq_len=3000), devices=devices)
        assert work.sequences_per_step == fitting.decide(work, H200, GIB, True).sequences_per_step


def test_the_smallest_change_fits():
    # five do not go in twos: the advice is the same step
    config = with_policy(one_b(seq_len=65536, batch_size=5, accumulate=1), "fast")
    change = fitting.smallest_change(config, H200.usable, 128 * GIB)
    assert change.startswith("batch_size=1 accumulate=5")
    one = replace(config, batch_size=1, seq_len=131072)
    assert fitting.smallest_change(one, H200.usable, 128 * GIB) == "memory=balanced"
    last = with_policy(one_b(seq_len=8000000, batch_size=1), "balanced")
    change = fitting.smallest_change(last, H200.usable, 128 * GIB)
    assert change.startswith("seq_len=")
    naive = replace(config, attention=AttentionConfig("naive"))
    assert "attention=flash" in fitting.smallest_change(naive, GIB, GIB)
    large = with_policy(workload("model=8b", batch_size=4), "balanced")
    assert fitting.smallest_change(large, 10 * GIB, 8 * GIB).startswith("lora.rank=16")
    left = [x.usable - fitting.room(x) for x in (H200, replace(H200, memory=6 * GIB))]
    assert left == pytest.approx([0.05 * H200.usable, 0.4 * GIB])  # no less on a small card
    short = with_policy(one_b(seq_len=64, batch_size=20011), "fast")
    assert "seq_len=64 batch_size=1" in fitting.smallest_change(short, 12 * GIB, 128 * GIB)
    assert "offload" not in fitting.smallest_change(replace(one, device="cpu"), 21 * GIB, inf)


def test_advice_names_a_policy_that_the_optimizer_takes(request):
    OPTIMIZERS.register("plain", OptimizerTraits())  # its state is never on the host
    request.addfinalizer(lambda: OPTIMIZERS.remove("plain"))
    advised = {"adamw": "memory=fast memory.optimizer_state=host", "plain": "memory="}
    for name, advice in advised.items():
        step = one_b(f"optimizer={name}", seq_len=16384, batch_size=1)
        change = fitting.smallest_change(with_policy(step, "fast"), 35 * GIB, 512 * GIB)
        assert change.startswith(advice) and ("host" in change) == (name == "adamw")


@pytest.mark.parametrize(("name", "tflops", "gigabytes", "fp8"), FIGURES["cards"])
def test_a_gpu_is_known_by_its_name(name, tflops, gigabytes, fp8):
    chip = hardware.chip(name, GIB)
    assert (chip.flops and chip.flops / 1e12) == (tflops and pytest.approx(tflops, rel=0.01))
    assert (chip.bandwidth and chip.bandwidth / 1e9, chip.fp8) == (gigabytes, fp8)


@pytest.mark.parametrize("controller", hardware.CONTROL_GROUPS)
@pytest.mark.parametrize("limited", ["", "slurm/job_7", "slurm/job_7/step_0"])
def test_a_limit_of_any_group_around_counts(limited, controller, tmp_path, monkeypatch):
    _, limit, used, cache = hardware.CONTROL_GROUPS[controller]
    own, group = tmp_path / "own", tmp_path / "groups" / limited
    (tmp_path / "groups" / "slurm" / "job_7" / "step_0").mkdir(parents=True)
    own.write_text(f"9:name=systemd:/\n4:{controller}:/slurm/job_7/step_0\n")
    for name, text in ((limit, "4096"), (used, "2048"), ("memory.stat", f"x 1\n{cache} 1024\n")):
        (group / name).write_text(text)
    monkeypatch.setattr(hardware, "OWN_GROUPS", own)
    groups = {controller: (str(tmp_path / "groups"), limit, used, cache)}
    monkeypatch.setattr(hardware, "CONTROL_GROUPS", groups)
    assert hardware.host_memory() == 4096
    assert hardware.available_memory() == 4096 - 2048 + 1024


def test_every_process_of_a_machine_takes_host_memory():
    config = one_b(memory=LONG, seq_len=1048576, batch_size=1, accumulate=1)
    host = sum(predict(config).host.values())
    for devices, machines, shares in ((1, 1, 1), (8, 1, 8), (8, 2, 4)):
        work = replace(config, devices=devices, machines=machines)
        assert fitting.on_host(work) == shares * host
        rooms = [(shares + more) * host + fitting.HOST_LEFT for more in (-0.1, 0.1)]
        assert [fitting.fits(work, 139 * GIB, room) for room in rooms] == [False, True]


def test_a_checkpoints_copy_is_counted_if_it_fits():
    config = with_policy(one_b("memory=fast", seq_len=4096), "fast")
    saved = 12.0 * config.model.parameters()  # fp32 weights and two averages
    assert predict(config).saved == saved
    assert predict(replace(config, memory=LONG)).saved == saved  # averages on the host
    room = fitting.HOST_LEFT + saved / fitting.COPY_SHARE
    assert fitting.copy_on_host(config, room) == saved
    assert fitting.copy_on_host(config, room - 1) == 0
    several = replace(config, devices=8, strategy="ddp")
    assert fitting.copy_on_host(several, room) == saved  # the first process writes all
    assert fitting.copy_on_host(replace(several, strategy="fsdp"), room) == saved
    assert fitting.copy_on_host(replace(several, strategy="fsdp", machines=2), room) == saved / 2


def test_ddp_keeps_all_gradients_all_the_time():
    step = one_b("memory=fast", seq_len=4096, batch_size=4, accumulate=1)
    shared = replace(step, devices=2, strategy="ddp")
    kept = [dict(_Step(x).phases())["loss"][peak_memory.GRADIENTS] for x in (step, shared)]
    assert kept == [0, 4 * step.model.parameters()]


def test_fp8_takes_less_and_is_faster():
    fp8 = one_b("memory=fast", "precision=fp8", seq_len=16384, batch_size=1, accumulate=1)
    each = fp8, replace(fp8, bf16_layers=(0, -1)), replace(fp8, precision="bf16")
    peaks = [predict(work).peak for work in each]
    assert peaks == sorted(peaks)
    speeds = [fitting.tokens_per_second(work, H200) for work in each]
    assert min(speeds) > 0 and speeds == sorted(speeds, reverse=True)
