"""A small model in a Hugging Face folder, and the command line of a run that starts from it."""

import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from longctx.data import tokenizer as bpe
from tests.training.sample_run import Overrides, Trained


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Path:
    """A model for 96 tokens, as transformers saves it, which no test may change."""
    sizes = {"hidden_size": 32, "intermediate_size": 48}
    return saved_model(tmp_path_factory.mktemp("saved"), corpus, torch.float32, **sizes)


@pytest.fixture
def folder(model_folder: Path, tmp_path: Path) -> Path:
    """A copy of that model."""
    return shutil.copytree(model_folder, tmp_path / "models" / model_folder.name)


def saved_model(
    tmp_path: Path, corpus: Path, dtype: torch.dtype, kind: str = "llama", **sizes: int
) -> Path:
    """The folder of a model for 96 tokens in `dtype`, with a tokenizer of the corpus."""
    folder = tmp_path / "models" / "Small-1.5"
    torch.manual_seed(0)
    own = {"vocab_size": 320, "max_position_embeddings": 96, "num_hidden_layers": 2}
    own |= {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = AutoConfig.for_model(kind, dtype=str(dtype).removeprefix("torch."), **own, **sizes)
    AutoModelForCausalLM.from_config(config).to(dtype).save_pretrained(folder)
    texts = [file.read_text() for file in sorted(corpus.iterdir())]
    bpe.train(texts, 310).save(folder / "tokenizer.json")
    return folder


LEFT_OUT = ("model", "model__layers", "model__channels", "model__ffn", "data__vocab_size")
SHORT = dict.fromkeys(LEFT_OUT) | {"max_steps": 2}


@pytest.fixture
def start(overrides: Overrides, folder: Path) -> Overrides:
    """The command line of a tiny run from `folder`."""
    return lambda **changes: overrides(**SHORT | {"init": folder} | changes)


@pytest.fixture
def tuned(trained: Trained, folder: Path) -> Trained:
    """Trains a tiny run from `folder` to its end, and returns the folder of the run."""
    return lambda name="r", **changes: trained(name, **SHORT | {"init": folder} | changes)
