"""A run inside containers and on clusters: little shared memory, long paths, users without a home.

`unshare` gives a process a small /dev/shm, or a user whom the machine does not know.
"""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.processes import PYTHONPATH, ROOT

STRANGER = ["unshare", "--map-user=54321", "--map-group=54321"]
RUN = ["model=tiny", "seq_len=128", "max_steps=2", "batch_size=1", "accumulate=8", "device=cpu"]


def with_shared_memory(options: str) -> list[str]:
    """A command that runs the rest of its line with another /dev/shm."""
    mount = f'mount -t tmpfs -o {options} tmpfs /dev/shm && exec "$@"'
    return ["unshare", "--map-root-user", "--mount", "sh", "-c", mount, "sh"]


def train_in(
    surroundings: Sequence[str], folder: Path, *words: str, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Train two steps inside `surroundings`; skip the test if the kernel does not allow them."""
    if surroundings and subprocess.run([*surroundings, "true"], capture_output=True).returncode:
        pytest.skip("this kernel gives no namespaces to this user")
    text = folder / "text.txt"
    text.write_text("".join(f"Line {n} of a document.\n" for n in range(2000)))
    data = ["data=text", f"data.path={text}", "data.vocab_size=300", "data.val_fraction=0"]
    own = ["wandb.mode=disabled", f"runs={folder / 'runs'}", "name=r", *words]
    return subprocess.run(
        [*surroundings, sys.executable, str(ROOT / "train.py"), *RUN, *data, *own],
        env=os.environ | {"PYTHONPATH": PYTHONPATH, "LONGCTX_CACHE": str(folder)} | environment,
        capture_output=True,
        text=True,
    )


def test_workers_need_no_shared_memory(tmp_path: Path) -> None:
    """A step's batch is larger than the 64 KB."""
    done = train_in(with_shared_memory("size=64k"), tmp_path, "workers=2")
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr


def test_read_only_shared_memory_is_one_line(tmp_path: Path) -> None:
    done = train_in(with_shared_memory("ro,size=64k"), tmp_path, "workers=2")
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith("error: workers=2: /dev/shm")
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "runs").exists()


def test_read_only_shared_memory_without_workers(tmp_path: Path) -> None:
    done = train_in(with_shared_memory("ro,size=64k"), tmp_path, "workers=0")
    assert done.returncode == 0, done.stderr


def test_workers_take_a_long_path_of_temporary_files(tmp_path: Path) -> None:
    """The path of a socket has at most 108 letters."""
    folder = tmp_path / ("t" * 100)
    folder.mkdir()
    done = train_in([], tmp_path, "workers=2", TMPDIR=str(folder))
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr


def test_user_without_a_home_is_told_to_set_it(tmp_path: Path) -> None:
    done = train_in([*STRANGER, "env", "--unset=HOME"], tmp_path, LONGCTX_CACHE="")
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith("error: HOME: ")
    assert done.stderr.count("\n") == 1


def test_unknown_user_with_a_home_trains(tmp_path: Path) -> None:
    done = train_in(STRANGER, tmp_path, HOME=str(tmp_path))
    assert done.returncode == 0, done.stderr
