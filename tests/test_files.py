"""Files are replaced whole, and a failure leaves what was there and nothing else."""

import errno
import os
from pathlib import Path

import pytest

from longctx import files


def test_a_file_is_replaced_whole_with_the_permissions_of_any_new_file(tmp_path: Path) -> None:
    path, usual = tmp_path / "a.json", tmp_path / "usual"
    usual.write_text("")
    path.write_text("old")
    with files.atomic(path) as partial:
        partial.write_text("new")
        assert (
            partial.parent == tmp_path and partial.suffix == ".json" and path.read_text() == "old"
        )
    files.write_text(tmp_path / "ü", "→")
    assert path.read_text() == "new" and (tmp_path / "ü").read_bytes() == "→".encode()
    assert path.stat().st_mode == usual.stat().st_mode
    assert {p.name for p in tmp_path.iterdir()} == {"a.json", "usual", "ü"}


def fail(path: Path, failure: BaseException) -> None:
    with files.atomic(path) as partial:
        partial.write_text("ne")
        raise failure


def test_a_failure_leaves_the_old_file_and_no_part(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text("old")
    for failure in (OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()):
        with pytest.raises(type(failure)):
            fail(path, failure)
    with pytest.raises(OSError, match=r"No space left on device: '.*a\.json'"):
        fail(path, OSError(errno.ENOSPC, "No space left on device"))
    with pytest.raises(OSError, match=r"^said already$"):
        fail(path, OSError("said already"))
    with pytest.raises(FileNotFoundError):
        files.write_text(tmp_path / "nowhere" / "a.json", "x")
    assert path.read_text() == "old" and [p.name for p in tmp_path.iterdir()] == ["a.json"]


def test_folders_and_links_too_and_what_a_killed_process_left_is_no_obstacle(
    tmp_path: Path,
) -> None:
    left = tmp_path / f".out.{os.getpid()}"
    left.mkdir()
    (left / "part").write_text("")
    with files.atomic(tmp_path / "out") as partial:
        partial.mkdir()
        (partial / "x").write_text("whole")
    for name in ("one", "two"):
        with files.atomic(tmp_path / "last") as partial:
            partial.symlink_to(name)
    assert (tmp_path / "out" / "x").read_text() == "whole" and os.readlink(
        tmp_path / "last"
    ) == "two"
    assert {p.name for p in tmp_path.iterdir()} == {"out", "last"}
