"""Checkpoints in folders: any rows of any tensor come back, a damaged or foreign file is refused,
and older checkpoints are deleted without a reader ever seeing half of one.
"""

import json
import os
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from longctx import files
from longctx.evaluation.load import open_model
from longctx.runs import checkpoint_index, checkpoints, run_folder
from longctx.runs.checkpoint_write import Saving, Sharded
from tests.processes import killed_at
from tests.runs.ranks import RANKS, on_all_ranks, rows_of_ranks
from tests.written import alone, write

WHOLE = {"model.a": torch.randn(7, 5), "model.b": torch.randn(2), "model.c": torch.randn(9, 3, 2)}
SHARD = "shard-00000-000.safetensors"


def save(path: Path) -> None:
    """Write a checkpoint of WHOLE with an optimizer state of twice the weights."""
    random = checkpoints.random_state()

    def write_share(rank: int) -> None:
        cuts = {name: (x, rows_of_ranks(x)) for name, x in WHOLE.items()}
        weights = {n: Sharded(x[cut[rank]], x.shape, cut) for n, (x, cut) in cuts.items()}
        trained, step = ["model.c", "model.a"], torch.tensor(4.0)
        moments = [2 * weights[name].part for name in trained]
        states = {n: {"step": step, "exp_avg": moment} for n, moment in enumerate(moments)}
        optimizer = {"state": states, "param_groups": [{"params": [0, 1], "lr": 0.1}]}
        about = {"config": {}, "data": "x"}
        content = {"longctx": about, "steps_done": 4, "meter": {"loss": 1.5}, "random": random}
        contents = checkpoints.contents(content, weights, optimizer, trained)
        write(Saving(path, *contents, rank, RANKS))

    on_all_ranks(write_share)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    path = folder / "step-00000004.ckpt"
    save(path)
    return path


