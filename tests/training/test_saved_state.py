"""A checkpoint whose tensors or plain values are not those of its run is refused, in one line,
before anything computes with them.
"""

import json
import math
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import train
from longctx.evaluation.subject import load_model
from longctx.runs import checkpoints, metrics_file, run_folder
from tests.training.sample_run import newest, replace_newest

Checkpoint = dict[str, Any]
EMBEDDING = "model.embed.weight"


@pytest.fixture(scope="module")
def finished(
    overrides_in: Callable[..., list[str]], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A run of two steps, with one checkpoint."""
    runs = tmp_path_factory.mktemp("runs")
    assert train.main(overrides_in(runs, name="r", max_steps=2)) == 0
    return runs / "r"


@pytest.fixture
def folder(finished: Path, tmp_path: Path) -> Path:
    """A copy of that run."""
    return shutil.copytree(finished, tmp_path / "r", symlinks=True)


def refused(folder: Path, content: Checkpoint, capsys: pytest.CaptureFixture[str]) -> str:
    """The one line that a resume from `content` is refused with."""
    replace_newest(content, folder)
    rows = metrics_file.read(folder)
    capsys.readouterr()
    assert train.main([f"resume={folder}", "max_steps=3"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert metrics_file.read(folder) == rows
    return line


def state(content: Checkpoint) -> dict[int, dict[str, Any]]:
    """Of each weight the state of its optimizer."""
    return content["optimizer_states"][0]["state"]


MOMENTS: dict[str, Callable[[Tensor], Any]] = {
    "shorter": lambda x: x[:-1].clone(),
    "longer": lambda x: torch.cat([x, x]),
    "flat": lambda x: x.flatten(),
    "of one number": lambda x: torch.zeros(1),
    "NaN in it": lambda x: x.clone().fill_(math.nan),
}


@pytest.mark.parametrize("kind", MOMENTS)
def test_an_average_that_is_not_of_the_model_is_refused(
    kind: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    content = newest(folder)
    state(content)[0]["exp_avg"] = MOMENTS[kind](state(content)[0]["exp_avg"])
    assert "exp_avg of " in refused(folder, content, capsys)


@pytest.mark.parametrize("kind", [kind for kind in MOMENTS if kind != "NaN in it"])
def test_a_weight_that_is_not_of_the_model_is_refused(
    kind: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    content = newest(folder)
    content["state_dict"][EMBEDDING] = MOMENTS[kind](content["state_dict"][EMBEDDING])
    why = f"its weights are not those of its model: {EMBEDDING} is "
    assert why in refused(folder, content, capsys)
    with pytest.raises(ValueError, match=why.partition(":")[0]):
        load_model(folder)


def state_missing(content: Checkpoint) -> None:
    del state(content)[0]


def average_missing(content: Checkpoint) -> None:
    del state(content)[0]["exp_avg_sq"]


def state_of_no_weight(content: Checkpoint) -> None:
    state(content)[99] = state(content)[0]


def other_groups(content: Checkpoint) -> None:
    content["optimizer_states"][0]["param_groups"].pop()


def step_ahead(content: Checkpoint) -> None:
    state(content)[0]["step"] = torch.tensor(3.0)


@pytest.mark.parametrize(
    "change",
    [
        state_missing,
        average_missing,
        state_of_no_weight,
        other_groups,
        step_ahead,
    ],
)
def test_a_state_that_is_not_the_optimizers_is_refused(
    change: Callable[[Checkpoint], None], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    content = newest(folder)
    change(content)
    assert run_folder.checkpoints(folder)[-1].name in refused(folder, content, capsys)


def test_settings_of_the_optimizer_are_the_runs_and_not_the_files(
    folder: Path, finished: Path, tmp_path: Path
) -> None:
    straight = shutil.copytree(finished, tmp_path / "straight", symlinks=True)
    content = newest(folder)
    for group in content["optimizer_states"][0]["param_groups"]:
        group |= {"eps": 1e9, "betas": ("a", None), "maximize": True, "weight_decay": 1e9}
    replace_newest(content, folder)
    for one in (folder, straight):
        assert train.main([f"resume={one}", "max_steps=3"]) == 0
    torch.testing.assert_close(newest(folder)["state_dict"], newest(straight)["state_dict"])


SHARD = "shard-00000-000.safetensors"


@pytest.mark.parametrize(
    ("part", "value"),
    [
        *[("format", x) for x in (99, None, [])],
        *[("steps_done", x) for x in ("2", 0, True, 2.5, None, [2], 10**30)],
        *[("meter", x) for x in (None, [], {}, {"loss": "x"})],
        *[("meter/tokens_seen", x) for x in ("x", -1, 2.5, 10**30, None)],
        *[("meter/loss", x) for x in (math.nan, math.inf, "1", None, [1.0])],
        *[("meter/counts", x) for x in ([1, 2, 3], [1, 2, 3, "x"], 4, None, [1, 2, 3, math.nan])],
        *[("meter/spikes", x) for x in ("x", {}, {"losses": 5})],
        *[("best", x) for x in ("x", {}, {"loss": "x", "step": 1, "since": 0})],
        *[("random", x) for x in (None, [], {"torch": [1] * 9})],
        *[("random/torch", x) for x in (None, "x", [256], [1.5], [[1]], [0] * 3)],
        *[("random/cuda", x) for x in (None, [None], [[0]], 5)],
        *[("random/python", x) for x in (None, [3], [3, ["x"], None])],
        *[
            ("random/numpy", x)
            for x in (
                None,
                ("MT19937", [1] * 624, 10**9, 0, 0.0),
                ("MT19937", [1] * 624, -1, 0, 0.0),
                ("MT19937", [-1] * 624, 1, 0, 0.0),
                ("MT19937", [1] * 3, 1, 0, 0.0),
                ("other", [1] * 624, 1, 0, 0.0),
            )
        ],
        *[("longctx", x) for x in (None, [], {}, {"format": 1})],
        *[("longctx/config", x) for x in (None, [], "x", {}, {"devices": "x"})],
        *[("longctx/config/devices", x) for x in ("x", None, [], {})],
        *[("longctx/config/context", x) for x in ("x", None, [], {"degree": 0})],
        *[("longctx/config/model", x) for x in (None, [], 5, {"layers": 10**6}, {"channels": -1})],
        *[("longctx/data", x) for x in (None, [], {})],
        *[("longctx/kernel_lock", x) for x in ({"fingerprint": 5}, {"machine": []})],
        *[("param_groups", x) for x in (None, {}, [], [{}], [{"params": [0]}], [5])],
        *[("optimizer_scalars", x) for x in (None, [], {}, {"x": {}}, {"0": 5}, {"-1": {}})],
        *[("optimizer_scalars/0/step", x) for x in (None, "x", -1, 1e30, [1, 2])],
        *[("tensors", x) for x in (None, [], {}, {"a": None}, {"a": {"shape": [-1]}})],
        *[("tensors/model.embed.weight/dtype", x) for x in ("int8", None, "float64")],
        *[("tensors/model.embed.weight/shape", x) for x in ([1], [10**30, 1], ["x"], None)],
        *[("tensors/model.embed.weight/rows", x) for x in (None, [[SHARD, 0, 1]], [[0] * 3])],
        *[("tensors/optimizer.0.exp_avg/rows", x) for x in ([], [["../x", 0, 320]])],
        *[("files", x) for x in (None, {}, [], {SHARD: None}, {"../../config.yaml": {}})],
    ],
)
def test_an_odd_value_in_the_json_is_one_line(
    part: str, value: object, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    index = run_folder.checkpoints(folder)[-1] / "checkpoint.json"
    content = json.loads(index.read_text())["content"]
    *path, last = part.split("/")
    inner = content
    for key in path:
        inner = inner[key]
    assert last in inner
    inner[last] = value
    crc32 = zlib.crc32(json.dumps(content).encode())
    index.write_text(json.dumps({"crc32": crc32, "content": content}))
    capsys.readouterr()
    assert train.main([f"resume={folder}", "max_steps=3"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and str(folder) in line


def test_every_part_of_a_checkpoint_that_is_untouched_passes(folder: Path) -> None:
    path = run_folder.checkpoints(folder)[-1]
    checkpoints.check_plain(path, checkpoints.read(path, checkpoints.TO_RESUME))
    assert train.main([f"resume={folder}", "max_steps=3"]) == 0
