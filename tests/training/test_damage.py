"""Whatever the JSON of a checkpoint says, with a checksum that fits: no command ends with a
traceback. It does its work, or it is one line that names the checkpoint or its run.
"""

import json
import shutil
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from longctx import cli
from longctx.runs import run_folder
from longctx.runs.checkpoint_index import INDEX

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


KNOWN = [
    (("best",), []),
    (("meter", "counts"), []),
    (("spikes", "found"), "x"),
    (("best", "loss"), "x"),
    (("random",), 0),
    (("tensors", "model.norm.weight", "dtype"), "int64"),
    (("meter", "loss"), 10**400),
    (("meter", "steps"), -1),
    (("steps_done",), "x"),
    (("files", "shard-00000-000.safetensors"), 3),
    (("longctx", "config", "model"), 3),
    (("longctx", "config", "seq_len"), None),
    (("longctx", "config", "seq_len"), -1),
    (("param_groups",), {}),
]


def test_known_damage_is_one_line(run, capsys):
    for place, value in KNOWN:
        for number in (0, 1, 3, 5):
            check(run, number, place, value, capsys)


@pytest.mark.slow  # minutes
def test_damage_of_every_field_is_one_line(run, capsys):
    content = json.loads((run_folder.checkpoints(run)[-1] / INDEX).read_text())["content"]
    of_others = list(content["tensors"])[1:]
    for number, place in enumerate(places(content)):
        if not {*of_others} & {*place}:
            check(run, number, place, ODD[number % len(ODD)], capsys)
