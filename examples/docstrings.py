"""data=docstrings: the docstrings of Python files, prose that every installation has.

    longctx data 'plugins=[examples/docstrings.py]' data=docstrings
    python train.py 'plugins=[examples/docstrings.py]' data=docstrings 'data.path=src/**/*.py'

Without data.path they are those of the embedded files: 7 million characters. A model that trains on
code alone forgets prose; a part of the mix from here keeps it. The docstrings of a file are one
document, on the file's side of the split.
"""

from __future__ import annotations

import ast
import warnings
from collections.abc import Iterator, Set
from functools import partial

from longctx.config.data_config import SOURCES, DataConfig
from longctx.data.sources import Corpus, Document, Shard, Source, register

DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


@register("docstrings")
class Docstrings(Source):
    """The docstrings of the files of data.path, or of the embedded ones."""

    keys = frozenset({"path", "errors"})

    def pinned(self, config: DataConfig) -> DataConfig:
        pinned: DataConfig = SOURCES["text"].pinned(config)
        return pinned

    def open(self, config: DataConfig, without: Set[bytes]) -> Corpus:
        corpus = SOURCES["text" if config.paths() else "embedded"].open(config, without)
        shards = [Shard(x.name, partial(documents, x)) for x in corpus.shards]
        return Corpus([corpus.identity, "docstrings 1"], shards)


def documents(shard: Shard) -> Iterator[Document]:
    """Read the docstrings of each file that has some."""
    for document in shard.documents():
        if text := prose(document.name, document.text):
            yield document._replace(text=text, origin=document.text)


def prose(name: str, text: str) -> str:
    """Return the docstrings of a Python file. Raises ValueError if it is none."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # such as "\d" in a string
        try:
            tree = ast.parse(text)
        # Of a long text that is no Python, the parser says that memory is out
        except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
            problem = f"{name}: no Python file ({str(error) or 'too deep'})"
            raise ValueError(f"{problem}; give those: 'src/**/*.py'") from None
    return "\n\n".join(docstrings(tree))


def docstrings(node: ast.AST) -> Iterator[str]:
    """Yield the docstring of a file, a class or a function, and those inside it."""
    if isinstance(node, DOCUMENTED) and (found := ast.get_docstring(node)):
        yield found
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.stmt):
            yield from docstrings(child)
