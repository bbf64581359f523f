"""data=repository: a local clone is one document, its text files in path or import order.

A clone is code of others, so nothing in it runs, git neither, and no link is followed: one that
leads out of it is refused. Hidden, binary and huge files are not read.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Set
from functools import partial
from pathlib import Path

from longctx import untrusted
from longctx.config.data_config import DataConfig
from longctx.config.fields import refuse
from longctx.data.documents import Corpus, Document, Shard, exact_key
from longctx.data.sources.registry import register
from longctx.data.sources.text import LocalFiles

LARGEST = 1 << 20  # bytes of a file; source code is shorter, data and generated code are not
# from ..package.module import names, or import modules
_IMPORT = re.compile(
    r"^[ \t]*(?:from[ \t]+(\.*)([.\w]*)[ \t]+import[ \t]*(\([^)]*\)|.*)|import[ \t]+(.*))", re.M
)


@register("repository")
class Repository(LocalFiles):
    """The clones that data.path names, each one document."""

    keys = frozenset({"path", "order"})

    def check_files(self, config: DataConfig) -> None:
        for path in config.paths():
            refuse((not _texts(path)[0], f"data.path={path}: no file of text; give a local clone"))

    def left_out(self, config: DataConfig) -> str:
        skipped = sum((_texts(path)[1] for path in config.paths()), Counter[str]())
        return ", ".join(f"{count:,} {reason}" for reason, count in skipped.items())

    def open(self, config: DataConfig, without: Set[bytes]) -> Corpus:
        self.check_files(config)
        shards = [Shard(path, partial(_read, path, config.order)) for path in config.paths()]
        # By name and content: a checkout gives files new times
        texts = (f"{text.name}\n{text.text}" for shard in shards for text in shard.read())
        hashes = [exact_key(text).hex() for text in texts]
        return Corpus(hashes, shards, len(shards))


def _texts(path: str) -> tuple[dict[str, str], Counter[str]]:
    """Return the text of each file of a clone by its name in it, sorted, and count the others."""
    root = Path(os.path.realpath(os.path.expanduser(path)))
    texts, skipped = dict[str, str](), Counter[str]()
    unread = "folders that cannot be read"
    for folder, folders, names in os.walk(root, onerror=lambda _: skipped.update([unread])):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for file in (Path(folder, name) for name in folders + names if not name.startswith(".")):
            if file.is_symlink():
                outside = not Path(os.path.realpath(file)).is_relative_to(root)
                refuse((outside, f"{file}: a link out of the repository; take it out"))
                skipped["links"] += 1
            elif file.is_file() and file.stat().st_size > LARGEST:
                skipped[f"of more than {LARGEST >> 20} MiB"] += 1
            elif file.is_file():
                with untrusted.open_file(file, within=root) as opened:
                    content = opened.read(LARGEST)
                try:
                    text = content.decode("utf-8-sig")
                except UnicodeDecodeError:
                    text = "\0"
                if "\0" in text:
                    skipped["binary"] += 1
                else:
                    name = file.relative_to(root).as_posix()
                    texts[name.encode(errors="backslashreplace").decode()] = text
    return dict(sorted(texts.items())), skipped


def _read(path: str, order: str) -> Iterator[Document]:
    texts = _texts(path)[0]
    names = _by_imports(texts) if order == "imports" else list(texts)
    text = "".join(f"=== {name} ===\n{texts[name]}\n" for name in names)
    yield Document(os.path.basename(os.path.abspath(path)), text)


def _by_imports(texts: Mapping[str, str]) -> list[str]:
    """Return the names of files in rounds, each in the order of names. A round imports no file of a
    later one. If all the rest is circles, its first file is next.
    """
    files = {re.sub(r"^src/|(/__init__)?\.py$", "", name): name for name in texts}
    left = {
        name: {files[module] for module in _imported(name, text) if module in files} - {name}
        for name, text in texts.items()
    }
    ordered: list[str] = []
    while left:
        free = [name for name, needed in left.items() if not any(x in left for x in needed)]
        for name in free or [next(iter(left))]:
            ordered.append(name)
            del left[name]
    return ordered


def _imported(name: str, text: str) -> Iterator[str]:
    """Yield the paths of the modules that a Python file may import, without .py."""
    package = name.removeprefix("src/").split("/")[:-1]
    for dots, module, names, modules in _IMPORT.findall(text) if name.endswith(".py") else ():
        above = package[: max(0, len(package) + 1 - len(dots))] if dots else []
        base = [*above, *filter(None, module.split("."))]
        yield from ("/".join([*base, part]) for part in re.findall(r"\w+", names))
        yield "/".join(base)
        parts = (re.findall(r"[\w.]+", part) for part in modules.split("#")[0].split(","))
        yield from (words[0].replace(".", "/") for words in parts if words)
