"""Disks that are full or cannot be written, and what killed runs left on them."""

import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

import train
from longctx.files import FULL_DISK
from longctx.runs import metrics_file, run_folder
from tests.training.sample_run import Overrides, steps


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of its own, of 1.5 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1536k", "none", str(folder)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounts a small disk and fills it; mounting one takes root on Linux")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def remount(disk: Path, options: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{options}", str(disk)], check=True)


def hidden(folder: Path) -> list[Path]:
    return [path for path in folder.rglob(".*")]


def test_a_full_disk_costs_no_checkpoint(
    overrides: Overrides, disk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changes = {"max_steps": 30, "checkpoint_every": 1, "keep_checkpoints": 99}
    assert train.main(overrides(name="r", runs=disk, **changes)) == FULL_DISK
    (line,) = [x for x in capsys.readouterr().err.splitlines() if x.startswith("error: ")]
    assert str(disk) in line
    paths = run_folder.checkpoints(disk / "r")
    assert paths and not hidden(disk)
    remount(disk, "size=100m")
    assert train.main([f"resume={disk / 'r'}", f"max_steps={len(paths) + 2}"]) == 0
    assert [row["step"] for row in steps(disk / "r")] == list(range(1, len(paths) + 3))


def test_a_read_only_folder_is_found_before_step_1(
    overrides: Overrides, disk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train.main(overrides(name="r", runs=disk, max_steps=2)) == 0
    remount(disk, "ro")
    capsys.readouterr()
    assert train.main([f"resume={disk / 'r'}", "max_steps=3"]) == 2
    printed = capsys.readouterr()
    (line,) = printed.err.splitlines()
    assert re.match(rf"error: {disk / 'r'}.*: no file can be made there: Read-only", line)
    assert "step 3/3" not in printed.out


def test_read_only_checkpoints_are_found_before_step_1(
    overrides: Overrides, disk: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "runs" / "r"
    assert train.main(overrides(name="r", max_steps=2)) == 0
    (folder / "checkpoints").rename(tmp_path / "elsewhere")
    shutil.copytree(tmp_path / "elsewhere", disk / "checkpoints", symlinks=True)
    (folder / "checkpoints").symlink_to(disk / "checkpoints")
    remount(disk, "ro")
    rows = metrics_file.read(folder)
    capsys.readouterr()
    assert train.main([f"resume={folder}", "max_steps=3"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"{folder / 'checkpoints'}: no file can be made there" in line
    assert metrics_file.read(folder) == rows


def test_what_a_killed_run_left_goes_at_the_next_start(
    overrides: Overrides, tmp_path: Path
) -> None:
    folder = tmp_path / "runs" / "r"
    assert train.main(overrides(name="r", max_steps=2)) == 0
    for name in (".config.77.yaml", ".metrics.77.jsonl", "checkpoints/.step-00000003.77.ckpt"):
        (folder / name).touch()
    (folder / "checkpoints" / ".step-00000003.ckpt.partial").mkdir()
    assert train.main([f"resume={folder}", "max_steps=3"]) == 0
    assert not hidden(folder)


@pytest.mark.parametrize("content", ["", "# nothing\n", "{}\n", "null\n", "---\n"])
def test_an_empty_configuration_is_refused(
    content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "r"
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "checkpoints" / "step-00000001.ckpt").touch()
    (folder / "config.yaml").write_text(content)
    assert train.main([f"resume={folder}", "max_steps=3"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "config.yaml" in line and str(folder) in line
