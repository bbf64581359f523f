"""A tokenizer of words that the tests write, and a model of random weights."""

import pytest
import torch

from longctx.data.tokenizer import Tokenizer, train
from longctx.model import GPT, GPTConfig

SHAPE = {"layers": 2, "channels": 32, "heads": 4, "kv_heads": 2, "ffn": 48, "init_std": 0.3}
ESSAY = "The old dog walks home. " * 30 + "Nobody knows the way, but the river does! " * 40
WALK = "a long walk home\nwith the old dog\n" * 80


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return train(["a rose is a rose\n" * 9, WALK, "The pass key is 12345.", ESSAY], 300)


@pytest.fixture(scope="session")
def model() -> GPT:
    """A model of 64 tokens, which no test may change."""
    torch.manual_seed(0)
    return GPT(GPTConfig(vocab_size=64, **SHAPE), "flash").eval()
