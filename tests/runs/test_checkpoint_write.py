"""Checkpoints are written whole or not at all, also while training changes the tensors."""

import threading
from concurrent.futures import wait
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from longctx import files
from longctx.runs import checkpoint_index, checkpoint_write, checkpoints
from longctx.runs.checkpoint_write import Saving, Sharded, Writers
from tests.processes import killed_at
from tests.runs.ranks import RANKS, Barrier, on_all_ranks, rows_of_ranks
from tests.written import files_below, write


def memory_for(saving: Saving) -> list[Tensor]:
    """Host memory for a copy of each part."""
    return [torch.full((size,), 255, dtype=torch.uint8) for size in saving.sizes]


def odd() -> dict[str, Tensor]:
    """Tensors of every precision, transposed ones and a word outside of ASCII among them."""
    torch.manual_seed(0)
    return {
        "model.b": torch.randn(3, 5).bfloat16(),
        "model.é": torch.randn(7),
        "model.a": torch.randn(6, 4).T,
        "model.h": torch.randn(1, 3).half(),
    }


def whole(tensors: dict[str, Tensor]) -> dict[str, Sharded]:
    return {name: Sharded.whole(x) for name, x in tensors.items()}


def read(path: Path) -> dict[str, checkpoints.Rows]:
    """The tensors of a checkpoint."""
    entries = checkpoint_index.read(path)["tensors"]
    return {name: checkpoints.Rows(path, name, entry) for name, entry in entries.items()}


class Held(Saving):
    """A checkpoint that is not written before it is `released`."""

    released: threading.Event

    def hold(self) -> None:
        self.released = threading.Event()
        self.begin(memory_for(self))

    def _wait_for_copy(self) -> None:
        assert self.released.wait(300)


def test_files_equal_those_of_safetensors(tmp_path):
    write(Saving(tmp_path / "x", {}, whole(odd())))
    save_file({name: x.contiguous() for name, x in odd().items()}, tmp_path / "library")
    (file,) = (tmp_path / "x").glob("*.safetensors")
    assert file.read_bytes() == (tmp_path / "library").read_bytes()


def test_changes_after_the_copy_are_not_written(tmp_path):
    before, tensors = odd(), odd()
    about: dict[str, Any] = {"lr": [1.0]}
    write(Saving(tmp_path / "waited", about, whole(before)))
    saving = Held(tmp_path / "behind", about, whole(tensors))
    saving.hold()
    for x in tensors.values():
        x.zero_()
    about["lr"].append(2.0)
    assert not saving.written.done() and not saving.path.exists()
    saving.released.set()
    saving.end()
    assert checkpoint_index.read(tmp_path / "behind") == checkpoint_index.read(tmp_path / "waited")
    found = read(tmp_path / "behind")
    for name, x in before.items():
        assert torch.equal(found[name][:], x)


@pytest.mark.parametrize("behind", [False, True])
def test_large_shares_are_several_files(behind, tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint_write, "PART", 100)
    monkeypatch.setattr(checkpoint_write, "CHUNK", 7)
    path = tmp_path / "step-00000001.ckpt"
    weights = {f"x{n}": torch.randn(n, 3) for n in range(1, 25)}
    saving = Saving(path, {}, whole(weights))
    saving.begin(memory_for(saving) if behind else None)
    saving.end()
    files = list(path.glob("*.safetensors"))
    assert 15 <= len(files) <= 24
    assert saving.bytes == sum(file.stat().st_size for file in files)
    checkpoint_index.verify(path)
    found = read(path)
    assert all(torch.equal(found[name][:], x) for name, x in weights.items())


def shares(rank: int, sizes: list[int]) -> dict[str, Sharded]:
    """What `rank` has of a tensor of which the ranks have so many rows."""
    stops = torch.tensor(sizes).cumsum(0).tolist()
    rows = [slice(stop - size, stop) for stop, size in zip(stops, sizes, strict=True)]
    return {"x": Sharded(torch.ones(sizes[rank], 10), torch.Size([sum(sizes), 10]), rows)}


