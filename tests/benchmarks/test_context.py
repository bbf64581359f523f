"""The frontier: every length once, with a speed or a reason, and a plot of them."""

import pytest
import torch

from benchmarks import context
from benchmarks.words import training_run
from longctx.parallel import devices
from longctx.planner.peak_memory import predict
from longctx.spec import hardware
from longctx.spec.hardware import GIB
from longctx.training import dry_run
from longctx.training.dry_run import OUT_OF_MEMORY, DryRun


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> hardware.Chip:
    """A GPU that takes what is predicted; naive attention runs out of its memory."""
    chip = hardware.chip("NVIDIA H200", 139.8 * GIB)
    machine = hardware.Machine(1, chip, 2048 * GIB)

    def in_child(run, steps, document, validate, seconds):
        work = run.workload
        if work.attention.backend == "naive":
            return DryRun([], failed=OUT_OF_MEMORY)
        memory = {"memory_peak_gib": predict(work).peak / GIB}
        kernels = {work.attention.backend: "made up"}
        return DryRun([9e3, 500.0], work.seq_len, work.seq_len**2 / 2, memory, kernels)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(devices, "this_machine", lambda: machine)
    monkeypatch.setattr(devices, "check_attention", lambda config, model, device: None)
    monkeypatch.setattr(dry_run, "dry_run_in_child", in_child)
    monkeypatch.setattr(context, "machine", lambda: {"gpu": "made up"})
    return chip


def test_every_point_is_measured_or_says_why_not(card, tmp_path, result_of, capsys):
    overrides = ["model=124m", "memory=balanced", f"runs={tmp_path}/runs", "wandb.mode=disabled"]
    own = ["backends=naive,flash", "shortest=65536", "longest=300000"]
    result = result_of("context", *own, *overrides)
    rows = {(row["backend"], row["tokens"]): row for row in result["rows"]}
    assert [n for b, n in rows if b == "flash"] == [65536, 131072, 262144, 300000]
    flash = rows["flash", 131072]
    assert flash["tokens_per_second"] == 131072 / 0.5
    model = training_run(["model=124m"], "cuda").workload.model
    assert flash["mfu"] == pytest.approx(131072 / 0.5 * model.flops_per_token(131072 / 2) / 989e12)
    assert rows["naive", 131072]["note"] == OUT_OF_MEMORY
    assert (tmp_path / "result.png").exists()
    names = sorted(path.name for path in (tmp_path / "runs").iterdir())
    assert names[0] == "context-flash-131072-001"
    assert "262,144 tokens/s" in capsys.readouterr().out


def test_commands_share_a_file_of_points(card, tmp_path, capsys, monkeypatch, result_of):
    own = ["model=124m", "memory=balanced", f"runs={tmp_path}/runs", "wandb.mode=disabled"]

    def points(*words: str) -> tuple[dict, list[tuple[str, int]]]:
        result = result_of("context", *own, *words)
        return result, [(row["backend"], row["tokens"]) for row in result["rows"]]

    points("backends=flash", "shortest=4096", "longest=plan", "minutes=0.01")
    result, found = points("backends=flash,sdpa", "shortest=8192", "longest=16384")
    assert found[:2] == [("flash", 4096), ("flash", 32768)]  # left out then, as those that follow
    assert set(found[-4:]) == {(b, n) for b in ("flash", "sdpa") for n in (8192, 16384)}
    assert len(set(found)) == len(found)
    assert len(result["commands"]) == 2
    assert result["longest"]["flash"]["how"] == "predicted"
    measured = {row["tokens"] for row in result["rows"] if "tokens_per_second" in row}
    assert measured == {8192, 16384}
    again, _ = points("backends=flash", "shortest=8192", "longest=8192", "minutes=0.01")
    assert {row["tokens"] for row in again["rows"] if "tokens_per_second" in row} == measured

    monkeypatch.setattr(context, "machine", lambda: {"gpu": "another"})
    anew, found = points("backends=flash", "longest=4096")
    assert (found, len(anew["commands"])) == ([("flash", 4096)], 1)
    assert "begins anew: its points are of another gpu" in capsys.readouterr().out
