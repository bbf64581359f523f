"""A small model in a Hugging Face folder, and the command line of a run that starts from it."""

from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from longctx.data import tokenizer as bpe
from tests.training.sample_run import Overrides


@pytest.fixture
def folder(tmp_path: Path, corpus: Path) -> Path:
    """A model for 96 tokens, as transformers saves it."""
    place = tmp_path / "models" / "Small-1.5"
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    config = LlamaConfig(vocab_size=320, intermediate_size=48, max_position_embeddings=96, **sizes)
    LlamaForCausalLM(config).save_pretrained(place)
    bpe.train([file.read_text() for file in sorted(corpus.iterdir())], 310).save(
        place / "tokenizer.json"
    )
    return place


@pytest.fixture
def start(overrides: Overrides, folder: Path) -> Overrides:
    """The command line of a tiny run from `folder`."""
    left_out = {
        "model": None,
        "model__layers": None,
        "model__channels": None,
        "model__ffn": None,
        "data__vocab_size": None,
    }
    return lambda **changes: overrides(**(left_out | {"init": folder, "max_steps": 2} | changes))
