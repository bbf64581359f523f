"""Tuning: the fastest right config wins and is read by training; timed on a GPU only."""

import json
from contextlib import contextmanager
from typing import NamedTuple

import pytest
import torch

from benchmarks import tune
from benchmarks.words import main
from longctx.kernels import launch
from longctx.kernels.attention.launch import Launch, launch_config, measured, measured_file

CPU = torch.device("cpu")


class Config(NamedTuple):
    BN: int
    stages: int
    turns: bool


def forget() -> None:
    """Forget the tables that were read."""
    for function in (measured, launch.configure):
        function.cache_clear()


@pytest.fixture
def path(monkeypatch, tmp_path):
    """The file of measured tables."""
    monkeypatch.setenv("LONGCTX_LAUNCH", str(tmp_path / "launch.json"))
    forget()
    yield tmp_path / "launch.json"
    forget()


@pytest.fixture
def q(monkeypatch):
    """A CPU tensor that the table of launch configs takes for one of the GPU "Test"."""

    class Like(NamedTuple):
        shape: tuple = (1, 100, 2, 64)
        device: torch.device = CPU
        is_cuda: bool = True

        def element_size(self):
            return 2

    monkeypatch.setattr(launch, "_name", lambda _: "Test")
    return Like()


def race(times, wrong=(), now="now"):
    """Run `tune.race` on configs with these times in ms; those in `wrong` fail the self-test."""
    on_trial = []

    class Named(NamedTuple):
        name: str

    @contextmanager
    def using(config):
        on_trial.append(config.name)
        yield
        on_trial.pop()

    def medians(calls, *_):
        return {config: times[config.name] for config in calls}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tune, "medians", medians)
        patch.setattr(tune, "call", lambda *_: lambda: None)
        patch.setattr(tune, "refuses", lambda *_: "wrong" if on_trial[-1] in wrong else None)
        x = {"q": torch.zeros(1, 8, 1, 16)}
        return tune.race(
            "t", map(Named, times), Named(now), using, "forward", "torch-tiled", x
        ).name


def test_the_fastest_right_config_wins_and_by_enough():
    assert race({"now": 1.0, "a": 0.9, "b": 0.8}) == "b"
    assert race({"now": 1.0, "a": 0.9, "b": 0.8}, wrong=("b",)) == "a"
    assert race({"now": 1.0, "a": 0.99}) == "now", "noise does not change a table"
    assert race({"now": 1.0, "a": 2.0}) == "now"
    with pytest.raises(ValueError, match="in use, cannot be measured: wrong"):
        race({"now": 1.0, "a": 2.0}, wrong=("now",))


@pytest.mark.parametrize("kernel", list(launch.PORTABLE))
def test_candidates_are_tiles(kernel):
    candidates = tune.portable_candidates(kernel)
    assert candidates
    assert all(launch._is_config(kernel, list(config)) for config in candidates)


def test_training_reads_what_was_written(q, path):
    table = {}
    fastest = {1024: [64, 32, 4, 3], 4096: [64, 32, 4, 3], 16384: [128, 32, 8, 2]}
    for length, config in fastest.items():
        tune.add(table, "forward", 50, length, list(fastest), config)
    assert table == {"forward": {"64": {"0": [64, 32, 4, 3], "8192": [128, 32, 8, 2]}}}
    before = {"Other": {"dq": {}}, "Test": {"measured": {}, "dq": {"64": {"0": [64, 32, 4, 1]}}}}
    tune.write(path, before, "Test", table, {"date": "2026-01-01"})
    assert tune.read(path)["Other"] == {"dq": {}}
    assert tune.read(path)["Test"]["measured"] == {"date": "2026-01-01"}
    measured.cache_clear()
    assert launch_config("forward", q, 5000) == Launch(64, 32, 4, 3)
    assert launch_config("forward", q, 8192) == Launch(128, 32, 8, 2)
    assert launch.bucket("forward", q, 9000) == 8192
    assert launch_config("dq", q, 5000) == Launch(64, 32, 4, 1)
    shipped = launch.table()
    assert launch_config("dkv", q, 100) == Launch(*shipped["any"]["dkv"]["64"]["0"])
    unmeasured = torch.zeros(1, 8, 1, 64)  # fp32
    expected = Launch(*shipped["any-fp32"]["forward"]["64"]["0"])
    assert launch_config("forward", unmeasured, 100) == expected


def test_a_hopper_module_gets_its_config_once(q, path):
    module = type(launch)("module")
    module.CONFIGS = {64: Config(128, 2, True), 128: Config(64, 2, True)}
    tune.write(path, {}, "Test", {"hopper_forward": {"64": {"0": [128, 3, False]}}}, {})
    launch.configure(module, "hopper_forward", CPU)
    assert module.CONFIGS == {64: Config(128, 3, False), 128: Config(64, 2, True)}
    tune.write(path, {}, "Test", {"hopper_forward": {"64": {"0": [1, 2, 3, 4, 5]}}}, {})
    forget()
    with pytest.raises(ValueError, match="another version of longctx; run tune again"):
        launch.configure(module, "hopper_forward", CPU)


@pytest.mark.gpu
def test_tune_on_a_gpu(monkeypatch, path):
    few = {name: tune.portable_candidates(name)[:2] for name in launch.PORTABLE}
    monkeypatch.setattr(tune, "portable_candidates", few.__getitem__)
    path.write_text("{}")
    assert main(["tune", "head_sizes=64", "lengths=1024", f"out={path}"]) == 0
    tables = json.loads(path.read_text())[torch.cuda.get_device_name()]
    assert tables["measured"].keys() >= {"date", "torch", "triton", "ptxas", "driver", "device"}
    assert {"forward", "dkv", "dq"} <= tables.keys()
    assert (torch.cuda.get_device_capability()[0] == 9) == ("hopper_forward" in tables)
    measured.cache_clear()
    q = torch.zeros(1, 8, 1, 64, device="cuda", dtype=torch.bfloat16)
    assert list(launch_config("forward", q, 1024)) == tables["forward"]["64"]["0"]


@pytest.mark.parametrize(
    "row", [[100, 64, 4, 3], [256, 64, 4, 3], [64, 64, 5, 3], [64, 64, 4], "x", [64, 64, 4, 0]]
)
def test_malformed_table_is_refused(q, path, row):
    path.write_text(json.dumps({"Test": {"forward": {"64": {"0": row}}}}))
    with pytest.raises(ValueError, match=r"launch.json: .* configs .* run tune again"):
        launch_config("forward", q, 100)


def test_tables_are_looked_up_by_environment(monkeypatch, tmp_path, q, path):
    monkeypatch.setenv("LONGCTX_LAUNCH", "")
    assert measured_file() is None
    assert measured("Test") == {}
    monkeypatch.delenv("LONGCTX_LAUNCH")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert measured_file() == tmp_path / "longctx" / "launch.json"
    measured.cache_clear()
    assert measured("Test") == {}, "that one need not be there"
    measured.cache_clear()
    monkeypatch.setenv("LONGCTX_LAUNCH", str(path))
    with pytest.raises(ValueError, match="no such file"):
        launch_config("forward", q, 100)
