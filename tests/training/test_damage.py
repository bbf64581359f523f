"""Whatever the JSON of a checkpoint says, with a checksum that fits: no command ends with a
traceback. It does its work, or it is one line that names the checkpoint or its run. So are other
tensors than those of the run.
"""

import json
import shutil
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import longctx
import train
from longctx import cli
from longctx.runs import metrics_file, run_folder
from longctx.runs.checkpoint_index import INDEX
from tests.training.sample_run import newest, replace_newest

ODD = [None, [], {}, 0, -1, "x", 10**400, [[0]], "int64", {"a": 1}]
Place = tuple[str | int, ...]


def places(content: Any, depth: int = 5) -> Iterator[Place]:
    """Yield the way to every value of nested dictionaries, and to the first item of a list."""
    inner = content.items() if isinstance(content, dict) else []
    inner = enumerate(content[:1]) if isinstance(content, list) else inner
    for name, value in inner if depth else []:
        yield (name,)
        yield from ((name, *more) for more in places(value, depth - 1))


def damage(path: Path, place: Place, value: Any) -> None:
    """Set one value in the JSON of the checkpoint at `path`."""
    content = json.loads((path / INDEX).read_text())["content"]
    inner = content
    for name in place[:-1]:
        inner = inner[name]
    inner[place[-1]] = value
    crc32 = zlib.crc32(json.dumps(content).encode())
    (path / INDEX).write_text(json.dumps({"crc32": crc32, "content": content}))


@pytest.fixture
def run(trained) -> Path:
    return trained(max_steps=2, val_every=1)


RESUME = "train resume=RUN max_steps=3"
COMMANDS = (
    RESUME,
    "export RUN RUN/out",
    RESUME,
    "generate RUN device=cpu max_new_tokens=1 prompt=a",
    RESUME,
    "compare RUN out=RUN/x.html",
)


def check(run: Path, number: int, place: Place, value: Any, capsys: Any) -> None:
    """Check that a command, each in turn, does its work, or prints one line that names the run."""
    copy = run.with_name("damaged")
    words = COMMANDS[number % len(COMMANDS)].replace("RUN", str(copy)).split()
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(run, copy, symlinks=True)
    damage(run_folder.checkpoints(copy)[-1], place, value)
    capsys.readouterr()
    code = cli.main(words)
    error = capsys.readouterr().err
    assert code in (0, 2), (place, value, words)
    assert code == 0 or (str(copy) in error and error.count("\n") == 1), (place, value, error)


KNOWN = {
    "best": [],
    "best loss": "x",
    "meter counts": [],
    "meter loss": 10**400,
    "meter steps": -1,
    "spikes found": "x",
    "random": 0,
    "steps_done": "x",
    "param_groups": {},
    "tensors model.norm.weight dtype": "int64",
    "files shard-00000-000.safetensors": 3,
    "longctx config model": 3,
    "longctx config seq_len": -1,
}


def test_known_damage_is_one_line(run, capsys):
    for place, value in [*KNOWN.items(), ("longctx config seq_len", None)]:
        for number in (0, 1, 3, 5):
            check(run, number, tuple(place.split()), value, capsys)


@pytest.mark.slow  # minutes
def test_damage_of_every_field_is_one_line(run, capsys):
    content = json.loads((run_folder.checkpoints(run)[-1] / INDEX).read_text())["content"]
    of_others = list(content["tensors"])[1:]
    for number, place in enumerate(places(content)):
        if not {*of_others} & {*place}:
            check(run, number, place, ODD[number % len(ODD)], capsys)


# Other tensors, which are refused before anything computes with them

Checkpoint = dict[str, Any]
EMBEDDING, NEWEST = "model.embed.weight", "step-00000002.ckpt"


def state(content: Checkpoint) -> dict[int, dict[str, Any]]:
    """Of each weight the state of its optimizer."""
    return content["optimizer_states"][0]["state"]


def replace(tensors: dict[str, Tensor], name: str, change: Callable[[Tensor], Tensor]) -> None:
    tensors[name] = change(tensors[name])


def cut(tensor: Tensor) -> Tensor:
    return tensor[:-1].clone()


# what a checkpoint has lost or has too much, and what the error names
STATES: list[tuple[Callable[[Checkpoint], Any], str]] = [
    (lambda content: content["state_dict"].pop(EMBEDDING), EMBEDDING),
    (lambda content: replace(content["state_dict"], EMBEDDING, torch.flatten), EMBEDDING),
    (lambda content: replace(content["state_dict"], EMBEDDING, cut), EMBEDDING),
    (lambda content: state(content).pop(0), NEWEST),
    (lambda content: state(content)[0].pop("exp_avg_sq"), NEWEST),
    (lambda content: replace(state(content)[0], "exp_avg", torch.flatten), "exp_avg of "),
    (lambda content: replace(state(content)[0], "exp_avg", cut), "exp_avg of "),
    (lambda content: state(content).update({99: state(content)[0]}), NEWEST),
    (lambda content: content["optimizer_states"][0]["param_groups"].pop(), NEWEST),
]


@pytest.mark.parametrize(("change", "named"), STATES)
def test_tensors_of_another_run_are_refused(change, named, two_steps, refused):
    content = newest(two_steps)
    change(content)
    replace_newest(content, two_steps)
    rows = metrics_file.read(two_steps)
    refused(train.main([f"resume={two_steps}", "max_steps=3"]), named)
    assert metrics_file.read(two_steps) == rows
    if named == EMBEDDING:
        with pytest.raises(ValueError, match=EMBEDDING):
            longctx.load(two_steps, "cpu")


def test_optimizer_settings_come_from_the_run(two_steps, finished_run, tmp_path):
    straight = shutil.copytree(finished_run, tmp_path / "straight", symlinks=True)
    content = newest(two_steps)
    for group in content["optimizer_states"][0]["param_groups"]:
        group |= {"eps": 1e9, "betas": ("a", None), "maximize": True, "weight_decay": 1e9}
    replace_newest(content, two_steps)
    for folder in (two_steps, straight):
        assert train.main([f"resume={folder}", "max_steps=3"]) == 0
    torch.testing.assert_close(newest(two_steps)["state_dict"], newest(straight)["state_dict"])
