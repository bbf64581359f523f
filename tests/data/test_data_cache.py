"""The cache shows no half-built folder: several builders, a killed one, a full disk, damage."""

import errno
import os
import random
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest

from longctx.config.data_config import DataConfig
from longctx.data.cache import cache_folder
from longctx.data.dataset import Data
from tests.data.conftest import check_refused
from tests.processes import ROOT, finished

BUILD = """
import sys
from longctx.config.data_config import DataConfig
from longctx.data.dataset import Data
corpus, cache = sys.argv[1:]
config = DataConfig(source="text", path=corpus, vocab_size=400, val_fraction=0.2, cache=cache)
print(Data(config, 32).fingerprint)
"""


def files_of(folder: Path) -> list[Path]:
    """Return every file of the cache but its locks."""
    return sorted(file for file in folder.rglob("*") if file.is_file() and file.suffix != ".lock")


def content_of(data: Data) -> list[list[int]]:
    """Return every training sequence and every validation document."""
    rows = [row["tokens"].tolist() for row in data.train]
    return rows + [ids.tolist() for _, ids, *_ in data.documents("val")]


def test_processes_build_once_and_agree(corpus, tmp_path):
    words = [BUILD, str(corpus), str(tmp_path / "cache")]
    with ThreadPoolExecutor() as threads:
        processes = list(threads.map(lambda _: finished("-c", words, ROOT), range(3)))
    assert [process.returncode for process in processes] == [0, 0, 0], processes
    assert len({process.stdout for process in processes}) == 1
    assert sum(process.stderr.count("tokenizing") for process in processes) == 1
    assert not list((tmp_path / "cache").rglob("*.partial"))


@pytest.mark.parametrize("moment", ["longctx.data.store._encoded", "os.replace"])
def test_a_killed_build_leaves_nothing_that_counts(corpus, text_config, tmp_path, moment):
    module, name = moment.rsplit(".", 1)
    dying = (
        f"import os, signal, {module} as m\n"
        f"m.{name} = lambda *_: os.kill(os.getpid(), signal.SIGKILL)\n" + BUILD
    )
    process = finished("-c", [dying, str(corpus), str(tmp_path / "cache")], ROOT)
    assert process.returncode == -signal.SIGKILL
    assert list((tmp_path / "cache").rglob("*.partial"))
    after = Data(text_config(), 32)
    clean = Data(text_config(cache=str(tmp_path / "clean")), 32)
    assert (after.fingerprint, after.summary()) == (clean.fingerprint, clean.summary())
    assert not list((tmp_path / "cache").rglob("*.partial"))


def test_a_failed_build_leaves_nothing(text_config, corpus, tmp_path, monkeypatch):
    (corpus / "bad.jsonl").write_text("{")
    check_refused(text_config(), r"bad\.jsonl:1")
    assert not files_of(tmp_path / "cache")
    (corpus / "bad.jsonl").unlink()
    full_disk = Mock(side_effect=OSError(errno.ENOSPC, "No space left on device"))
    monkeypatch.setattr(np, "savez", full_disk)
    check_refused(text_config(), r"No space left on device: .*documents")
    assert not list((tmp_path / "cache").rglob("*.partial"))
    (tmp_path / "file").write_text("in the way")
    check_refused(text_config(cache=str(tmp_path / "file" / "cache")), "file/cache")


def test_a_changed_byte_is_built_again(text_config, tmp_path, capsys):
    before = content_of(Data(text_config(), 32))
    rng = random.Random(0)
    for file in files_of(tmp_path / "cache"):
        changed = bytearray(file.read_bytes())
        changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
        file.write_bytes(changed)
        capsys.readouterr()
        assert content_of(Data(text_config(), 32)) == before, file
        (warning,) = [x for x in capsys.readouterr().err.splitlines() if "built again" in x]
        assert str(file.parent) in warning


@pytest.mark.parametrize("fault", ["missing", "fifo", "zero", "loop", "[]", "[" * 10**5])
@pytest.mark.parametrize("name", ["complete.json", "documents.arrow"])
def test_an_odd_file_is_built_again(text_config, capsys, name, fault):
    before = content_of(data := Data(text_config(), 32))
    file = data.parts[""].store.folder / name
    file.unlink()
    if fault == "fifo":
        os.mkfifo(file)
    elif fault in ("zero", "loop"):
        file.symlink_to({"zero": "/dev/zero", "loop": file.name}[fault])
    elif fault != "missing":
        file.write_text(fault)
    assert content_of(Data(text_config(), 32)) == before
    assert file.is_file() and not file.is_symlink()
    assert capsys.readouterr().err.count("built again") == 1


def test_other_choices_have_other_folders(text_config, corpus):
    first = Data(text_config(), 32)
    for choice in ({"vocab_size": 300}, {"documents": 9}, {"val_fraction": 0.5}):
        data = Data(text_config(**choice), 32)
        assert data.fingerprint != first.fingerprint
        name, ids, *_ = next(iter(data.documents("train")))
        assert data.tokenizer.decode(ids[:-1]) == (corpus / name).read_text(encoding="utf-8")


def test_the_environment_names_the_cache(monkeypatch, tmp_path):
    monkeypatch.delenv("LONGCTX_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder(DataConfig()) == tmp_path / "xdg" / "longctx"
    monkeypatch.setenv("LONGCTX_CACHE", str(tmp_path / "own"))
    assert cache_folder(DataConfig()) == tmp_path / "own"
