"""A benchmark run on this machine, and its result."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.words import main
from tests.data.chat_templates import CHATML, write, write_tokenizer


@pytest.fixture
def result_of(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    """Run a benchmark and return what it writes."""

    def run(name: str, *words: str) -> Any:
        assert main([name, *words, f"out={tmp_path}/result"]) == 0, capsys.readouterr().err
        return json.loads((tmp_path / "result.json").read_text())

    return run


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of a random chat model for 512 tokens; what is cached is the test's own."""
    monkeypatch.setenv("LONGCTX_CACHE", str(tmp_path / "cache"))
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 4, "max_position_embeddings": 512}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=300, **sizes, **heads))
    model.lm_head.weight.data[:3] = 0  # it writes no special tokens
    model.save_pretrained(tmp_path / "model")
    write_tokenizer(tmp_path / "model")
    write(tmp_path / "model", CHATML)
    return tmp_path / "model"
