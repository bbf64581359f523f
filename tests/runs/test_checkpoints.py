"""A checkpoint that is damaged, cut short or not ours is refused with one clear line."""

import resource
from pathlib import Path

import pytest
import torch

from longctx.evaluation.subject import load_model
from longctx.runs import checkpoints
from longctx.runs.checkpoint_folder import Sharded
from longctx.runs.checkpoints import opened, verify
from tests.written import write


def flip(path: Path, place: int) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


def test_a_flipped_bit_in_a_tensor_is_refused_and_an_older_checkpoint_named(tmp_path: Path) -> None:
    older, newer = tmp_path / "step-00000001.ckpt", tmp_path / "step-00000002.ckpt"
    for path in (older, newer):
        torch.save({"x": torch.arange(10_000)}, path)
        verify(path)
    (tmp_path / "last.ckpt").symlink_to(newer.name)
    flip(newer, newer.stat().st_size // 2)
    assert not torch.load(newer)["x"].equal(torch.arange(10_000)), "torch reads it as it is"
    for path in (newer, tmp_path / "last.ckpt"):
        with pytest.raises(
            ValueError,
            match=rf"^{path}: damaged.*/data/0.*{older}",
        ):
            verify(path)
    flip(older, older.stat().st_size // 2)
    with pytest.raises(ValueError, match=r"step-00000001\.ckpt: damaged.*no older one"):
        verify(older)


@pytest.mark.parametrize("left", [0, 1, 700, 20_000])
def test_a_checkpoint_cut_short_is_refused_and_an_older_one_named(
    left: int, tmp_path: Path
) -> None:
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    older, newer = folder / "step-00000001.ckpt", folder / "step-00000002.ckpt"
    for path in (older, newer):
        torch.save({"x": torch.arange(10_000), "longctx": {}}, path)
    newer.write_bytes(newer.read_bytes()[:left])
    (folder / "last.ckpt").symlink_to(newer.name)
    for path in (newer, folder / "last.ckpt"):
        verify(path)  # says nothing of what is no zip file
        with pytest.raises(ValueError, match=rf"^{path}: not a checkpoint.*{older}"):
            opened(path)
    other = tmp_path / "notes.ckpt"
    other.write_text("none")
    with pytest.raises(ValueError, match=rf"^{other}: not a checkpoint"):
        opened(other)


def test_a_flipped_bit_anywhere_is_refused_or_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "x.ckpt"
    torch.save({"x": torch.arange(30), "config": {"a": [1, "b"]}}, path)
    intact = path.read_bytes()
    for place in range(0, len(intact), 5):
        path.write_bytes(intact)
        flip(path, place)
        try:
            verify(path)
            content = torch.load(path, mmap=True)
        except (ValueError, RuntimeError):  # the second is torch's, for no zip file at all
            continue
        assert content["x"].equal(torch.arange(30)) and content["config"] == {"a": [1, "b"]}, place


@pytest.mark.parametrize("content", [b"", b"not a checkpoint", b"PK\x03\x04 torn"])
def test_a_foreign_checkpoint_is_one_clear_line(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x.ckpt").write_bytes(content)
    with pytest.raises(ValueError, match=r"x\.ckpt"):
        load_model(tmp_path / "x.ckpt")


def test_a_torn_checkpoint_is_named(tmp_path: Path) -> None:
    torch.save({"x": torch.zeros(10_000)}, tmp_path / "x.ckpt")
    (tmp_path / "x.ckpt").write_bytes((tmp_path / "x.ckpt").read_bytes()[:20_000])
    with pytest.raises(ValueError, match=r"x\.ckpt: not a checkpoint, or not a whole one"):
        load_model(tmp_path / "x.ckpt")


def test_a_checkpoint_of_another_program_or_with_code_in_it(tmp_path: Path) -> None:
    torch.save({"state_dict": {}}, tmp_path / "x.ckpt")
    with pytest.raises(ValueError, match="another program"):
        load_model(tmp_path / "x.ckpt")
    torch.save({"longctx": {"format": 1}, "call": print}, tmp_path / "x.ckpt")
    with pytest.raises(ValueError, match="cannot be read safely, it holds more than tensors"):
        load_model(tmp_path / "x.ckpt")
    torch.save({"longctx": {"format": 1}}, tmp_path / "x.ckpt")
    with pytest.raises(ValueError, match="written in format 1"):
        load_model(tmp_path / "x.ckpt")
    with pytest.raises(ValueError, match="no such file"):
        load_model(tmp_path / "nothing")
    with pytest.raises(ValueError, match="not the folder of a run"):
        load_model(tmp_path)


def test_a_checkpoint_that_cannot_be_finished_leaves_the_last_one(tmp_path: Path) -> None:
    last, next_one = tmp_path / "step-00000001.ckpt", tmp_path / "step-00000002.ckpt"

    def save(path: Path, size: int) -> None:
        weights = {"x": Sharded.whole(torch.zeros(size))}
        write(checkpoints.saving(path, {}, {"random": checkpoints.random_state()}, weights))

    save(last, 10)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        with pytest.raises(OSError, match="step-00000002"):
            save(next_one, 1_000_000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    checkpoints.verify(last)
    assert [path.name for path in tmp_path.iterdir()] == [last.name]
