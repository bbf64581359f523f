"""The image builds where Docker runs; elsewhere its instructions are read."""

import re
import shlex
import shutil
import subprocess

import pytest

from tests.processes import ROOT

INSTRUCTIONS = {"FROM", "RUN", "WORKDIR", "ARG", "ENV", "COPY", "ENTRYPOINT", "CMD"}


def instructions() -> list[tuple[str, str]]:
    """Return each instruction of the Dockerfile with its arguments."""
    lines = (ROOT / "Dockerfile").read_text().splitlines()
    words = [line.partition(" ") for line in lines if line and not line.startswith("#")]
    return [(name, arguments) for name, _, arguments in words]


def test_the_dockerfile_copies_and_calls_what_exists():
    found = instructions()
    assert found[0][0] == "FROM" and {name for name, _ in found} <= INSTRUCTIONS
    copied = [shlex.split(arguments)[:-1] for name, arguments in found if name == "COPY"]
    sources = [source for command in copied for source in command]
    assert [source for source in sources if not (ROOT / source).exists()] == []
    links = [link.resolve() for link in (ROOT / "longctx").iterdir() if link.is_symlink()]
    assert {link.relative_to(ROOT).parts[0] for link in links} <= set(sources)
    targets = re.findall(r"^([\w./-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    commands = [arguments for name, arguments in found if name == "RUN"]
    made = [re.match(r"make (\S+)$", command) for command in commands if "apt-get" not in command]
    assert made and all(target is not None and target[1] in targets for target in made)
    # The Makefile's own inputs must be in the image
    assert {"Makefile", "pyproject.toml", "constraints.txt"} <= set(sources)


@pytest.mark.slow
def test_the_image_builds():
    if shutil.which("docker") is None or subprocess.run(["docker", "info"]).returncode:
        pytest.skip("no Docker engine runs here")
    build = ["docker", "build", "-q", "--build-arg", "INDEX=https://download.pytorch.org/whl/cpu"]
    image = subprocess.check_output([*build, str(ROOT)], text=True, timeout=3000).strip()
    subprocess.run(["docker", "run", "--rm", image, "--version"], check=True)
