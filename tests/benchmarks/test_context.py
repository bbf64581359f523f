"""The frontier: every length once, points that were left out say why, and the plot draws what was
found.
"""

import json
import time

import matplotlib.image
import pytest
import torch

from benchmarks import context
from benchmarks.words import main, training_config
from longctx.planner import hardware
from longctx.planner.hardware import GIB
from longctx.planner.peak_memory import predict
from longctx.training import fit, probe


def test_lengths_double_up_to_the_longest() -> None:
    assert context.ladder(4096, 20000) == [4096, 8192, 16384, 20000]
    assert context.ladder(4096, 8192) == [4096, 8192]
    assert context.ladder(4096, 3000) == [3000]
    assert context.ladder(4096, 0) == []


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> hardware.Chip:
    """A GPU that is not there, on which a step takes what is predicted; naive attention runs out of
    memory.
    """
    made = hardware.chip("NVIDIA H200", 139.8 * GIB)

    def run(config, device, steps, document, validate, seconds):
        if config.attention.backend == "naive":
            return probe.Measured([], failed=probe.OUT_OF_MEMORY)
        memory = {"memory_peak_gib": predict(config).peak / GIB}
        tokens = config.seq_len
        return probe.Measured(
            [9e3, 500.0], tokens, tokens**2 / 2, memory, {config.attention.backend: "made up"}
        )

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(fit, "gpu", lambda: made)
    monkeypatch.setattr(fit, "check_attention", lambda config, device: None)
    monkeypatch.setattr(probe, "in_child", run)
    monkeypatch.setattr(context, "machine", lambda: {"gpu": "made up"})
    return made


def test_every_point_is_measured_or_says_why_not(card: hardware.Chip, tmp_path, capsys) -> None:
    words = ["model=124m", "memory=balanced", f"runs={tmp_path}/runs", "wandb.mode=disabled"]
    argv = [
        "context",
        "backends=naive,flash",
        "shortest=65536",
        "longest=300000",
        f"out={tmp_path}/c",
        *words,
    ]
    assert main(argv) == 0
    found = json.loads((tmp_path / "c.json").read_text())
    rows = {(row["backend"], row["tokens"]): row for row in found["rows"]}
    assert [n for b, n in rows if b == "flash"] == [65536, 131072, 262144, 300000]
    flash = rows["flash", 131072]
    assert flash["tokens_per_second"] == 131072 / 0.5
    model = training_config(["model=124m"], "cuda").model
    assert flash["mfu"] == pytest.approx(131072 / 0.5 * model.flops_per_token(131072 / 2) / 989e12)
    assert rows["naive", 131072]["note"] == probe.OUT_OF_MEMORY
    assert matplotlib.image.imread(tmp_path / "c.png").std() > 0.01
    assert (
        sorted(path.name for path in (tmp_path / "runs").iterdir())[0] == "context-flash-131072-001"
    )
    assert "flash 131,072 tokens: memory=balanced, 262,144 tokens/s" in capsys.readouterr().out


def test_the_longest_is_found_by_probes(card: hardware.Chip) -> None:
    config = training_config(
        ["model=1b", "attention=flash", "memory=balanced", "batch_size=1"], "cuda"
    )
    best = context.find_longest(config, context.Options(), end=1e12)
    assert best["how"] == "confirmed by 1 probe"
    assert 300_000 < best["tokens"] < 2_000_000
    naive = training_config(["model=1b", "attention=naive", "memory=balanced"], "cuda")
    assert context.find_longest(naive, context.Options(), end=1e12)["how"].startswith(
        "predicted; seq_len=max: no length"
    )


def test_a_point_that_takes_too_long_is_left_out(card: hardware.Chip) -> None:
    config = training_config(
        ["model=1b", "memory=long", "seq_len=1048576", "batch_size=1", "accumulate=1"], "cuda"
    )
    row = context.measure(config, 2, end=time.monotonic() + 60)
    assert row["note"].startswith("left out: steps=2 of about")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("name", ["context", "memory"])
def test_without_a_gpu_that_is_said(name: str, capsys) -> None:
    assert main([name]) == 2
    assert "no CUDA GPU" in capsys.readouterr().err
