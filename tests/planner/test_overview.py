"""longctx plan: any GPU by name and size, every policy and backend."""

import json
from collections.abc import Callable
from dataclasses import replace

import pytest

from benchmarks.shapes import SHAPES
from longctx.cli import main, plan
from longctx.cli.plan import PlanOptions
from longctx.planner import fitting, overview
from longctx.spec import hardware
from longctx.spec.hardware import GIB
from tests.planner.steps import FIGURES, workload


@pytest.fixture
def planned(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """What `longctx plan` prints for the words of a command line."""

    def plan_of(*words: str) -> str:
        assert main(["plan", *words]) == 0
        return capsys.readouterr().out

    return plan_of


def test_a_file_of_a_run_on_a_cpu_has_a_plan_for_another_machine(tmp_path, planned):
    (tmp_path / "mine.yaml").write_text("device: cpu\nmodel: 1b\nseq_len: 262144\n")
    words = [str(tmp_path / "mine.yaml"), "gpu=H100", "gpu_memory=80", "host_memory=512"]
    out = planned(*words)
    assert max(map(len, out.splitlines())) <= 120
    shown = "80.0 naive sdpa flash fast balanced parameters saved loss MFU"
    assert all(word in out for word in shown.split())
    lora = planned(*words, "attention=flash", "lora.rank=8", "lora.base=nf4")
    assert "nf4" in lora and "naive" not in lora


@pytest.mark.parametrize(("words", "parts"), FIGURES["answers"])
def test_the_answer_comes_first(words, parts, planned, monkeypatch):
    monkeypatch.setattr(overview, "print_longest", lambda *_: None)  # it takes most of the time
    line = planned(*words.split()).partition("\n\n")[0].replace("\n    ", " ")
    assert line.startswith(parts[0]) and all(part in line for part in parts)


def test_the_answer_waits_for_no_other_backend(planned, monkeypatch, capsys):
    decide, printed = fitting.decide, dict[str, str]()

    def decided(step, *limits):
        printed.setdefault(step.attention.label, capsys.readouterr().out)
        return decide(step, *limits)

    monkeypatch.setattr(fitting, "decide", decided)
    planned("model=tiny", "gpu=H100")
    assert not printed["flash"] and printed["naive"].startswith("fits: flash")


def test_the_longest_sequence_is_one_number(planned):
    from benchmarks import cards, picture

    words = ["model=1b", "gpu=H200", "host_memory=128", "attention=flash"]
    ends, _ = picture.predicted_end(["model=1b", "attention=flash"], {"gpu": "NVIDIA H200"})
    assert f" {ends:,} " in planned(*words)
    assert f" {ends:,} " in cards.PAGE.read_text()


def test_half_speed_is_the_longest_with_half_the_speed_of_fast():
    step, chip, host = workload("model=8b", "lora.rank=16"), hardware.chip("H100"), 64 * GIB
    named = [replace(step, memory=replace(step.memory, policy=x)) for x in ("fast", "auto")]
    found = overview.lengths(named, chip, host)
    assert list(found) == ["fast", "half speed", "all settings"] and None not in found.values()
    fast, half, longest = (found[name] or step for name in found)
    assert fast.seq_len < half.seq_len < longest.seq_len
    longer = fitting.decide(fitting.one_row(step)(half.seq_len + 1024), chip, host)
    speeds = [fitting.tokens_per_second(x, chip) for x in (longer, fast, half)]
    assert speeds[0] < speeds[1] / 2 <= speeds[2]


def test_a_model_by_its_config_json(tmp_path, planned):
    (tmp_path / "config.json").write_text(json.dumps(SHAPES["qwen3-8b"]))
    words = [f"init={tmp_path}", "gpu=H200", "host_memory=128", "attention=flash", "lora.rank=16"]
    assert "8,191 million parameters" in planned(*words, "seq_len=128K")


def test_layers_of_transformers_are_measured(tmp_path, planned):
    sizes = {"hidden_size": 128, "intermediate_size": 512, "num_attention_heads": 4}
    settings = {"model_type": "cohere", "vocab_size": 1024, "num_hidden_layers": 3} | sizes
    (tmp_path / "config.json").write_text(json.dumps(settings))
    out = planned(f"init={tmp_path}", "gpu=H100", "attention=flash", "seq_len=2048")
    assert "not measured" not in out and "balanced" in out


def test_a_model_that_a_run_refuses_has_no_plan(tmp_path, refused):
    settings = {"model_type": "bloom", "hidden_size": 32, "n_layer": 1, "n_head": 4}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    refused(main(["plan", f"init={tmp_path}", "seq_len=256"]), "model_type=bloom")
    words = ["plan", "model=tiny", "graphs=true", "memory.offload=1"]
    refused(main(words), "graphs=true: memory=")


@pytest.mark.parametrize("here", [None, "NVIDIA GeForce RTX 4090", "NVIDIA H200"])
def test_host_memory_is_of_the_gpu_planned_for(here, monkeypatch):
    monkeypatch.setattr(hardware, "here", lambda: here and hardware.chip(here, 24 * GIB))
    monkeypatch.setattr(hardware, "host_memory", lambda: 7.0 * GIB)
    named, assumed = PlanOptions(gpu="H200", gpu_memory=139), hardware.ASSUMED_HOST
    hosts = [7 * GIB] * 3 if here == "NVIDIA H200" else [assumed, 8 * assumed, 8 * assumed]
    assert [plan.machine(named, devices)[1] for devices in (1, 8, 64)] == hosts
    assert plan.machine(PlanOptions(), 1)[1] == (7 * GIB if here else assumed)
    assert plan.machine(PlanOptions(host_memory=512), 8)[1] == 512 * GIB


@pytest.mark.parametrize(("words", "shown", "hidden"), FIGURES["shown"])
def test_a_plan_shows_what_is_possible(words, shown, hidden, planned):
    out = planned("gpu=H200", "gpu_memory=139", *words.split())
    assert shown in out and hidden not in out


def test_many_gpus_that_nobody_has(planned):
    words = ["gpu=H100", "gpu_memory=80", "host_memory=1024", "model=1b", "attention=flash"]
    out = planned(*words, "seq_len=262144", "devices=16")
    assert "16 GPUs on 2 machines" in out and "by term on each of 16 GPUs, GiB" in out
    tables = out.partition("Layouts")[2].partition("Memory and speed")[0].splitlines()
    assert max(map(len, out.splitlines())) <= 120 and "…" not in out
    layouts = {tuple(line.split()[:3]) for line in tables}
    for degree in ("2", "4", "8", "16"):
        for method in ("ulysses", "allgather"):
            assert {("ddp", degree, method), ("fsdp", degree, method)} <= layouts
    out = planned(*words, "seq_len=65536", "devices=8", "gpus_per_machine=4", "network=100")
    assert "on 2 machines" in out and "12 beyond" in out