@pytest.mark.parametrize("behind", [False, True])
def test_a_rank_that_cannot_write_leaves_nothing(behind, tmp_path):
    sizes = [2, 9_000, 2]  # the second rank's rows do not fit

    def save(rank: int, barrier: Barrier) -> None:
        saving = Saving(tmp_path / "x", {}, shares(rank, sizes), Writers(rank, RANKS, barrier))
        saving.begin(memory_for(saving) if behind else None)
        if rank != 0:
            wait([saving.written])
        barrier()
        if rank == 0:  # which waits, until the second rank ends the run
            assert not saving.written.done()
            saving.cancel()
        else:
            saving.end()

    with files_below(100_000):
        outcomes = on_all_ranks(save)
    assert "File too large" in str(outcomes[1]) and outcomes[::2] == [None, None]
    assert not list(tmp_path.iterdir())


def test_rank_0_names_the_folder_last(tmp_path):
    x, path = torch.randn(7, 4), tmp_path / "x"

    def save(rank: int, barrier: Barrier) -> None:
        cut = rows_of_ranks(x)
        share = {"x": Sharded(x[cut[rank]].clone(), x.shape, cut)}
        saving = Held(path, {}, share, Writers(rank, RANKS, barrier))
        saving.hold()
        if rank != 2:
            saving.released.set()
        assert not path.exists()
        barrier()
        saving.released.set()
        wait([saving.written])
        if rank == 0:  # which needs no other rank to complete it
            checkpoint_index.verify(path)
        saving.end()

    assert on_all_ranks(save) == [None] * RANKS
    assert torch.equal(read(path)["x"][:], x)


def test_a_save_cancelled_at_its_end_is_whole(tmp_path, monkeypatch):
    """The thread completes the folder, and `cancel` waits for it."""
    is_written, may_complete, to_disk = threading.Event(), threading.Event(), files.to_disk

    def wait_before_the_name(path: Path) -> None:
        if path.suffix == ".partial":
            is_written.set()
            assert may_complete.wait(300)
        to_disk(path)

    monkeypatch.setattr(files, "to_disk", wait_before_the_name)
    saving = Saving(tmp_path / "x", {}, whole(odd()))
    saving.begin()
    assert is_written.wait(300)
    threading.Timer(0.1, may_complete.set).start()
    saving.cancel()
    assert may_complete.is_set() and saving.deleted.done()
    checkpoint_index.verify(tmp_path / "x")
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


KILLED = """
import sys
from pathlib import Path
from tests.runs.test_checkpoint_write import Held, odd, whole
from longctx.runs.checkpoint_write import Saving
from tests.written import write
folder = Path(sys.argv[1])
write(Saving(folder / "step-00000001.ckpt", {}, whole(odd())))
Held(folder / "step-00000002.ckpt", {}, whole(odd())).hold()
print("begun", flush=True)
"""


def test_a_kill_in_the_write_leaves_the_checkpoint_before_it(tmp_path):
    killed_at("begun", KILLED, tmp_path)
    partial = tmp_path / ".step-00000002.ckpt.partial"
    assert {path.name for path in tmp_path.iterdir()} == {"step-00000001.ckpt", partial.name}
    checkpoint_index.verify(tmp_path / "step-00000001.ckpt")
    (partial / "shard-00000-000.safetensors").touch()  # had it come so far
    write(Saving(tmp_path / "step-00000002.ckpt", {}, whole(odd())))
    checkpoint_index.verify(tmp_path / "step-00000002.ckpt")
    assert not partial.exists()


def test_an_earlier_save_of_the_step_is_replaced(tmp_path):
    path = tmp_path / "step-00000001.ckpt"
    for value in (1.0, 2.0):
        write(Saving(path, {}, {"x": Sharded.whole(torch.full((2,), value))}))
    assert torch.equal(read(path)["x"][:], torch.full((2,), 2.0))
    assert list(tmp_path.iterdir()) == [path]
