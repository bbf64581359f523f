"""A clone as one document: which files, in which order, and none from outside of it."""

import os
import shutil
from dataclasses import replace

import pytest

from longctx.data import DataConfig, load
from longctx.data.sources import SOURCES
from longctx.data.sources.registry import check, open_corpus, pinned
from longctx.data.sources.repository import LARGEST
from tests.data.conftest import check_refused, prose

FILES = {
    "README.md": "About αβγ\n",
    "src/app/__init__.py": "",
    "src/app/a.py": "import os, app.deep.z as z  # of b\nfrom . import (\n    b,\n    c\n)\n",
    "src/app/b.py": "def b():\n    import app.c  # X\n",
    "src/app/c.py": "from ..app.deep import z\nfrom app import a\nX = 1\n",
    "src/app/deep/of_z.py": "from .z import text\n",
    "src/app/deep/z.py": "text = 'import app.a'\n",
    "src/app/deep/__init__.py": "",
}


@pytest.fixture
def clone(tmp_path):
    root = tmp_path / "clone"
    for name, text in FILES.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text, encoding="utf-8")
    return root


@pytest.fixture
def config(clone, tmp_path):
    cache = str(tmp_path / "cache")
    return DataConfig("repository", str(clone), vocab_size=400, cache=cache)


def order_of(config):
    (document,) = open_corpus(config).documents()
    assert document.name == "clone"
    lines = document.text.split("\n")
    return [line.strip("= ") for line in lines if line.startswith("=== ")], document.text


def test_files_are_in_the_order_of_their_paths(config):
    names, text = order_of(config)
    assert names == sorted(FILES)
    assert all(f"=== {name} ===\n{content}\n" in text for name, content in FILES.items())


def test_a_file_follows_those_that_it_imports(config):
    config.order = "imports"
    names, _ = order_of(config)
    assert sorted(names) == sorted(FILES)
    # a imports b and c, b imports c, and c imports a, a circle, of which a is the first
    files = ("a", "b", "c", "deep/z", "deep/of_z", "deep/__init__")
    a, b, c, z, of_z, deep = (names.index(f"src/app/{x}.py") for x in files)
    assert z < a < c < b and deep < c and z < of_z


def test_what_is_no_text_is_counted(config, clone):
    (clone / "picture.png").write_bytes(b"\x89PNG\0\0")
    (clone / "latin.txt").write_bytes("Zürich".encode("latin-1"))
    (clone / "table.csv").write_text("1," * LARGEST)
    (clone / ".git").mkdir()
    (clone / ".git" / "config").write_text("hidden")
    os.symlink(clone / "src", clone / "linked")
    os.symlink("circle", clone / "circle")
    os.mkfifo(clone / "pipe")
    assert order_of(config)[0] == sorted(FILES)
    counted = SOURCES["repository"].left_out(config).split(", ")
    assert sorted(counted) == ["1 of more than 1 MiB", "2 binary", "2 links"]


@pytest.mark.parametrize("target", ["/etc", "../secret", "src/../../secret"])
def test_a_link_out_of_the_clone_is_refused(config, clone, target):
    (clone.parent / "secret").write_text("password")
    os.symlink(target, clone / "src" / "link" if target == "/etc" else clone / "link")
    check_refused(config, "link: a link out of the repository")


def test_identity_changes_with_name_and_content(config, clone):
    identity = open_corpus(config).identity
    os.utime(clone / "README.md", (1, 1))
    assert open_corpus(config).identity == identity
    shutil.copytree(clone, clone.parent / "other")
    other = replace(config, path=str(clone.parent / "other"))
    assert open_corpus(other).identity != identity, "it has another name"
    (clone / "README.md").write_text("Other\n")
    assert open_corpus(config).identity != identity


def test_clones_are_mixed_and_split(config, clone, tmp_path):
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "x.c").write_text(prose(3000, 1))
    config.path = [str(clone), str(tmp_path / "other")]
    data = load(config, 64)
    names = {document.name.split(" (")[0] for document in data.documents("train")}
    assert "other" in names and len(data.val) > 0
    assert pinned(config).path == config.path


def test_a_name_that_is_no_text_hides_no_other(config, clone):
    for name in (b"\xfe", b"\xff"):
        (clone / os.fsdecode(name)).write_bytes(name.hex().encode())
    assert "\nfe\n" in order_of(config)[1] and "\nff\n" in order_of(config)[1]


def test_a_folder_that_cannot_be_read_is_counted(config, clone, monkeypatch):
    scandir = os.scandir

    def denied(path):
        if str(path).endswith("deep"):
            raise PermissionError(13, "Permission denied", path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", denied)
    assert SOURCES["repository"].left_out(config) == "1 folders that cannot be read"


def test_a_folder_without_text_is_refused(config, tmp_path):
    (tmp_path / "empty").mkdir()
    for path in ("empty", "nowhere"):
        config.path = str(tmp_path / path)
        check_refused(config, f"data.path=.*{path}: no file of text")
    with pytest.raises(ValueError, match=r"data\.order=imports: data=embedded does not use it"):
        check(DataConfig(order="imports"))
