"""Tuning: the fastest right config wins and is read by training; timed on a GPU only."""

import json
from contextlib import contextmanager

import pytest
import torch

from benchmarks import tune
from benchmarks.words import main
from longctx.kernels import launch
from longctx.kernels.attention.launch import launch_config, measured


@pytest.mark.parametrize(
    ("times", "wrong", "winner"),
    [
        ({"now": 1.0, "a": 0.9, "b": 0.8}, "", "b"),
        ({"now": 1.0, "a": 0.9, "b": 0.8}, "b", "a"),
        ({"now": 1.0, "a": 0.99}, "", "now"),  # noise does not change a table
        ({"now": 1.0, "a": 2.0}, "now", ""),
    ],
)
def test_the_fastest_right_config_wins(times, wrong, winner, monkeypatch):
    on_trial = []

    @contextmanager
    def using(config):
        on_trial.append(config)
        yield
        on_trial.pop()

    monkeypatch.setattr(tune, "medians", lambda calls, *_: {x: times[x] for x in calls})
    monkeypatch.setattr(tune, "call", lambda *_: lambda: None)
    monkeypatch.setattr(tune, "refuses", lambda *_: "wrong" if on_trial[-1] == wrong else None)
    x = {"q": torch.zeros(1, 8, 1, 16)}
    arguments = "dq", times, "now", using, "forward", "torch-tiled", x
    if winner:
        assert tune.race(*arguments) == winner
    else:
        with pytest.raises(ValueError, match="in use"):
            tune.race(*arguments)


@pytest.mark.gpu
def test_tune_on_a_gpu(monkeypatch, tmp_path):
    path = tmp_path / "launch.json"
    monkeypatch.setenv("LONGCTX_LAUNCH", str(path))
    few = {name: tune.portable_candidates(name)[:2] for name in launch.PORTABLE}
    monkeypatch.setattr(tune, "portable_candidates", few.__getitem__)
    variations = tune.variations
    monkeypatch.setattr(tune, "variations", lambda config: [*variations(config)][:1])
    path.write_text("{}")
    measured.cache_clear()
    assert main(["tune", "head_sizes=64", "lengths=1024", f"out={path}"]) == 0
    tables = json.loads(path.read_text())[torch.cuda.get_device_name()]
    assert {"forward", "dkv", "dq"} <= tables.keys()
    assert (torch.cuda.get_device_capability()[0] == 9) == ("hopper_forward" in tables)
    measured.cache_clear()
    q = torch.zeros(1, 8, 1, 64, device="cuda", dtype=torch.bfloat16)
    assert list(launch_config("forward", q, 1024)) == tables["forward"]["64"]["0"]
