"""Decoding with a cache: greedy text is that of transformers' `generate` token by token, and logits
are those of a forward over the whole text. Sampling follows the rules of transformers.
"""

import math
from typing import Any

import pytest
import torch
from transformers import (
    LlamaConfig,
    PreTrainedConfig,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from longctx.hf.model_folder import pretrained
from longctx.model import GPT
from longctx.model.decoder import Decoder, Sampler, continuations
from longctx.spec.model_config import GPTConfig
from tests.hf.families.parity import ROPES, SIZES, reference
from tests.hf.families.test_families import family_tests
from tests.inputs import DEVICE, check_decoding

LENGTHS = (1, 13, 61)  # of the prompts of a batch; the last text grows beyond the 64 positions
NEW = 19
# Layers without positions, parallel ones, with windows or a state: a configuration whose texts vary
KINDS = {"smollm3": 5, "gpt_neox": 3, "starcoder2": 2, "cohere2": 4, "mistral4": 0}
KINDS |= {"qwen2": 3, "qwen3_5_text": 1, "gemma4_text": 0}
GROUPED: dict[str, Any] = {**SIZES, "num_key_value_heads": 2}


MODELS: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**GROUPED, tie_word_embeddings=True),
    **{x: family_tests(x)().config(n, tie_word_embeddings=False) for x, n in KINDS.items()},
    **{
        name: LlamaConfig(**GROUPED | {"rope_parameters": {"rope_theta": 5000.0} | rope})
        for name, rope in ROPES.items()
    },
}


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(1, 301, (n,), generator=generator).tolist() for n in LENGTHS]


def greedy(decoder: Decoder, texts: list[list[int]]) -> list[list[int]]:
    steps = continuations(decoder, texts, NEW, lambda logits: logits.argmax(-1))
    return [[x for x in text if x is not None] for text in zip(*steps, strict=True)]


@pytest.mark.parametrize("name", MODELS)
def test_greedy_text_is_that_of_transformers(name, tmp_path):
    theirs = reference(MODELS[name])
    theirs.save_pretrained(tmp_path)
    settings = {"do_sample": False, "max_new_tokens": NEW, "eos_token_id": None, "pad_token_id": 0}
    expected = [
        theirs.generate(torch.tensor([text]), **settings)[0, len(text) :].tolist()
        for text in prompts()
    ]
    model = pretrained(tmp_path)
    assert greedy(Decoder(model, 3, max(LENGTHS) + NEW), prompts()) == expected
    assert len({token for text in expected for token in text}) > 3


def small(**changes: Any) -> GPT:
    torch.manual_seed(0)
    sizes = {"layers": 2, "channels": 48, "heads": 6, "kv_heads": 2, "ffn": 80, "vocab_size": 71}
    model = GPT(GPTConfig(**sizes | {"init_std": 0.3} | changes), attention="naive").eval()
    return model.requires_grad_(False)


@pytest.mark.usefixtures("interpreter")
def test_split_keys_give_the_logits_of_a_whole_forward():
    model = small(window=5, head_dim=16, layers=1).to(DEVICE)
    texts = torch.randint(71, (2, 12), generator=torch.Generator().manual_seed(1)).to(DEVICE)
    decoder = Decoder(model, 2, 12)
    assert decoder.splits_keys
    check_decoding(decoder, texts, (7, 4), 3)


LOGITS = torch.randn(3, 50, generator=torch.Generator().manual_seed(0)) * 3


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"),
    [(1.0, None, None), (0.7, 5, None), (1.5, None, 0.9), (0.8, 20, 0.6), (1.0, 99, 1.0)],
)
def test_probabilities_are_those_of_transformers(temperature, top_k, top_p):
    rules = [TemperatureLogitsWarper(temperature), TopKLogitsWarper(min(top_k or 50, 50))]
    logits = LOGITS
    for rule in [*rules, TopPLogitsWarper(top_p or 1.0)]:
        logits = rule(torch.zeros(3, 1, dtype=torch.int64), logits)
    actual = Sampler(range(3), temperature, top_k, top_p).probabilities(LOGITS)
    assert torch.equal(actual > 0, logits.isfinite())
    torch.testing.assert_close(actual, logits.softmax(-1))


def test_choices_follow_the_probabilities():
    sampler = Sampler(range(4000), 0.8, top_k=6)
    logits = LOGITS[:1].expand(4000, -1)
    counts = torch.bincount(sampler(logits), minlength=50) / 4000
    p = sampler.probabilities(LOGITS[:1])[0]
    assert not counts[p == 0].any()
    assert (counts - p).abs().max() < 0.04  # five standard deviations


def test_a_text_is_chosen_alike_whatever_is_beside_it():
    together, alone = Sampler([0, 1, 2], 1.0, seed=5), Sampler([1], 1.0, seed=5)
    other = Sampler([1], 1.0, seed=6)
    beside = [together(LOGITS)[1].item() for _ in range(20)]
    assert beside == [alone(LOGITS[1:2]).item() for _ in range(20)]
    assert beside != [other(LOGITS[1:2]).item() for _ in range(20)]


def test_odd_logits_and_temperatures_choose_a_token_of_the_vocabulary():
    for logits in (torch.full((3, 5), math.nan), torch.full((3, 5), math.inf), LOGITS):
        for temperature in (1e-38, 0.8, 100.0):
            chosen = Sampler(range(3), temperature)(logits)
            assert ((chosen >= 0) & (chosen < logits.shape[-1])).all()
    assert Sampler([0], 1e-38)(torch.tensor([[50.0, 60.0, 1.0]])).item() == 1


@pytest.mark.parametrize("how", [(0.0,), (2.0, 1), (2.0, None, 1e-6)])
def test_the_likeliest_token_is_chosen_if_it_is_alone(how):
    assert torch.equal(Sampler(range(3), *how)(LOGITS), LOGITS.argmax(-1))


@pytest.mark.gpu
def test_a_graph_computes_what_single_launches_do():
    model = small(head_dim=16, window=9).cuda()
    texts = [[token % 71 for token in text] for text in prompts()]
    plain, graph = (Decoder(model, 3, 80, graphs) for graphs in (False, True))
    expected = greedy(plain, texts)
    assert greedy(graph, texts) == expected
    assert greedy(graph, texts) == expected  # the same graph after another prefill
