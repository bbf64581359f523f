"""A checkpoint that is damaged, cut short or not ours is refused with one clear line."""

import resource
from pathlib import Path

import pytest
import torch

from longctx.evaluation.subject import load_model
from longctx.runs import checkpoints
from longctx.runs.checkpoint_folder import Sharded
from tests.written import write


@pytest.mark.parametrize("content", [b"", b"not a checkpoint", b"PK\x03\x04 torn"])
def test_a_foreign_checkpoint_is_one_clear_line(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x.ckpt").write_bytes(content)
    with pytest.raises(ValueError, match=r"x\.ckpt"):
        load_model(tmp_path / "x.ckpt")


def test_a_checkpoint_of_another_program_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.ckpt"
    state = {"random": checkpoints.random_state()}
    for about, message in (({}, "written in format None"), ({"format": 1}, "written in format 1")):
        write(checkpoints.saving(path, about, state, {"x": Sharded.whole(torch.zeros(3))}))
        with pytest.raises(ValueError, match=message):
            load_model(path)
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