def rewrite(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Let the JSON of the checkpoint at `path` say something else, with a checksum that fits."""
    index = path / checkpoint_index.INDEX
    content = json.loads(index.read_text())["content"]
    change(content)
    crc32 = zlib.crc32(json.dumps(content).encode())
    index.write_text(json.dumps({"crc32": crc32, "content": content}))


def test_any_rows_come_back(path):
    checkpoints.verify(path)
    checkpoint = checkpoints.read(path)
    sizes = [file.stat().st_size for file in path.glob("*.safetensors")]
    assert len(sizes) == RANKS and max(sizes) < sum(3 * x.nbytes for x in WHOLE.values())
    assert (checkpoint["steps_done"], checkpoint["meter"]) == (4, {"loss": 1.5})
    for name, x in WHOLE.items():
        stored = checkpoint["state_dict"][name]
        assert stored.shape == x.shape
        for start in range(len(x) + 1):
            for stop in range(start, len(x) + 1):
                assert torch.equal(stored[start:stop], x[start:stop]), (name, start, stop)
    states = checkpoint["optimizer_states"][0]["state"]
    assert torch.equal(states[1]["exp_avg"][:], 2 * WHOLE["model.a"])
    assert float(states[0]["step"]) == 4.0
    assert checkpoint["random"]["torch"] == torch.get_rng_state().tolist()
    # Of an optimizer like Adafactor, or one that counts steps without a tensor
    weights = {"model.a": Sharded(WHOLE["model.a"], WHOLE["model.a"].shape, [])}
    for value in (WHOLE["model.a"][:, :1], 3):
        state = {"param_groups": [], "state": {0: {"row": value}}}
        with pytest.raises(ValueError, match=r"row of model\.a: give a tensor of one number or"):
            checkpoints.contents({}, weights, state, ["model.a"])


@pytest.mark.parametrize("suffix", [".safetensors", ".json"])
def test_a_flipped_bit_anywhere_is_refused(path, suffix):
    file = sorted(path.glob(f"*{suffix}"))[0]
    intact = file.read_bytes()
    for place in range(0, len(intact), max(1, len(intact) // 40)):
        content = bytearray(intact)
        content[place] ^= 1
        file.write_bytes(content)
        with pytest.raises(checkpoints.Damaged, match=path.name):
            checkpoints.verify(path)


def test_a_missing_or_resized_file_is_refused(path):
    file = path / SHARD
    # A sparse file, whose checksum would take hours
    os.truncate(file, 300 << 30)
    for _ in range(2):
        for reads in (True, False):
            with pytest.raises(checkpoints.Damaged):
                checkpoints.verify(path, reads)
        file.unlink(missing_ok=True)


def test_a_checkpoint_that_its_run_deletes_meanwhile_is_not_damaged(path, monkeypatch):
    crc32, hide = zlib.crc32, checkpoint_index.set_aside
    weight = checkpoints.read(path)["state_dict"]["model.a"]
    # Only files of slices have checksums of several pieces
    monkeypatch.setattr(zlib, "crc32", lambda x, *n: bool(hide(path)) if n else crc32(x))
    for read in (checkpoints.verify, checkpoints.verify, lambda _: weight[:]):
        with pytest.raises(ValueError, match=r"no such checkpoint.*retry"):
            read(path)
    assert run_folder.checkpoints(path.parent.parent) == []


@pytest.mark.parametrize(
    "change",
    [
        *({"rows": [[SHARD, 0, count]]} for count in (3, 7)),
        *({"shape": shape} for shape in ([7, 500], [7])),
        {"dtype": "bfloat16"},
    ],
)
def test_rows_unlike_the_index_are_refused(change, path):
    rewrite(path, lambda content: content["tensors"]["model.a"].update(change))
    with pytest.raises(ValueError, match=r"model\.a"):
        checkpoints.read(path)["state_dict"]["model.a"][:]


def test_one_infinite_number_is_found():
    for row in range(7):
        x = torch.zeros(7, 5)
        assert checkpoints.not_finite({"x": x}) is None
        x[row, 3] = (float("nan"), float("inf"), -float("inf"))[row % 3]
        assert checkpoints.not_finite({"y": torch.zeros(0), "x": x}) == "x"


def test_files_outside_the_list_are_not_read(path):
    shutil.copy(path / SHARD, path.parent / SHARD)
    outside = f"../{SHARD}"
    rewrite(path, lambda content: content["tensors"]["model.b"].update(rows=[[outside, 0, 2]]))
    with pytest.raises(checkpoints.Damaged, match=outside):
        checkpoints.read(path)
    rewrite(path, lambda content: content["files"].update({outside: content["files"][SHARD]}))
    with pytest.raises(checkpoints.Damaged, match=outside):
        checkpoints.verify(path)


@pytest.mark.parametrize("is_fifo", [True, False])
@pytest.mark.parametrize("name", ["checkpoint.json", SHARD])
def test_a_fifo_or_a_link_is_not_opened(name, is_fifo, path, tmp_path):
    moved = (path / name).rename(tmp_path / "elsewhere")
    if is_fifo:
        os.mkfifo(path / name)
    else:
        (path / name).symlink_to(moved)
    with pytest.raises(ValueError, match=name):
        checkpoints.verify(path)


def test_a_foreign_checkpoint_is_refused(tmp_path):
    path = tmp_path / "x.ckpt"
    for content in (b"", b"not a checkpoint", b"PK\x03\x04 torn"):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"x\.ckpt"):
            open_model(str(path))
    path.unlink()
    state = {"random": checkpoints.random_state()}
    write(Saving(path, {"longctx": {}} | state, {"x": alone(torch.zeros(3))}))
    rewrite(path, lambda content: content.update(format=2))
    with pytest.raises(ValueError, match="written in format 2"):
        open_model(str(path))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with two checkpoints, in which a step is only a name."""
    for step in (1, 2):
        path = run_folder.checkpoint_path(tmp_path, step)
        path.mkdir(parents=True)
        for name in ("checkpoint.json", *(f"shard-00000-{n:03d}.safetensors" for n in range(5))):
            (path / name).touch()
    return tmp_path


KILLED = """
import os, signal, sys
from pathlib import Path
from longctx import files
from longctx.runs import checkpoint_index
unlink, left = os.unlink, [3]
def slow(*arguments, **options):
    if not left[0]:
        print("half", flush=True)
        signal.pause()
    unlink(*arguments, **options)
    left[0] -= 1
os.unlink = slow
files.remove(checkpoint_index.set_aside(Path(sys.argv[1])))
"""


def test_a_kill_while_deleting_leaves_no_half_checkpoint(run):
    first, second = run_folder.checkpoints(run)
    killed_at("half", KILLED, first)
    assert run_folder.checkpoints(run) == [second]
    (left,) = (run / "checkpoints").glob(".*")
    assert len(list(left.iterdir())) == 3
    files.remove_partial(run / "checkpoints")
    assert [path.name for path in (run / "checkpoints").iterdir()] == [second.name]
