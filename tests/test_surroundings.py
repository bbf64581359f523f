"""A run in containers and on clusters, by `unshare`: little /dev/shm, no home; the image."""

import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.processes import ROOT, finished

STRANGER = ["unshare", "--map-user=54321", "--map-group=54321"]
RUN = ["model=tiny", "seq_len=128", "max_steps=2", "batch_size=1", "accumulate=8", "device=cpu"]
RUN += ["data=text", "data.vocab_size=300", "data.val_fraction=0", "wandb.mode=disabled", "name=r"]


def with_shared_memory(options: str) -> list[str]:
    """A command that runs the rest of its line with another /dev/shm."""
    mount = f'mount -t tmpfs -o {options} tmpfs /dev/shm && exec "$@"'
    return ["unshare", "--map-root-user", "--mount", "sh", "-c", mount, "sh"]


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
    if subprocess.run([*surroundings, "true"], capture_output=True).returncode:
        pytest.skip("this kernel gives no namespaces to this user")
    (tmp_path / LONG).mkdir()
    text = tmp_path / "text.txt"
    text.write_text("".join(f"Line {n} of a document.\n" for n in range(2000)))
    words = [f"data.path={text}", f"runs={tmp_path / 'runs'}", f"workers={workers}"]
    paths = {name: str(tmp_path / path) if path else "" for name, path in variables.items()}
    variables = {"LONGCTX_CACHE": tmp_path} | paths
    done = finished(ROOT / "train.py", [*RUN, *words], Path.cwd(), surroundings, **variables)
    assert done.returncode == (2 if message else 0), done.stderr
    assert (tmp_path / "runs").exists() == (message is None)
    if message:
        assert done.stderr.startswith(f"error: {message}") and done.stderr.count("\n") == 1
    assert "Traceback" not in done.stderr


# The image builds where Docker runs; elsewhere its instructions are read
def test_the_dockerfile_copies_and_calls_what_exists():
    text, makefile = ((ROOT / name).read_text() for name in ("Dockerfile", "Makefile"))
    copied = [shlex.split(line)[:-1] for line in re.findall(r"^COPY (.*)", text, re.MULTILINE)]
    sources = {source for command in copied for source in command}
    assert [source for source in sources if not (ROOT / source).exists()] == []
    # The Makefile's own inputs must be in the image, and what the package links to
    links = [link.resolve() for link in (ROOT / "longctx").iterdir() if link.is_symlink()]
    linked = {link.relative_to(ROOT).parts[0] for link in links}
    assert linked | {"Makefile", "pyproject.toml", "constraints.txt"} <= sources
    targets = re.findall(r"^RUN make (\S+)$", text, re.MULTILINE)
    assert targets and all(f"\n{target}:" in makefile for target in targets)


@pytest.mark.slow
def test_the_image_builds():
    if shutil.which("docker") is None or subprocess.run(["docker", "info"]).returncode:
        pytest.skip("no Docker engine runs here")
    build = ["docker", "build", "-q", "--build-arg", "INDEX=https://download.pytorch.org/whl/cpu"]
    image = subprocess.check_output([*build, str(ROOT)], text=True, timeout=3000).strip()
    subprocess.run(["docker", "run", "--rm", image, "--version"], check=True)
