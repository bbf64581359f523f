"""Forward passes of an evaluation: greedy answers of several prompts, and their speed."""

from types import SimpleNamespace

import pytest
import torch

from longctx.evaluation import score
from longctx.evaluation.score import Progress, Scorer
from longctx.model import GPT, GPTConfig

PROMPTS = [[1, 2, 3, 4, 5], [7], [9, 8, 9]]


@pytest.fixture(scope="module")
def model() -> GPT:
    torch.manual_seed(0)
    shape = {"layers": 2, "channels": 16, "heads": 2, "ffn": 16, "init_std": 0.3}
    return GPT(GPTConfig(vocab_size=64, **shape)).eval()


def test_answers_are_greedy_and_end(model: GPT) -> None:
    expected = []
    for prompt in PROMPTS:
        ids = list(prompt)
        for _ in range(6):
            ids.append(int(model(torch.tensor([ids]))[0, -1].argmax()))
        expected.append(ids[len(prompt) :])
    assert Scorer(model).answers(PROMPTS, 6, [63], 11) == expected
    end = expected[0][2]
    until = [row[: row.index(end)] if end in row else row for row in expected]
    assert Scorer(model).answers(PROMPTS, 6, [end], 11) == until


def test_batches_of_one_length_share_a_cache(model: GPT) -> None:
    scorer = Scorer(model)
    decoders = set()
    for prompts in (PROMPTS, [[6, 5], [4]], [[3, 2, 1], [8] * 5, [9, 1, 9, 1]]):
        alone = [Scorer(model).answers([prompt], 6, [63], 11)[0] for prompt in prompts]
        assert scorer.answers(prompts, 6, [63], 11) == alone
        decoders.add(scorer.decoder)
    assert len(decoders) == 1
    scorer.answers([*PROMPTS, [5]], 6, [63], 11)  # more sequences
    decoders.add(scorer.decoder)
    scorer.answers(PROMPTS, 6, [63], 12)  # longer ones
    assert len({*decoders, scorer.decoder}) == 3


def test_a_batch_stops_when_each_answer_has_ended(model: GPT) -> None:
    seen: list[tuple[int, int]] = []

    def has_ended(number: int, tokens: list[int]) -> bool:
        seen.append((number, len(tokens)))
        return len(tokens) == 2 + number

    answers = Scorer(model).answers([[1, 2], [7]], 9, [63], 11, has_ended)
    assert list(map(len, answers)) == [2, 3]
    assert max(count for _, count in seen) == 3


def test_speed_is_that_after_the_first_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that says 0, 90, 180, … seconds."""
    clock = iter(range(0, 900, 90))
    monkeypatch.setattr(score, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    with Progress("tokens", 100) as progress:
        progress.advance(50)
        assert progress.units_per_second is None
        progress.advance(20)
    assert progress.units_per_second == 20 / 90
