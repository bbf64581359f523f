"""Rows of preferences; models and command lines are those of tests/training/initial."""

import json
import random
from pathlib import Path
from typing import Any

import pytest

from tests.training.conftest import WORDS
from tests.training.initial.conftest import folder, model_folder, start, tuned  # noqa: F401


def preferences(count: int) -> dict[str, list[dict[str, Any]]]:
    """Pairs, and the chosen answers with labels: prompts of up to 30 words, answers of up to 9."""
    draw = random.Random(0)

    def text(most: int) -> str:
        return " ".join(draw.choice(WORDS.split()) for _ in range(draw.randint(1, most)))

    pairs = [
        {"prompt": f"{text(30)} ?", "chosen": f" {text(9)}", "rejected": f" {text(9)}s"}
        for _ in range(count)
    ]
    labels = [
        {"prompt": row["prompt"], "completion": row["chosen"], "label": n % 3 != 0}
        for n, row in enumerate(pairs)
    ]
    return {"pairs": pairs, "labels": labels}


@pytest.fixture(scope="session")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """pairs.jsonl and labels.jsonl."""
    place = tmp_path_factory.mktemp("rows")
    for name, content in preferences(40).items():
        (place / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in content))
    return place
