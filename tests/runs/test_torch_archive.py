"""Files of torch that claim what they do not hold are told before torch opens them."""

from __future__ import annotations

import pickle
import re
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from longctx.runs import torch_archive

FIXTURES = Path(__file__).resolve().parents[1] / "fixtures"


class Zeros:
    """Is pickled as a call that makes gigabytes of a few bytes."""

    def __reduce__(self) -> Any:
        return bytearray, (3 << 30,)


def rewritten(file: Path, how: str) -> None:
    """Write the archive at `file` anew, with one thing that no run writes."""
    with zipfile.ZipFile(file) as archive:
        parts = {part.filename: archive.read(part) for part in archive.infolist()}
    name = next(name for name in parts if name.endswith("data.pkl"))
    if how == "call":
        parts[name] = pickle.dumps({"longctx": {}, "x": Zeros()}, protocol=2)
    if how == "protocol 4":
        parts[name] = pickle.dumps({"longctx": {}, "x": Zeros()}, protocol=4)
    if how == "large pickle":
        parts[name] = pickle.dumps("x" * (torch_archive.PICKLE + 1), protocol=2)
    method = zipfile.ZIP_DEFLATED if how == "compressed" else zipfile.ZIP_STORED
    with zipfile.ZipFile(file, "w", method) as archive:
        for part, content in parts.items():
            archive.writestr(part, bytes(64 << 20) if how == "compressed" else content)
    if how == "sizes":  # each part is read from the same bytes
        content = bytearray(file.read_bytes())
        at = -1
        while (at := content.find(b"PK\x01\x02", at + 1)) >= 0:
            content[at + 24 : at + 28] = len(content).to_bytes(4, "little")
        file.write_bytes(bytes(content))


@pytest.mark.parametrize(
    ("how", "what"),
    [
        ("call", "more than tensors and plain values .*bytearray"),
        ("protocol 4", "more than tensors and plain values"),
        ("large pickle", "bytes of plain values"),
        ("compressed", "compressed"),
        ("sizes", "parts of more bytes than"),
    ],
)
def test_a_checkpoint_that_claims_too_much_is_told(tmp_path: Path, how: str, what: str) -> None:
    file = tmp_path / "step-00000001.ckpt"
    torch.save({"longctx": {"config": {}}, "state_dict": {"w": torch.ones(3)}}, file)
    assert torch_archive.flaw(file) is None
    rewritten(file, how)
    flaw = torch_archive.flaw(file)
    assert flaw is not None and re.search(what, flaw) and "\n" not in flaw


def test_checkpoints_of_runs_and_what_is_no_archive_pass(tmp_path: Path) -> None:
    (old,) = FIXTURES.glob("old_run/checkpoints/step-*.ckpt")
    assert torch_archive.flaw(old) is None
    for content in (b"", b"no archive", old.read_bytes()[:5000]):
        (tmp_path / "a.ckpt").write_bytes(content)
        assert torch_archive.flaw(tmp_path / "a.ckpt") is None


def test_a_device_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.ckpt").symlink_to("/dev/zero")
    with pytest.raises(ValueError, match=r"a\.ckpt: a device"):
        torch_archive.flaw(tmp_path / "a.ckpt")
