"""data=embedded: Python source of the standard library and of the installed torch package, which
every installation has.

About 2,400 files, 50 MB, real documents up to 100,000 tokens long, and no network. Left out: tests,
codecs' and other generated tables, third-party code that either of them carries along, and files of
a few hundred bytes or less.
"""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Iterator, Set
from contextlib import suppress
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from longctx.config.data_config import DataConfig
from longctx.data.documents import Corpus, Document, Shard
from longctx.data.sources.registry import Source, register

_SKIPPED_FOLDERS = {
    *("site-packages", "dist-packages", "__pycache__"),
    *("_vendor", "_vendored_packages", "_bundled"),  # others' code
    *("test", "tests", "idle_test", "_internal_tests"),
    *("encodings", "pydoc_data", "generated", "serialized_patterns"),  # tables
}
_SKIPPED_PATHS = {
    "torch/include",  # C++: most of the package's files, and none in Python
    "torch/testing/_internal",
    "torch/sparse/_triton_ops_meta.py",
    "torch/utils/hipify/cuda_to_hip_mappings.py",
    "torch/_numpy/_casting_dicts.py",
    "torch/_inductor/autoheuristic/artifacts",
    "stdlib/lib2to3",
    "stdlib/html/entities.py",
    "stdlib/re/_casefix.py",
    "stdlib/stringprep.py",
}
_SKIPPED_PREFIXES = ("_sysconfigdata", "config-")  # of a file's or folder's name
_SMALLEST = 256  # bytes; what is left out is mostly empty __init__.py


@register("embedded")
class Embedded(Source):
    """Python files that are installed; it has no keys of its own."""

    def open(self, config: DataConfig, without: Set[bytes]) -> Corpus:
        files = _python_files(Path(sysconfig.get_path("stdlib")), "stdlib")
        torch = find_spec("torch")
        if torch is not None and torch.submodule_search_locations:
            files += _python_files(Path(torch.submodule_search_locations[0]), "torch")
        shards = [Shard(name, partial(_read, name, path)) for name, path in files]
        # By content, not by time: an image of a machine may replace both. 50 MB take 0.1 s.
        hashes = [
            (name, hashlib.sha256(Path(path).read_bytes()).hexdigest()) for name, path in files
        ]
        return Corpus(hashes, shards, len(shards))


def _read(name: str, path: str) -> Iterator[Document]:
    # A source file in another encoding is left out; there is none outside of the tests today.
    with suppress(UnicodeDecodeError):
        yield Document(name, Path(path).read_bytes().decode("utf-8"))


def _python_files(root: Path, name: str) -> list[tuple[str, str]]:
    """Return (name, path) of the corpus' files under `root`, sorted by name."""
    files = []
    for folder, folders, names in os.walk(root):
        prefix = f"{name}{folder.removeprefix(str(root))}/"
        skipped = {x for x in folders + names if x.startswith(_SKIPPED_PREFIXES)}
        skipped |= {x for x in folders + names if prefix + x in _SKIPPED_PATHS}
        folders[:] = {*folders} - skipped - _SKIPPED_FOLDERS
        paths = {prefix + x: f"{folder}/{x}" for x in {*names} - skipped if x.endswith(".py")}
        files += [(x, path) for x, path in paths.items() if os.path.getsize(path) > _SMALLEST]
    return sorted(files)
