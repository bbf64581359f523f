"""Checkpoints are written whole or not at all, also while training changes the tensors."""

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from longctx.runs import checkpoint_index, checkpoint_write, checkpoints
from longctx.runs.checkpoint_write import Saving, Sharded
from tests.processes import killed_at
from tests.runs.ranks import RANKS, rows_of_ranks
from tests.written import alone, files_below, write


def memory_for(saving: Saving) -> list[Tensor]:
    """Host memory for a copy of each part."""
    return [torch.full((shard.size,), 255, dtype=torch.uint8) for shard in saving.shards]


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
    return {name: alone(x) for name, x in tensors.items()}


def read(path: Path) -> dict[str, checkpoints.SlicedTensor]:
    """The tensors of a checkpoint."""
    entries = checkpoint_index.read(path)["tensors"]
    return {name: checkpoints.SlicedTensor(path, name, entry) for name, entry in entries.items()}


class Held(Saving):
    """A checkpoint that is not written before it is `released`."""

    def hold(self) -> None:
        self.released = threading.Event()
        self.thread = ThreadPoolExecutor(1)
        self.begin(self.thread, memory_for(self))

    def _wait_for_copy(self) -> None:
        assert self.released.wait(300)

    def release(self) -> None:
        self.released.set()
        self.written.result()


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
    saving.release()
    assert checkpoint_index.read(tmp_path / "behind") == checkpoint_index.read(tmp_path / "waited")
    found = read(tmp_path / "behind")
    for name, x in before.items():
        assert torch.equal(found[name][:], x)


@pytest.mark.parametrize("behind", [False, True])
def test_large_shares_are_several_files(behind, tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint_write, "SHARD", 100)
    monkeypatch.setattr(checkpoint_write, "CHUNK", 7)
    path = tmp_path / "step-00000001.ckpt"
    weights = {f"x{n}": torch.randn(n, 3) for n in range(1, 25)}
    saving = Saving(path, {}, whole(weights))
    write(saving, memory_for(saving) if behind else None)
    files = list(path.glob("*.safetensors"))
    assert 15 <= len(files) <= 24
    assert saving.bytes == sum(file.stat().st_size for file in files)
    checkpoint_index.verify(path)
    found = read(path)
    assert all(torch.equal(found[name][:], x) for name, x in weights.items())


def test_a_rank_that_cannot_write_leaves_nothing(tmp_path, monkeypatch):
    sizes = [2, 9_000, 2]  # the rows of rank 1 do not fit
    stops = torch.tensor(sizes).cumsum(0).tolist()
    rows = [slice(stop - size, stop) for stop, size in zip(stops, sizes, strict=True)]

    def save(rank: int) -> Saving:
        share = {"x": Sharded(torch.ones(sizes[rank], 10), torch.Size([sum(sizes), 10]), rows)}
        saving = Saving(tmp_path / "x", {}, share, rank, RANKS)
        saving.begin(ThreadPoolExecutor(1))
        return saving

    monkeypatch.setattr(checkpoint_write, "OTHERS", 0.0)
    with files_below(100_000):
        savings = [save(rank) for rank in range(RANKS)]
        try:
            problems = [str(saving.written.exception(300)) for saving in savings[1:]]
        finally:  # or rank 0's thread waits for ever
            savings[0].until = 0.0
        assert savings[0].written.exception() is None
    assert "File too large" in problems[0] and problems[1] == "None"
    assert not (tmp_path / "x").exists()


def test_rank_0_names_the_folder_last(tmp_path):
    x, path = torch.randn(7, 4), tmp_path / "x"
    cut, savings = rows_of_ranks(x), []
    for rank in range(RANKS):
        share = {"x": Sharded(x[cut[rank]].clone(), x.shape, cut)}
        savings.append(Held(path, {}, share, rank, RANKS))
        savings[-1].hold()
    savings[0].released.set()
    try:
        for saving in savings[1:]:
            assert not path.exists()
            saving.release()
        savings[0].written.result(300)
    finally:  # or rank 0's thread waits for ever
        savings[0].until = 0.0
    checkpoint_index.verify(path)
    assert torch.equal(read(path)["x"][:], x) and list(tmp_path.iterdir()) == [path]


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
    (partial / "shard-00000-000.safetensors").write_bytes(b"x" * 9000)  # had it come so far
    write(Saving(tmp_path / "step-00000002.ckpt", {}, whole(odd())))
    checkpoint_index.verify(tmp_path / "step-00000002.ckpt")
    assert not partial.exists()


def test_an_earlier_save_of_the_step_is_replaced(tmp_path):
    path = tmp_path / "step-00000001.ckpt"
    for value in (1.0, 2.0):
        write(Saving(path, {}, {"x": alone(torch.full((2,), value))}))
    assert torch.equal(read(path)["x"][:], torch.full((2,), 2.0))
    assert list(tmp_path.glob("[!.]*")) == [path]
