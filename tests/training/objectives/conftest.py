"""Rows of preferences; models and command lines are those of tests/training/initial."""

import json
import random
from pathlib import Path

import pytest

from tests.training.conftest import WORDS
from tests.training.initial.conftest import folder, start, tuned  # noqa: F401


@pytest.fixture(scope="session")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """pairs.jsonl and labels.jsonl: prompts of up to 30 words, answers of up to 9."""
    place, draw = tmp_path_factory.mktemp("rows"), random.Random(0)

    def text(most: int) -> str:
        return " ".join(draw.choice(WORDS.split()) for _ in range(draw.randint(1, most)))

    pairs = [
        {"prompt": text(30) + " ", "chosen": text(9), "rejected": text(9) + "s"} for _ in range(40)
    ]
    labels = [
        {"prompt": row["prompt"], "completion": row["chosen"], "label": n % 3 != 0}
        for n, row in enumerate(pairs)
    ]
    for name, content in (("pairs", pairs), ("labels", labels)):
        (place / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in content))
    return place
