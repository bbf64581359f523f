"""Checkpoints in folders: any rows of any tensor come back, and what is not what was written is
refused.
"""

import json
import os
import re
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from longctx.runs import checkpoint_folder, checkpoint_index, checkpoints, tensor_checks
from longctx.runs.checkpoint_folder import Sharded
from longctx.runs.checkpoint_write import Writers
from tests.runs.ranks import RANKS, Agree, on_all_ranks, rows_of_ranks
from tests.written import write

WHOLE = {"model.a": torch.randn(7, 5), "model.b": torch.randn(2), "model.c": torch.randn(9, 3, 2)}


def save(path: Path) -> list[object]:
    """Write a checkpoint of WHOLE with an optimizer state of twice the weights."""
    random = checkpoints.random_state()

    def work(rank: int, agree: Agree) -> None:
        cuts = {name: rows_of_ranks(x) for name, x in WHOLE.items()}
        weights = {
            name: Sharded(x[cuts[name][rank]], x.shape, cuts[name]) for name, x in WHOLE.items()
        }
        trained = ["model.c", "model.a"]
        state = {
            n: {"step": torch.tensor(4.0), "exp_avg": 2 * weights[name].part}
            for n, name in enumerate(trained)
        }
        optimizer = {"state": state, "param_groups": [{"params": [0, 1], "lr": 0.1}]}
        content = {"steps_done": 4, "meter": {"loss": 1.5}, "random": random}
        about = {"format": checkpoints.FORMAT, "config": {}, "data": "x"}
        writers = Writers(rank, RANKS, agree)
        write(checkpoints.saving(path, about, content, weights, optimizer, trained, writers))

    return on_all_ranks(work)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    path = folder / "step-00000004.ckpt"
    assert save(path) == [None] * RANKS
    return path


def test_any_rows_come_back(path: Path) -> None:
    checkpoints.verify(path)
    checkpoint = checkpoints.read(path, checkpoints.TO_RESUME)
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
    torch.testing.assert_close(checkpoint["random"]["torch"], torch.get_rng_state())


def test_no_file_holds_the_whole(path: Path) -> None:
    files = sorted(path.glob("*.safetensors"))
    assert len(files) == RANKS
    total_bytes = sum(3 * x.nbytes for x in WHOLE.values())
    assert all(file.stat().st_size < total_bytes for file in files)


