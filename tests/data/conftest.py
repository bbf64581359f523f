"""Small corpora on disk, and a configuration that reads them with a cache of its own."""

import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

from longctx import plugins
from longctx.data import DataConfig, load
from longctx.data.sources import SOURCES
from tests.data.chat_templates import CHATML, write, write_tokenizer
from tests.processes import ROOT

TEXT = "rain on the old stone bridge and light over a quiet river αβγ 水 été 😀"
WORDS = TEXT.split()


def prose(count: int, seed: int) -> str:
    """Return text of `count` words, in lines of a dozen."""
    rng = random.Random(seed)
    words = [rng.choice(WORDS) + str(rng.randrange(9)) for _ in range(count)]
    return "\n".join(" ".join(words[n : n + 12]) for n in range(0, count, 12))


def check_refused(config: DataConfig, message: str, seq_len: int = 64) -> None:
    """Check that the documents of `config` are refused, in one line that matches `message`."""
    with pytest.raises((ValueError, OSError), match=message) as caught:
        load(config, seq_len)
    assert "\n" not in str(caught.value)


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """Return a folder of 23 documents of 1 to 400 words, and an empty one."""
    folder = tmp_path / "corpus"
    folder.mkdir()
    for number in range(23):
        size = random.Random(number).choice([1, 7, 30, 90, 400])
        (folder / f"{number:02}.txt").write_text(prose(size, number), encoding="utf-8")
    (folder / "empty.md").write_text("")
    return folder


@pytest.fixture
def text_config(corpus: Path, tmp_path: Path) -> Callable[..., DataConfig]:
    def make(**changes: object) -> DataConfig:
        values = {"source": "text", "path": str(corpus), "vocab_size": 400, "val_fraction": 0.2}
        return DataConfig(**{**values, "cache": str(tmp_path / "cache"), **changes})  # type: ignore[arg-type]

    return make


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a tokenizer's folder with a chat template."""
    write_tokenizer(tmp_path)
    write(tmp_path, CHATML)
    return tmp_path


def example(source: str) -> Iterator[ModuleType]:
    """Yield the plugin of examples/ with that source, which is forgotten after the test."""
    plugins.load([str(ROOT / "examples" / f"{source}.py")])
    name = type(SOURCES[source]).__module__
    yield sys.modules[name]
    SOURCES.remove(source)
    del sys.modules[name]


@pytest.fixture
def needles() -> Iterator[ModuleType]:
    yield from example("needles")


@pytest.fixture
def questions() -> Iterator[ModuleType]:
    yield from example("questions")
