"""The sdist and the wheel are whole: the wheel trains in an environment of its own."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterable
from importlib.metadata import Distribution, distribution, packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import longctx
from longctx import cli
from tests.test_layering import SOURCES, imports

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_no_command_installs_longctx_from_pypi():
    """On PyPI the name belongs to another project."""
    files = [path for folder in (".", "docs", "longctx") for path in (ROOT / folder).glob("*.md")]
    files += (ROOT / "longctx").rglob("*.py")
    installs = re.compile(r"(pip|uv) (install|add) [^`\n]*longctx(?!-train)")
    assert len(files) > 100
    assert [path for path in files if installs.search(path.read_text())] == []


def test_every_import_is_a_dependency_or_an_extra():
    extras = PROJECT["optional-dependencies"]
    texts = PROJECT["dependencies"] + [x for name in extras for x in extras[name] if name != "test"]
    declared = {canonicalize_name(Requirement(text).name) for text in texts}
    names = {name.split(".")[0] for path in SOURCES for name in imports(path)}
    names -= {"longctx", *sys.stdlib_module_names}
    installed = packages_distributions()
    missing = [
        name
        for name in names & installed.keys()
        if not declared & {canonicalize_name(package) for package in installed[name]}
    ]
    assert missing == []


def test_the_version_heads_the_changelog(capsys):
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"longctx {longctx.__version__}\n"
    versions = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert versions[0] == longctx.__version__
    assert f"version: {longctx.__version__}\n" in (ROOT / "CITATION.cff").read_text()


def run(*command: str | Path, cwd: Path, **environment: str) -> str:
    process = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        # A checkout on the path would count as installed
        env=os.environ | {"PYTHONPATH": ""} | environment,
        capture_output=True,
        text=True,
    )
    assert process.returncode == 0, process.stdout + process.stderr
    return process.stdout


def required(package: Distribution, known: dict[str, Distribution]) -> None:
    """Add to `known` what the metadata of `package` requires, and what that requires in turn."""
    for requirement in map(Requirement, package.requires or ()):
        name = canonicalize_name(requirement.name)
        # An extra's own requirements name it in their marker, so extras do not count
        if name not in known and (requirement.marker is None or requirement.marker.evaluate()):
            known[name] = distribution(name)
            required(known[name], known)


def link(packages: Iterable[Distribution], site: Path) -> None:
    """Make the files of `packages`, installed here, importable in another environment."""
    for package in packages:
        for file in package.files or ():
            target = site / file.parts[0]
            if file.parts[0] != ".." and not target.exists():
                target.symlink_to(package.locate_file(file.parts[0]))


@pytest.mark.slow
def test_the_wheel_trains_in_its_own_environment(tmp_path):
    source = tmp_path / "source"  # building leaves files there
    for name in ("longctx", "configs"):
        shutil.copytree(ROOT / name, source / name, symlinks=True)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    # The wheel is built from the sdist, so that the sdist is tested too
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", "dist", source, cwd=tmp_path)
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    assert zipfile.ZipFile(wheel).read("longctx/py.typed") == b""

    run(sys.executable, "-m", "venv", "--without-pip", "own", cwd=tmp_path)
    bin = tmp_path / "own" / "bin"
    install = ["-m", "pip", "--python", bin / "python", "install", "--quiet", "--no-deps"]
    run(sys.executable, *install, wheel, cwd=tmp_path)
    (site,) = (tmp_path / "own").glob("lib/*/site-packages")
    dependencies = dict[str, Distribution]()
    required(next(iter(Distribution.discover(path=[str(site)]))), dependencies)
    assert "pytest" not in dependencies
    link(dependencies.values(), site)

    (tmp_path / "text.txt").write_text("a rose is a rose is a rose\n" * 4000)
    data = ["data=text", "data.path=text.txt", "data.vocab_size=300", "data.val_fraction=0"]
    overrides = ["model=tiny", "seq_len=64", "max_steps=2", "device=cpu", "wandb.mode=disabled"]
    cache = str(tmp_path / "cache")
    run(bin / "longctx", "train", *data, *overrides, cwd=tmp_path, LONGCTX_CACHE=cache)
    assert [path.name for path in (tmp_path / "runs").iterdir()]
