"""Several GPUs: every case is a run that train.py accepts, leaves a row, and leaves no process."""

import json
import threading
import time
from pathlib import Path

import pytest

from benchmarks import device_runs
from benchmarks.device_cases import CASES, PACKED, Case
from benchmarks.device_runs import MEASURES, Place, Started
from benchmarks.devices import compare, free_for
from benchmarks.process_group import group
from benchmarks.words import main
from longctx.planner import fitting
from longctx.spec import hardware
from longctx.spec.hardware import GIB
from longctx.spec.step import Workload

TINY = ["model=tiny", "model.layers=1", "seq_len=96", "attention=naive", "data.documents=20"]
TRAINED = [name for name, case in CASES.items() if case.what == "train"]


def place_in(folder: Path) -> Place:
    chip = hardware.chip(hardware.ASSUMED[0], hardware.ASSUMED[1] * GIB)
    end = time.monotonic() + 86_400  # no test reaches it
    return Place((0,), folder, False, end, threading.Event(), (), chip, 110 * GIB)


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return place_in(tmp_path)


@pytest.fixture(scope="module")
def workloads() -> dict[str, Workload]:
    """Return the step of every case of train.py."""
    place = place_in(Path("nowhere"))
    return {
        name: device_runs.decided(device_runs.overrides_of(CASES[name], place), place)
        for name in TRAINED
    }


@pytest.mark.parametrize("name", TRAINED)
def test_every_run_fits(name, workloads, place):
    assert workloads[name].devices == CASES[name].gpus
    assert fitting.fits(workloads[name], place.chip.usable, place.host * CASES[name].gpus)


def test_a_case_is_compared_with_one_gpu(workloads):
    for name, case in CASES.items():
        assert case.what in MEASURES
        assert not case.ours or CASES[case.ours].gpus == case.gpus
        if case.one and name in workloads:
            assert CASES[case.one].gpus == 1
            assert CASES[case.one].data == case.data
            for key in ("model", "seq_len", "batch_size"):
                assert getattr(workloads[name], key) == getattr(workloads[case.one], key)
    rows = [
        {"case": "1b-64k-4", "tokens_per_second": 76.0},
        {"case": "1b-64k-1", "tokens_per_second": 20.0},
        {"case": "1b-64k-2", "note": "ended"},
        {"case": "accelerate-64k-4", "tokens_per_second": 38.0},
    ]
    compare(rows)
    assert rows[0]["over_one"] == 3.8
    assert "over_one" not in rows[2]
    assert rows[3]["longctx_over_it"] == 2.0


def test_cases_have_gpus_of_their_own_or_share():
    one, two, shared = (Case(1, 1, "train"), Case(2, 1, "train"), Case(4, 1, "lost", shared=True))
    four = (0, 1, 2, 3)
    assert free_for(two, [(one, (0,))], four) == (1, 2)
    assert free_for(two, [(one, (0,)), (two, (1, 2))], four) is None
    assert free_for(one, [(one, (0,)), (two, (1, 2))], four) == (3,)
    assert free_for(shared, [(shared, four)], four) == four
    assert free_for(shared, [(one, (0,))], four) is None
    assert free_for(one, [(shared, four)], four) is None


def test_the_steps_after_the_first_count():
    rows = [
        {"step": 5, "ms_per_step": 900.0, "loss": 3.0, "memory_peak_gib": 2.0},
        {"step": 10, "ms_per_step": 100.0, "loss": 2.0, "memory_peak_gib": 4.0, "extra": 7},
        {"step": 15, "ms_per_step": 300.0, "loss": 1.0, "memory_peak_gib": 3.0},
    ]
    expected = {"seconds": 0.2, "first_seconds": 4.5, "memory_peak_gib": 4.0, "extra": 7}
    expected |= {"loss": [3.0, 2.0, 1.0]}
    row = device_runs.measured(rows)
    assert {key: row[key] for key in expected} == expected
    assert device_runs.measured([]) == {}


def test_a_command_leaves_no_process(place):
    with Started(["bash", "-c", "sleep 60 & echo out; wait"], place.folder / "log", place) as one:
        assert one.wait(lambda: "out" in one.log.read_text())
        assert len(group(one.process.pid)) == 2
    assert not group(one.process.pid)


@pytest.mark.parametrize(
    ("command", "problem"),
    [
        ("echo 'error: no'; echo end; exit 3", "exit code 3: error: no"),
        ("echo '[rank0]: ValueError: x'; echo ChildFailedError: y; exit 1", "exit code 1: [rank0]"),
        ("sleep 60", "ended after"),
    ],
)
def test_a_failed_command_has_a_reason(command, problem, place):
    with Started(["bash", "-c", command], place.folder / "log", place) as one:
        assert not one.wait(end=None if command.startswith("echo") else 0.0)
        assert one.problem().startswith(problem)


@pytest.mark.slow
@pytest.mark.no_gpu
def test_a_run_is_measured_and_ended(tmp_path, monkeypatch):
    monkeypatch.setenv("LONGCTX_CACHE", str(tmp_path / "cache"))
    monkeypatch.setitem(CASES, "small", Case(2, 300, "train", "devices=2", PACKED, steps=3))
    monkeypatch.setitem(CASES, "wrong", Case(1, 300, "train", "devices=1 device=cuda", PACKED))
    out = tmp_path / "out.json"
    monkeypatch.setattr("benchmarks.devices.make_corpus", lambda folder: None)
    before = {"commands": ["a"], "rows": [{"case": "tiny-4", "gpus": 4}, {"case": "small"}]}
    out.write_text(json.dumps(before))
    argv = ["devices", "cases=small,wrong", f"folder={tmp_path}/all", f"out={out}", *TINY]
    assert main(argv) == 0
    result = json.loads(out.read_text())
    assert len(result["commands"]) == 2
    rows = {row["case"]: row for row in result["rows"]}
    assert set(rows) == {"tiny-4", "small", "wrong"}
    assert [one["step"] for one in rows["small"]["metrics"]] == [1, 2, 3]
    assert rows["small"]["tokens_per_second"] > 0
    assert "exit code 2: error: device=cuda" in rows["wrong"]["note"]
