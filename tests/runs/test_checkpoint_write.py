"""Checkpoints are written whole or not at all, also while what they were copied from changes."""

import json
import os
import resource
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from longctx import files
from longctx.runs import checkpoint_folder, checkpoint_index, checkpoint_write
from longctx.runs.checkpoint_folder import Sharded
from longctx.runs.checkpoint_write import Saving, Snapshot, Writers, parts_of
from tests.processes import killed_at
from tests.runs.ranks import RANKS, Agree, on_all_ranks, rows_of_ranks
from tests.written import write


def on_host(size: int) -> Tensor:
    return torch.full((size,), 255, dtype=torch.uint8)


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


def index_of(path: Path) -> Any:
    return json.loads((path / checkpoint_index.INDEX).read_text())["content"]


class Held(Snapshot):
    """A snapshot that is not copied, and so not written, before it is `released`."""

    def __init__(self) -> None:
        super().__init__(on_host)
        self.released = threading.Event()

    def wait(self, number: int) -> None:
        assert self.released.wait(20)


@contextmanager
def files_below(size: int) -> Iterator[None]:
    """As on a full disk: no file of this process grows beyond `size` bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_file_is_what_the_library_of_safetensors_writes(tmp_path: Path) -> None:
    tensors = {name: x.contiguous() for name, x in odd().items()}
    write(Saving(tmp_path / "x", {}, whole(odd())))
    save_file(tensors, tmp_path / "library")
    (file,) = (tmp_path / "x").glob("*.safetensors")
    assert file.read_bytes() == (tmp_path / "library").read_bytes()
    for name, x in load_file(file).items():
        assert torch.equal(x, tensors[name]) and x.dtype == tensors[name].dtype


def test_what_changes_after_the_copy_is_not_written(tmp_path: Path) -> None:
    before, tensors = odd(), odd()
    about: dict[str, Any] = {"lr": [1.0]}
    write(Saving(tmp_path / "waited", about, whole(before)))
    held = Held()
    saving = Saving(tmp_path / "behind", about, whole(tensors))
    saving.begin(held)
    for x in tensors.values():
        x.zero_()
    about["lr"].append(2.0)
    time.sleep(0.05)
    assert not saving.is_done and not saving.path.exists()
    held.released.set()
    saving.end()
    assert index_of(tmp_path / "behind") == index_of(tmp_path / "waited")
    read = checkpoint_folder.read(tmp_path / "behind")["tensors"]
    for name, x in before.items():
        assert torch.equal(read[name][:], x)


def test_memory_for_the_copy_is_used_again(tmp_path: Path) -> None:
    snapshot = Snapshot(on_host)
    for step in range(4):
        tensors = {"x": torch.full((5 + step // 2, 3), float(step))}
        saving = Saving(tmp_path / str(step), {}, whole(tensors))
        places = [one.data_ptr() for one in snapshot.memory]
        saving.begin(snapshot)
        saving.end()
        if step % 2:
            assert [one.data_ptr() for one in snapshot.memory] == places
        read = checkpoint_folder.read(tmp_path / str(step))["tensors"]
        assert torch.equal(read["x"][:], tensors["x"])


def test_memory_of_the_last_copy_goes_as_soon_as_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint_write, "PART", 64)
    snapshot = Snapshot(on_host)
    for step in range(2):
        snapshot.is_last = step == 1
        saving = Saving(tmp_path / str(step), {}, whole(odd()))
        saving.begin(snapshot)
        saving.end()
        assert checkpoint_index.verify(saving.path) is None
        assert len(saving.parts) > 1
        sizes = [0 if snapshot.is_last else part.size for part in saving.parts]
        assert [one.nbytes for one in snapshot.memory] == sizes


@pytest.mark.parametrize("behind", [False, True])
def test_a_rank_writes_as_many_files_as_its_tensors_need(
    behind: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of about PART bytes, in pieces of CHUNK, some at a time."""
    monkeypatch.setattr(checkpoint_write, "PART", 100)
    monkeypatch.setattr(checkpoint_write, "CHUNK", 7)
    path = tmp_path / "step-00000001.ckpt"
    weights = {f"x{n}": torch.randn(n, 3) for n in range(1, 25)}
    saving = Saving(path, {}, whole(weights))
    saving.begin(Snapshot(on_host) if behind else None)
    saving.end()
    files = list(path.glob("*.safetensors"))
    assert 15 <= len(files) <= 24
    assert saving.bytes == sum(file.stat().st_size for file in files)
    assert checkpoint_index.verify(path) is None
    read = checkpoint_folder.read(path)["tensors"]
    for name, x in weights.items():
        assert torch.equal(read[name][:], x)
    files[7].write_bytes(files[7].read_bytes().replace(b"F32", b"I32"))
    assert checkpoint_index.verify(path) == files[7].name


def shares(rank: int, sizes: list[int]) -> dict[str, Sharded]:
    """What `rank` has of a tensor of which the ranks have so many rows."""
    stops = torch.tensor(sizes).cumsum(0).tolist()
    rows = [slice(stop - size, stop) for stop, size in zip(stops, sizes, strict=True)]
    return {"x": Sharded(torch.ones(sizes[rank], 10), torch.Size([sum(sizes), 10]), rows)}


@pytest.mark.parametrize("behind", [False, True])
def test_a_rank_that_cannot_write_leaves_nothing(behind: bool, tmp_path: Path) -> None:
    sizes = [2, 9_000, 2]  # of which the second rank's rows do not fit

    def work(rank: int, agree: Agree) -> None:
        saving = Saving(tmp_path / "x", {}, shares(rank, sizes), Writers(rank, RANKS, agree))
        saving.begin(Snapshot(on_host) if behind else None)
        saving.wait()  # the first rank has read what became of the others, and ends by itself
        saving.end()

    with files_below(100_000):
        outcomes = on_all_ranks(work)
    assert all("File too large" in str(outcome) for outcome in outcomes)
    assert not list(tmp_path.iterdir())


