"""A run in containers and on clusters, by `unshare`: little /dev/shm, no home."""

import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.processes import ROOT, finished

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
    variables = {"LONGCTX_CACHE": folder} | environment
    return finished(ROOT / "train.py", [*RUN, *data, *own], Path.cwd(), surroundings, **variables)


LONG = "t" * 100  # the path of a socket has at most 108 letters


@pytest.mark.parametrize(
    ("surroundings", "workers", "variables", "message"),
    [
        # less than a step's batch
        (with_shared_memory("size=64k"), 2, {"TMPDIR": LONG}, None),
        ([*with_shared_memory("ro,size=64k"), *STRANGER], 0, {"HOME": "."}, None),
        ([*STRANGER, "env", "--unset=HOME"], 2, {"LONGCTX_CACHE": ""}, "HOME: "),
    ],
)
def test_a_run_in_its_surroundings(surroundings, workers, variables, message, tmp_path):
    """It trains, or says in one line what is missing."""
    (tmp_path / LONG).mkdir()
    paths = {name: str(tmp_path / path) if path else "" for name, path in variables.items()}
    done = train_in(surroundings, tmp_path, f"workers={workers}", **paths)
    assert done.returncode == (2 if message else 0), done.stderr
    assert (tmp_path / "runs").exists() == (message is None)
    if message:
        assert done.stderr.startswith(f"error: {message}") and done.stderr.count("\n") == 1
    assert "Traceback" not in done.stderr
