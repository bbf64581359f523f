"""Measure how readable the package is: run it as a script to see what to mend.

tests/test_readability.py holds the figures to their limits.
"""

import ast
import io
import keyword
import re
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
RELATIVE = re.compile(r"\b(which|that|those|what|whose|where)\b", re.IGNORECASE)
NO_VERB = re.compile(r"^(what|whether|how|which|those|where|one|whose)\b", re.IGNORECASE)
KEYWORDS = frozenset(keyword.kwlist) | {"self", "cls"}
SMALL_FILE = 80  # lines
LONG_FUNCTION = 40  # lines, from which on three comments are wanted
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


class Sentence(NamedTuple):
    """One sentence of a docstring or comment, and the line that it begins near."""

    path: Path
    line: int
    text: str

    @property
    def words(self) -> list[str]:
        return re.findall(r"[A-Za-z']+", self.text)

    @property
    def relatives(self) -> int:
        return len(RELATIVE.findall(self.text))


class Source:
    """One Python file: its lines, syntax tree and names."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.text = path.read_text(encoding="utf-8")
        self.lines = self.text.splitlines()
        self.tree = ast.parse(self.text)
        self.tokens = list(tokenize.generate_tokens(io.StringIO(self.text).readline))

    def identifiers(self) -> Iterator[str]:
        """Yield every name as often as it is used, without keywords and dunder names."""
        for token in self.tokens:
            is_name = token.type == tokenize.NAME and token.string not in KEYWORDS
            if is_name and not token.string.startswith("__"):
                yield token.string

    def docstrings(self) -> Iterator[tuple[ast.AST, int, str]]:
        """Yield each docstring with its owner and line."""
        for node in ast.walk(self.tree):
            if isinstance(node, (ast.Module, ast.ClassDef, *DEFINITIONS)):
                text = ast.get_docstring(node)
                if text:
                    yield node, getattr(node, "lineno", 0) + 1, text

    def sentences(self) -> Iterator[Sentence]:
        """Yield the sentences of all docstrings and comments."""
        for token in self.tokens:
            if token.type == tokenize.COMMENT:
                yield Sentence(self.path, token.start[0], token.string.lstrip("# "))
        for _, line, text in self.docstrings():
            for sentence in re.split(r"(?<=[.;:!?])\s+", " ".join(text.split())):
                yield Sentence(self.path, line, sentence)

    def verbless(self) -> Iterator[Sentence]:
        """Yield first lines of function docstrings that begin with no verb."""
        for node, line, text in self.docstrings():
            if isinstance(node, DEFINITIONS) and NO_VERB.match(text):
                yield Sentence(self.path, line, text.splitlines()[0])

    def uncommented(self) -> Iterator[Sentence]:
        """Yield the name and length of each long function with fewer than three comments."""
        for node in ast.walk(self.tree):
            if isinstance(node, DEFINITIONS):
                last = node.end_lineno or node.lineno
                body = self.lines[node.lineno - 1 : last]
                comments = sum(line.lstrip().startswith("#") for line in body)
                if len(body) > LONG_FUNCTION and comments < 3:
                    yield Sentence(self.path, node.lineno, f"{node.name}, {len(body)} lines")

    def count(self, *kinds: type[ast.AST]) -> int:
        """Count the syntax nodes of these types."""
        return sum(isinstance(node, kinds) for node in ast.walk(self.tree))


def sources(folder: str) -> list[Source]:
    """Read every Python file below `folder`, a path from the project's root."""
    return [Source(path) for path in sorted((ROOT / folder).rglob("*.py"))]


def heavy(found: list[Source]) -> list[Sentence]:
    """Return sentences with two or more relatives, the worst first."""
    everything = [sentence for source in found for sentence in source.sentences()]
    return sorted((s for s in everything if s.relatives >= 2), key=lambda s: -s.relatives)


def figures(found: list[Source]) -> dict[str, float]:
    """Return the figures of these files by name; shares are in percent."""
    lines = sum(len(source.lines) for source in found)
    sentences = [s for source in found for s in source.sentences()]
    long_enough = [s for s in sentences if len(s.words) > 4]
    words = Counter(word.lower() for s in sentences for word in s.words)
    names = [name for source in found for name in source.identifiers()]
    functions = [node for source in found for node, _, _ in source.docstrings()]
    functions = [node for node in functions if isinstance(node, DEFINITIONS)]
    comments = sum(line.lstrip().startswith("#") for source in found for line in source.lines)

    def share(part: int, whole: int) -> float:
        return round(100 * part / max(1, whole), 1)

    def per_thousand(part: int, whole: int) -> float:
        return round(1000 * part / max(1, whole), 1)

    return {
        "files": len(found),
        "lines": lines,
        "files under 80 lines": sum(len(source.lines) < SMALL_FILE for source in found),
        "heavy sentences": share(sum(s.relatives >= 2 for s in long_enough), len(long_enough)),
        "where": per_thousand(words["where"], sum(words.values())),
        "docstrings without a verb": share(
            sum(1 for source in found for _ in source.verbless()), len(functions)
        ),
        "letters of an identifier": round(sum(map(len, names)) / max(1, len(names)), 2),
        "comment lines": share(comments, lines),
        "try": per_thousand(sum(source.count(ast.Try) for source in found), lines),
        "raise": per_thousand(sum(source.count(ast.Raise) for source in found), lines),
        "long functions without comments": sum(1 for s in found for _ in s.uncommented()),
    }


def main() -> None:
    """Print the figures of the package and of the tests, and the places to mend first."""
    package = sources("longctx")
    for name, value in figures(package).items():
        print(f"{name:<34}{value:>9,}")
    print(f"{'lines of tests':<34}{sum(len(s.lines) for s in sources('tests')):>9,}")
    places = {
        "sentences to cut in two": heavy(package),
        "docstrings without a verb in front": [s for source in package for s in source.verbless()],
        "long functions with few comments": [s for source in package for s in source.uncommented()],
    }
    for title, sentences in places.items():
        print(f"\n{title}:")
        for sentence in sentences[:20]:
            path = sentence.path.relative_to(ROOT)
            print(f"  {path}:{sentence.line} {sentence.text[:120]}")


if __name__ == "__main__":
    main()
