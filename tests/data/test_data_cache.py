"""The cache never shows a half-built folder: two builders, a killed one, a full disk, a damaged
file.
"""

from __future__ import annotations

import errno
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from longctx.config.data_config import DataConfig
from longctx.data.cache import cached
from longctx.data.dataset import Data

BUILD = """
import pathlib, sys, time
from longctx.config.data_config import DataConfig
from longctx.data.dataset import Data
corpus, cache, go = sys.argv[1:]
while go and not pathlib.Path(go).exists():
    time.sleep(0.005)
config = DataConfig(source="text", path=corpus, vocab_size=400, val_fraction=0.2, cache=cache)
print(Data(config, 32).fingerprint)
"""


def start(script: str, corpus: Path, cache: Path, go: Path | str = "") -> subprocess.Popen[str]:
    command = [sys.executable, "-c", script, str(corpus), str(cache), str(go)]
    root = Path(__file__).parents[2]
    return subprocess.Popen(
        command, cwd=root, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def test_two_processes_build_once_and_agree(corpus, tmp_path) -> None:
    go = tmp_path / "go"
    processes = [start(BUILD, corpus, tmp_path / "cache", go) for _ in range(3)]
    go.touch()
    outputs = [process.communicate() for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0], outputs
    assert len({out for out, _ in outputs}) == 1
    assert sum(err.count("tokenizing") for _, err in outputs) == 1
    assert not list((tmp_path / "cache").rglob("*.partial"))


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="this system has no SIGKILL")
@pytest.mark.parametrize("moment", ["longctx.data.store.near_duplicates", "os.replace"])
def test_a_killed_build_leaves_nothing_that_counts(corpus, text_config, tmp_path, moment) -> None:
    module, name = moment.rsplit(".", 1)
    dying = (
        f"import os, signal, {module} as m\n"
        f"m.{name} = lambda *_: os.kill(os.getpid(), signal.SIGKILL)\n" + BUILD
    )
    process = start(dying, corpus, tmp_path / "cache")
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    assert list((tmp_path / "cache").rglob("*.partial"))
    after = Data(text_config(), 32)
    clean = Data(text_config(cache=str(tmp_path / "clean")), 32)
    assert after.fingerprint == clean.fingerprint
    assert after.summary() == clean.summary()
    assert not list((tmp_path / "cache").rglob("*.partial"))


def test_a_failed_build_leaves_nothing(text_config, corpus, tmp_path) -> None:
    (corpus / "bad.jsonl").write_text("{")
    with pytest.raises(ValueError, match=r"bad\.jsonl:1"):
        Data(text_config(), 32)
    assert not [
        path
        for path in (tmp_path / "cache").rglob("*")
        if path.is_file() and path.suffix != ".lock"
    ]


def files_of(folder: Path) -> list[Path]:
    """Every file of the cache but its locks."""
    return sorted(file for file in folder.rglob("*") if file.is_file() and file.suffix != ".lock")


def content_of(data: Data) -> list[list[int]]:
    """Every row that is trained on and every document, as numbers."""
    rows = [data.train[n]["tokens"].tolist() for n in range(len(data.train))]
    return rows + [ids.tolist() for _, ids, *_ in data.documents("val")]


@pytest.mark.parametrize("seed", range(2))
def test_a_byte_changed_at_the_same_size_is_found_and_built_again(
    text_config, tmp_path, capsys, seed
) -> None:
    before = content_of(Data(text_config(), 32))
    rng = random.Random(seed)
    for file in files_of(tmp_path / "cache"):
        changed = bytearray(file.read_bytes())
        changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
        file.write_bytes(changed)
        capsys.readouterr()
        assert content_of(Data(text_config(), 32)) == before, file
        warnings = [line for line in capsys.readouterr().err.splitlines() if "built again" in line]
        assert len(warnings) == 1, file
        assert str(file.parent) in warnings[0]


