"""Checkpoints are deleted in the background, and none is ever seen half-deleted."""

import errno
import os
import threading
from pathlib import Path

import pytest

from longctx import files
from longctx.runs import removal, run_folder
from longctx.runs.removal import Removal
from tests.processes import killed_at


def checkpoint(run: Path, step: int) -> Path:
    """A folder with files of 100 bytes under the name of a checkpoint."""
    path = run / "checkpoints" / f"step-{step:08d}.ckpt"
    path.mkdir(parents=True)
    for name in ("checkpoint.json", *(f"shard-00000-{n:03d}.safetensors" for n in range(5))):
        (path / name).write_bytes(bytes(100))
    return path


def names(run: Path) -> set[str]:
    return {path.name for path in (run / "checkpoints").iterdir()}


def test_what_is_replaced_goes_with_leftovers_and_nothing_else(tmp_path: Path) -> None:
    first, second, third = (checkpoint(tmp_path, step) for step in (1, 2, 3))
    partial = checkpoint(tmp_path, 4).rename(third.with_name(".step-00000004.ckpt.partial"))
    old_file = third.with_name("step-00000000.ckpt")
    old_file.write_bytes(bytes(50))
    link = third.with_name(".last.77.ckpt")
    link.symlink_to(third.name)
    done = Removal([old_file, first, second], [partial, link])
    assert done.wait() and done.problem is None
    assert done.bytes == 3 * 600 + 50 + len(third.name)
    assert names(tmp_path) == {third.name} and len(list(third.iterdir())) == 6


def test_readers_see_none_that_is_being_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_go_on = threading.Event()
    monkeypatch.setattr(os, "unlink", lambda path: may_go_on.wait(20) and os.remove(path))
    first, second = checkpoint(tmp_path, 1), checkpoint(tmp_path, 2)
    going = Removal([first])
    assert run_folder.checkpoints(tmp_path) == [second]
    assert not going.wait(0.05) and names(tmp_path) > {second.name}
    may_go_on.set()
    assert going.wait() and names(tmp_path) == {second.name}


def test_what_cannot_be_deleted_is_named_and_keeps_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unlink(path: str | Path, dir_fd: int | None = None) -> None:
        if str(path).endswith("002.safetensors"):
            raise OSError(errno.EPERM, os.strerror(errno.EPERM), str(path))
        os.remove(path, dir_fd=dir_fd)

    monkeypatch.setattr(os, "unlink", unlink)
    first, second = checkpoint(tmp_path, 1), checkpoint(tmp_path, 2)
    done = Removal([first])
    assert done.wait() and done.problem is not None
    assert "shard-00000-002.safetensors" in done.problem and "not permitted" in done.problem
    assert run_folder.checkpoints(tmp_path) == [second]
    (left,) = (path for path in second.parent.iterdir() if path != second)
    assert [path.name for path in left.iterdir()] == ["shard-00000-002.safetensors"]


def test_one_that_cannot_be_renamed_stays_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def rename(source: Path, target: Path) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(removal.os, "rename", rename)
    path = checkpoint(tmp_path, 1)
    done = Removal([path])
    assert done.wait() and done.problem is not None and "Read-only" in done.problem
    assert names(tmp_path) == {path.name} and len(list(path.iterdir())) == 6


def test_one_that_is_cancelled_leaves_what_the_next_start_removes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, may_go_on = threading.Event(), threading.Event()

    def unlink(path: Path) -> None:
        if path.parent.name.startswith("."):
            begun.set()
            may_go_on.wait(20)
        os.remove(path)

    monkeypatch.setattr(removal, "AT_ONCE", 1)
    monkeypatch.setattr(os, "unlink", unlink)
    going = Removal([checkpoint(tmp_path, 1)])
    assert begun.wait(20)
    threading.Timer(0.1, may_go_on.set).start()
    going.cancel()
    assert going.problem is None
    (left,) = (tmp_path / "checkpoints").iterdir()
    assert left.name.startswith(".") and len(list(left.iterdir())) == 5
    monkeypatch.undo()
    files.remove_partial(tmp_path / "checkpoints")
    assert not names(tmp_path)


def test_a_file_that_somebody_else_deletes_is_no_problem(tmp_path: Path) -> None:
    done = Removal([tmp_path / "step-00000001.ckpt"], [tmp_path / ".step-00000002.ckpt.removed"])
    assert done.wait() and done.problem is None


KILLED = """
import os, sys, time
from pathlib import Path
from longctx.runs import removal
def unlink(path, left=[2]):
    if not left[0]:
        print("half", flush=True)
        time.sleep(60)
    os.remove(path)
    left[0] -= 1
removal.AT_ONCE, os.unlink = 1, unlink
removal.Removal([Path(sys.argv[1])])
"""


def test_a_kill_leaves_no_half_checkpoint(tmp_path: Path) -> None:
    first, second = checkpoint(tmp_path, 1), checkpoint(tmp_path, 2)
    killed_at("half", KILLED, first)
    assert run_folder.checkpoints(tmp_path) == [second]
    (left,) = (tmp_path / "checkpoints").glob(".*")
    assert len(list(left.iterdir())) == 4
    files.remove_partial(tmp_path / "checkpoints")
    assert names(tmp_path) == {second.name}
