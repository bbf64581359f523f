"""Presets have the size of their name; impossible sizes are refused; counts are exact."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from torch.utils.flop_counter import FlopCounterMode

from longctx.attention import Mask
from longctx.model import GPT, GPTConfig

PRESETS = Path(__file__).parents[2] / "configs" / "model"
REFUSED = yaml.safe_load(Path(__file__).with_name("refused.yaml").read_text())
SMALL = GPTConfig(vocab_size=61, layers=3, channels=24, heads=6, kv_heads=2, ffn=40)


@pytest.mark.parametrize(
    ("name", "parameters"),
    [("124m", 123_587_328), ("350m", 350_405_632), ("1b", 1_235_814_400), ("8b", 8_030_261_248)],
)
def test_presets_have_their_size(name, parameters):
    config = GPTConfig(**yaml.safe_load((PRESETS / f"{name}.yaml").read_text()))
    config.validate()
    assert config.parameters() == parameters


def test_sizes_of_a_saved_model_are_checked_too():
    with pytest.raises(ValueError, match=r"model\.layers=1000000"):
        GPTConfig.of_saved({"layers": 10**6})
    with pytest.raises(ValueError, match=r"model\.recompute"):
        GPTConfig.of_saved({"recompute": "none"})


@pytest.mark.parametrize(("changes", "named"), REFUSED["sizes"])
def test_impossible_sizes_are_refused_by_name(changes, named):
    with pytest.raises(ValueError, match=rf"model\.{named}"):
        GPT(replace(SMALL, **changes), "naive")


VARIANTS = {"tied": False, "qkv_bias": True, "qk_norm": "head", "head_dim": 10, "kv_heads": 6}
VARIANTS |= {"attention_gate": "channel"}


@pytest.mark.parametrize("changes", [{}, *({name: value} for name, value in VARIANTS.items())])
def test_parameters_and_flops_are_those_of_the_module(changes):
    """Under a full mask naive attention computes every pair, which torch counts."""
    config = replace(SMALL, **changes)
    model = GPT(config, "naive")
    assert sum(p.numel() for p in model.parameters()) == config.parameters()
    B, T = 2, 37
    tokens = torch.randint(61, (B, T))
    with FlopCounterMode(display=False) as counter:
        model(tokens, tokens, Mask.full()).backward()
    pairs = Mask.full().pairs(B, T, T) / (B * T)
    assert counter.get_total_flops() == B * T * config.flops_per_token(pairs)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(tokens, tokens, Mask.full())
    assert counter.get_total_flops() == B * T * config.flops_per_token(T) / 3
