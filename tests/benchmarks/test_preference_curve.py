"""The curve of a model that learns to quote: what counts as quoted, and all of it, tiny."""

import json

import pytest

from benchmarks.preference_curve import questions, quoted_share
from benchmarks.words import main


def test_questions_are_answered_by_their_text():
    for question, answer in questions(30):
        assert answer.startswith("The text says: “")
        assert quoted_share(answer, question) > 0.6


def test_words_in_runs_of_five_are_quoted():
    text = "One two three four five six, seven."
    shares = {"": 0, "one two three four": 0, "He says: TWO three, four five six": 5 / 7, text: 1}
    assert {answer: quoted_share(answer, text) for answer in shares} == pytest.approx(shares)


@pytest.mark.slow
def test_a_model_is_drawn_before_and_after(model, tmp_path):
    out = tmp_path / "out"
    words = [f"init={model}", "texts=24", "steps=2", "device=cpu", f"out={out}"]
    assert main(["preference_curve", *words]) == 0
    result = json.loads((out / "result.json").read_text())
    validations = [row["step"] for row in result["curve"] if "val_rewards/margins" in row]
    assert validations == [0, 1, 2]
    assert len(result["samples"]) == result["pairs"]["held_out"] > 0
    assert all(0 <= result["quoted"][when] <= 1 for when in ("before", "after"))
    assert (out / "result.png").read_bytes().startswith(b"\x89PNG")
    assert main(["preference_curve", *words]) == 2