@pytest.mark.parametrize(
    "content",
    [
        *("", "{}", "[]", "7", "[" * 10**5, '{"documents.arrow": 5}', '{"../..": {}}'),
    ],
)
def test_an_odd_list_of_files_is_built_again(text_config, capsys, content) -> None:
    before = content_of(data := Data(text_config(), 32))
    (data.store.folder / "complete.json").write_text(content)
    assert content_of(Data(text_config(), 32)) == before
    assert capsys.readouterr().err.count("built again") == 1


@pytest.mark.parametrize("kind", ["missing", "fifo", "zero", "loop"])
@pytest.mark.parametrize("name", ["complete.json", "documents.arrow", "documents.npz"])
def test_what_is_no_file_of_the_cache_is_built_again(text_config, name, kind) -> None:
    before = content_of(data := Data(text_config(), 32))
    file = data.store.folder / name
    file.unlink()
    if kind == "fifo":
        os.mkfifo(file)
    elif kind != "missing":
        file.symlink_to({"zero": "/dev/zero", "loop": file.name}[kind])
    assert content_of(Data(text_config(), 32)) == before
    assert file.is_file()
    assert not file.is_symlink()


def test_a_second_load_builds_nothing(text_config, monkeypatch) -> None:
    before = Data(text_config(), 32)

    def never(*_):
        raise AssertionError("built again")

    monkeypatch.setattr("longctx.data.cache._build", never)
    after = Data(text_config(), 32)
    assert after.fingerprint == before.fingerprint
    assert len(after.packings["train"].length) == len(before.packings["train"].length)


def test_other_choices_have_other_places(text_config, corpus) -> None:
    one = Data(text_config(), 32)
    for other in (text_config(vocab_size=300), text_config(documents=9)):
        data = Data(other, 32)
        assert data.fingerprint != one.fingerprint
        name, ids, *_ = next(iter(data.documents("train")))
        assert data.tokenizer.decode(ids[:-1]) == (corpus / name).read_text(encoding="utf-8")
    assert Data(text_config(), 31).packings["train"].rows != 0


def test_a_cache_that_cannot_be_written_is_named(text_config, tmp_path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(OSError, match=r"data\.cache: .*file/cache.*data\.cache=FOLDER"):
        Data(text_config(cache=str(tmp_path / "file" / "cache")), 32)


def test_a_full_disk_is_named_and_leaves_nothing(text_config, tmp_path, monkeypatch) -> None:
    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(np, "savez", full)
    with pytest.raises(OSError, match=r"data\.cache: .*documents.*No space left on device"):
        Data(text_config(), 32)
    assert not list((tmp_path / "cache").rglob("*.partial"))


def test_an_interrupted_build_cleans_up(tmp_path) -> None:
    def build(folder: Path) -> None:
        (folder / "half").write_text("x")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cached(tmp_path / "thing", build)
    assert [file.name for file in tmp_path.iterdir() if file.is_dir()] == []


def test_the_arrow_file_opens_in_datasets(text_config) -> None:
    datasets = pytest.importorskip("datasets", reason="datasets is not installed")
    data = Data(text_config(), 32)
    theirs = datasets.Dataset.from_file(str(data.store.folder / "documents.arrow"))
    assert theirs.column_names == ["name", "input_ids", "n_bytes"]
    for document in (0, 5, len(data.store) - 1):
        assert theirs[document]["input_ids"] == data.store.tokens(document).tolist()
        assert theirs[document]["name"] == data.store.name(document)


def test_the_cache_lies_where_the_environment_says(monkeypatch, tmp_path) -> None:
    monkeypatch.delenv("LONGCTX_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert DataConfig().cache_folder() == tmp_path / "xdg" / "longctx"
    monkeypatch.setenv("LONGCTX_CACHE", str(tmp_path / "own"))
    assert DataConfig().cache_folder() == tmp_path / "own"
    assert DataConfig(cache="~/here").cache_folder() == Path.home() / "here"
