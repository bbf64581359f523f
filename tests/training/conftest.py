"""A small corpus of unequal documents, and the command line of a run of a second on it."""

import functools
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

import train

WORDS = "the row of a long text holds many words some names such as ada bert cleo come again"


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """60 documents of 3 to 400 words."""
    folder = tmp_path_factory.mktemp("corpus")
    draw = random.Random(0)
    for number in range(60):
        words = (
            draw.choice(WORDS.split()) + draw.choice(["", "s", "ed", str(number)])
            for _ in range(3 + draw.randrange(20) ** 2)
        )
        (folder / f"{number:02d}.txt").write_text(" ".join(words))
    return folder


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where every test of this session finds the tokens of the corpus."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="session")
def overrides_in(corpus: Path, cache: Path) -> Callable[..., list[str]]:
    """The command line of a tiny run in a folder of runs, with changed keys (`__` is a dot)."""

    def command(runs: Path, /, **changes: object) -> list[str]:
        keys: dict[str, object] = {
            **{"data": "text", "data.path": corpus, "data.cache": cache, "data.vocab_size": 300},
            **{"model": "tiny", "model.layers": 1, "model.channels": 32, "model.ffn": 48},
            **{"seq_len": 64, "batch_size": 2, "accumulate": 2, "max_steps": 6, "log_every": 1},
            **{"data.val_fraction": 0.2, "val_rows": 6, "workers": 0, "device": "cpu"},
            **{"wandb.mode": "disabled", "runs": runs},
        }
        keys |= {key.replace("__", "."): value for key, value in changes.items()}
        return [f"{key}={value}" for key, value in keys.items() if value is not None]

    return command


@pytest.fixture
def overrides(overrides_in: Callable[..., list[str]], tmp_path: Path) -> Callable[..., list[str]]:
    """The command line of a tiny run in tmp_path/runs; see `overrides_in`."""
    return functools.partial(overrides_in, tmp_path / "runs")


@pytest.fixture(scope="session")
def finished_run(
    overrides_in: Callable[..., list[str]], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A run of two steps, with one checkpoint, which no test may change."""
    runs = tmp_path_factory.mktemp("runs")
    assert train.main(overrides_in(runs, name="r", max_steps=2)) == 0
    return runs / "r"


@pytest.fixture
def two_steps(finished_run: Path, tmp_path: Path) -> Path:
    """A copy of the run of two steps, as tmp_path/runs/r."""
    return shutil.copytree(finished_run, tmp_path / "runs" / "r", symlinks=True)


@pytest.fixture
def trained(overrides: Callable[..., list[str]], tmp_path: Path) -> Callable[..., Path]:
    """Trains a tiny run to its end, `r` if no name is given, and returns its folder."""

    def train_to_end(name: str = "r", **changes: object) -> Path:
        assert train.main(overrides(name=name, **changes)) == 0
        return tmp_path / "runs" / name

    return train_to_end