def test_the_first_rank_tells_of_another_one_that_could_not_write(tmp_path: Path) -> None:
    sizes, said = [2, 9_000, 2], [""] * RANKS

    def work(rank: int, agree: Agree) -> None:
        saving = Saving(tmp_path / "x", {}, shares(rank, sizes), Writers(rank, RANKS, agree))
        saving.begin(Snapshot(on_host))
        saving.wait()
        try:
            saving.check()
        except OSError as error:
            said[rank] = str(error)
        agree(None)

    with files_below(100_000):
        assert on_all_ranks(work) == [None] * RANKS
    assert "File too large" in said[0] and said[1:] == ["", ""]


def test_no_rank_gives_the_folder_its_name_before_all_have_written(tmp_path: Path) -> None:
    x = torch.randn(7, 4)
    path, held = tmp_path / "x", Held()

    def work(rank: int, agree: Agree) -> None:
        cut = rows_of_ranks(x)
        tensors = {"x": Sharded(x[cut[rank]].clone(), x.shape, cut)}
        saving = Saving(path, {}, tensors, Writers(rank, RANKS, agree))
        saving.begin(held if rank == 2 else Snapshot(on_host))
        time.sleep(0.2)
        assert not path.exists()
        agree(None)
        held.released.set()
        saving.wait()
        if rank == 0:  # which needs no other one to end
            assert checkpoint_index.verify(path) is None
        saving.end()

    assert on_all_ranks(work) == [None] * RANKS
    assert torch.equal(checkpoint_folder.read(path)["tensors"]["x"][:], x)


def test_one_that_is_given_up_leaves_nothing(tmp_path: Path) -> None:
    alone_of_two = Writers(0, 2)  # and the other one never writes
    saving = Saving(tmp_path / "x", {}, shares(0, [3, 3]), alone_of_two)
    saving.begin(Snapshot(on_host))
    time.sleep(0.1)
    assert not saving.is_done
    saving.cancel()
    assert saving.is_done and not list(tmp_path.iterdir())


def test_one_that_is_given_up_at_its_end_is_whole_or_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A signal ends a thread's join at once, and later ones; what is completed goes on."""
    is_whole, may_go_on, to_disk = threading.Event(), threading.Event(), files.to_disk

    def slow(path: Path) -> None:
        if path.suffix == ".partial":
            is_whole.set()
            assert may_go_on.wait(20)
        to_disk(path)

    def interrupt() -> None:
        assert is_whole.wait(20) and waits.wait(20)
        os.kill(os.getpid(), signal.SIGUSR1)

    monkeypatch.setattr(files, "to_disk", slow)
    saving = Saving(tmp_path / "x", {}, whole(odd()))
    waits, wait = threading.Event(), saving._has_ended.wait
    monkeypatch.setattr(saving._has_ended, "wait", lambda: waits.set() or wait())
    before = signal.signal(signal.SIGUSR1, signal.default_int_handler)
    try:
        saving.begin()
        threading.Thread(target=interrupt).start()
        with pytest.raises(KeyboardInterrupt):
            saving.end()
    finally:
        signal.signal(signal.SIGUSR1, before)
    threading.Timer(0.3, may_go_on.set).start()
    saving.cancel()
    assert may_go_on.is_set() and saving.is_done
    assert checkpoint_index.verify(tmp_path / "x") is None
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


def test_a_number_that_json_has_not_is_told_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="could not be written"):
        write(Saving(tmp_path / "x", {"lr": float("nan")}, whole(odd())))
    assert not list(tmp_path.iterdir())


KILLED = """
import sys
from pathlib import Path
from tests.runs.test_checkpoint_write import Held, odd, whole
from longctx.runs.checkpoint_write import Saving
from tests.written import write
folder = Path(sys.argv[1])
write(Saving(folder / "step-00000001.ckpt", {}, whole(odd())))
Saving(folder / "step-00000002.ckpt", {}, whole(odd())).begin(Held())
print("begun", flush=True)
"""


def test_a_kill_in_the_write_leaves_the_checkpoint_before_it(tmp_path: Path) -> None:
    killed_at("begun", KILLED, tmp_path)
    partial = tmp_path / ".step-00000002.ckpt.partial"
    assert {path.name for path in tmp_path.iterdir()} == {"step-00000001.ckpt", partial.name}
    assert checkpoint_index.verify(tmp_path / "step-00000001.ckpt") is None
    (partial / "shard-00000-000.safetensors").touch()  # had it come so far
    write(Saving(tmp_path / "step-00000002.ckpt", {}, whole(odd())))
    assert checkpoint_index.verify(tmp_path / "step-00000002.ckpt") is None
    assert not partial.exists()


def test_one_that_was_there_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "step-00000001.ckpt"
    for value in (1.0, 2.0):
        write(Saving(path, {}, {"x": Sharded.whole(torch.full((2,), value))}))
    assert torch.equal(checkpoint_folder.read(path)["tensors"]["x"][:], torch.full((2,), 2.0))
    assert list(tmp_path.iterdir()) == [path]


def test_parts_are_as_large_as_what_they_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_write, "PART", 64)
    tensors = odd()
    parts = parts_of("shard", tensors)
    assert sorted(name for part in parts for name in part.tensors) == sorted(tensors)
    assert sum(part.size for part in parts) == sum(x.nbytes for x in tensors.values())
    assert len({part.file for part in parts}) == len(parts) > 1
