"""Recall: facts where they should be, answers scored as a model that knows them would be, eval.py
and validation with it.
"""

import math
import re
from typing import Any

import numpy as np
import pytest
import torch

from longctx.data.dataset import EncodedDocument
from longctx.data.tokenizer import Tokenizer
from longctx.evaluation.passkey import FACT, QUESTION, filler_of, recall, sample, text
from longctx.evaluation.score import Scorer
from longctx.model import GPT, GPTConfig
from tests.evaluation.conftest import WALK


@pytest.fixture(scope="module")
def filler(tokenizer: Tokenizer) -> np.ndarray:
    return np.asarray(tokenizer.encode(WALK), dtype=np.int64)


class Oracle(GPT):
    """A model that finds what followed the question's words first, blind beyond `sight` tokens."""

    def __init__(self, tokenizer: Tokenizer, sight: int = 10**9) -> None:
        super().__init__(GPTConfig(vocab_size=512, layers=1, channels=16, heads=2, ffn=16), "naive")
        self.tokenizer, self.sight = tokenizer, sight

    def forward(
        self, tokens: torch.Tensor, *args: Any, at: torch.Tensor | None = None, **keys: Any
    ) -> torch.Tensor:
        assert at is not None
        logits = torch.zeros(*at.shape, 512)
        for b, row in enumerate(tokens.tolist()):
            for n, place in enumerate(at[b].tolist()):
                prefix = row[: place + 1]
                width = 1  # of the question's last words, up to " key is" or " of "
                while width < 40 and not re.search(
                    " key is", self.tokenizer.decode(prefix[-width:])
                ):
                    width += 1
                begins = range(max(0, place - self.sight), place + 1 - width)
                facts = [i for i in begins if row[i : i + width] == prefix[-width:]]
                logits[b, n, row[facts[0] + width] if facts else 0] = 20.0
        return logits


@pytest.mark.parametrize("depth", [0.0, 0.37, 1.0])
def test_a_text_has_its_length_and_key_depth(tokenizer, filler, depth):
    ids, answer = text("12345", tokenizer, filler, 400, depth)
    assert len(ids) == 400
    assert tokenizer.decode(ids[-answer:]) == " 12345"
    shown, fact = tokenizer.decode(ids), FACT.format("12345")
    assert shown.endswith(f"{QUESTION} 12345")
    room = len(shown) - len(fact) - len(QUESTION)
    assert shown.index(fact) / room == pytest.approx(depth, abs=0.15)


def test_recall_is_right_where_the_model_sees_the_fact(tokenizer, filler):
    scorer = Scorer(Oracle(tokenizer))
    right, logp = recall(scorer, tokenizer, filler, [256, 300], [0.0, 0.5, 1.0], samples=3)
    assert right.shape == (2, 3, 3)
    assert right.all()
    assert (logp > -0.1).all()
    blind = Scorer(Oracle(tokenizer, sight=150))
    right, logp = recall(blind, tokenizer, filler, [400], [0.0, 0.95], samples=3)
    assert right.mean(-1).tolist() == [[0.0, 1.0]]
    assert logp[0, 0].mean() < -10


def test_a_model_is_scored_by_its_own_logits(tokenizer, filler):
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocab_size=448, layers=1, channels=16, heads=2, ffn=16)).train()
    right, logp = recall(Scorer(model), tokenizer, filler, [150], [0.5], samples=1)
    assert model.training
    ids, answer = sample(tokenizer, filler, 150, 0.5, 0)
    own = model(torch.from_numpy(ids[None, :-1])).log_softmax(-1)[0, -answer:]
    expected = own.gather(1, torch.from_numpy(ids[-answer:, None])).sum().item()
    assert logp.item() == pytest.approx(expected, rel=1e-5)
    assert expected == pytest.approx(-answer * math.log(448), rel=0.2)
    assert right.item() == bool((own.argmax(-1) == torch.from_numpy(ids[-answer:])).all())


def test_filler_is_text_alone(tokenizer):
    ids = [5, 6, 7, tokenizer.eos_id], [8, 9]
    documents = [EncodedDocument("a", np.array(tokens), 3) for tokens in ids]
    assert filler_of(documents, tokenizer, 3).tolist() == [5, 6, 7]
    assert filler_of(documents, tokenizer, 10).tolist() == [5, 6, 7, 8, 9]
    assert len(filler_of([], tokenizer, 10)) == 0


def test_lengths_that_cannot_be_filled_are_refused(tokenizer, filler):
    for length, tokens in ((256, filler[:10]), (40, filler)):
        with pytest.raises(ValueError, match=rf"passkey\.lengths=\[{length}\]:"):
            recall(Scorer(Oracle(tokenizer)), tokenizer, tokens, [length])