@pytest.mark.parametrize("suffix", [".safetensors", ".json"])
def test_a_flipped_bit_anywhere_is_refused(path: Path, suffix: str) -> None:
    file = sorted(path.glob(f"*{suffix}"))[0]
    intact = file.read_bytes()
    for place in range(0, len(intact), max(1, len(intact) // 40)):
        content = bytearray(intact)
        content[place] ^= 1
        file.write_bytes(content)
        with pytest.raises(ValueError, match=r"damaged|not a checkpoint"):
            checkpoints.verify(path)


def test_a_missing_or_short_file_is_refused_by_name(path: Path) -> None:
    file = sorted(path.glob("*.safetensors"))[1]
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(ValueError, match=file.name):
        checkpoints.verify(path)
    file.unlink()
    with pytest.raises(ValueError, match=file.name):
        checkpoints.verify(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rows": lambda rows: rows[:-1]}, "without its rows from 6 on"),
        ({"rows": lambda rows: rows[1:]}, "without its row 0"),
        ({"rows": lambda rows: [rows[0], *rows]}, "or with that twice"),
        ({"rows": lambda rows: [[rows[0][0], 0, 7]]}, "which is not what checkpoint.json says"),
        ({"rows": lambda rows: []}, "without its rows from 0 on"),
        ({"rows": lambda rows: [["none.safetensors", 0, 7]]}, "not in none.safetensors"),
        ({"shape": lambda shape: [7, 500]}, "which is not what checkpoint.json says"),
        ({"shape": lambda shape: [7]}, "which is not what checkpoint.json says"),
        ({"dtype": lambda name: "bfloat16"}, "which is not what checkpoint.json says"),
    ],
)
def test_an_index_that_its_files_do_not_bear_out_is_refused_before_rows_are_read(
    change: dict[str, Callable[[Any], Any]], message: str, path: Path
) -> None:
    written = json.loads((path / checkpoint_index.INDEX).read_text())
    entry = written["content"]["tensors"]["model.a"]
    assert tensor_checks.flaw(checkpoint_folder.Rows(path, "model.a", entry), [7, 5]) is None
    for key, of in change.items():
        entry[key] = of(entry[key])
    rows = checkpoint_folder.Rows(path, "model.a", entry)
    assert message in str(tensor_checks.flaw(rows, entry["shape"], tensor_checks.READABLE))


def test_states_are_checked_as_those_of_a_file_of_torch(path: Path) -> None:
    names = ("step", "exp_avg")
    expected = [(WHOLE["model.c"].shape, names), (WHOLE["model.a"].shape, names)]
    checkpoint = checkpoints.read(path, checkpoints.TO_RESUME)
    checkpoints.check_states(path, checkpoint, expected)
    checkpoints.check_finite(path, checkpoint)
    with pytest.raises(ValueError, match="exp_avg of weight 0 is"):
        checkpoints.check_states(path, checkpoint, [(torch.Size([9, 3, 3]), names), expected[1]])
    with pytest.raises(ValueError, match="not those of the optimizer"):
        checkpoints.check_states(path, checkpoint, expected[:1])


def test_a_number_that_is_not_finite_is_found_in_any_row(path: Path) -> None:
    for row in range(7):
        x = torch.zeros(7, 5)
        assert tensor_checks.not_finite({"x": x}) is None
        x[row, 3] = (float("nan"), float("inf"), -float("inf"))[row % 3]
        assert tensor_checks.not_finite({"y": torch.zeros(0), "x": x}) == "x"
    checkpoint = checkpoints.read(path, checkpoints.TO_RESUME)
    assert tensor_checks.not_finite(checkpoint["state_dict"]) is None


def rewrite(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Let the index of the checkpoint at `path` say something else, with a checksum that fits."""
    index = path / checkpoint_index.INDEX
    content = json.loads(index.read_text())["content"]
    change(content)
    crc32 = zlib.crc32(json.dumps(content).encode())
    index.write_text(json.dumps({"crc32": crc32, "content": content}))


@pytest.mark.parametrize("kind", ["FIFO", "link", "outside"])
def test_rows_in_a_file_that_is_not_listed_are_refused(kind: str, path: Path) -> None:
    shard = "shard-00000-000.safetensors"
    other = {"FIFO": "f.safetensors", "link": "l.safetensors", "outside": f"../{shard}"}[kind]
    if kind == "FIFO":
        os.mkfifo(path / other)
    elif kind == "link":
        (path / other).symlink_to(path / shard)
    else:
        shutil.copy(path / shard, path / other)

    def change(content: dict[str, Any]) -> None:
        rows = content["tensors"]["model.a"]["rows"]
        rows[:] = [[other if file == shard else file, *counts] for file, *counts in rows]

    rewrite(path, change)
    with pytest.raises(ValueError, match=re.escape(other)):
        checkpoints.read(path)


def test_a_listed_file_outside_the_folder_is_refused(path: Path) -> None:
    shard = "shard-00000-000.safetensors"
    shutil.copy(path / shard, path.parent / shard)

    def change(content: dict[str, Any]) -> None:
        content["files"][f"../{shard}"] = content["files"][shard]

    rewrite(path, change)
    with pytest.raises(ValueError, match=f"../{shard}"):
        checkpoints.verify(path)


def test_a_file_of_another_size_is_not_read(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.truncate(path / "shard-00000-000.safetensors", 300 << 30)  # sparse
    sizes, checksum = list[int](), checkpoint_index.checksum

    def recorded(file: Any) -> int:
        sizes.append(os.fstat(file.fileno()).st_size)
        return checksum(file)

    monkeypatch.setattr(checkpoint_index, "checksum", recorded)
    assert checkpoint_index.verify(path) == "shard-00000-000.safetensors"
    assert len(sizes) == RANKS - 1 and max(sizes) < 1 << 20


@pytest.mark.parametrize("kind", ["FIFO", "link"])
@pytest.mark.parametrize("place", ["checkpoint.json", "shard-00000-000.safetensors"])
def test_what_is_no_regular_file_of_the_folder_is_not_opened(
    place: str, kind: str, path: Path, tmp_path: Path
) -> None:
    moved = (path / place).rename(tmp_path / "elsewhere")
    if kind == "FIFO":
        os.mkfifo(path / place)
    else:
        (path / place).symlink_to(moved)
    with pytest.raises(ValueError, match=place):
        checkpoints.verify(path)
