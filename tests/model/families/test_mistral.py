"""Mistral: a window in every layer, in those that layer_types names, or in none."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, MinistralConfig, MistralConfig

from longctx.model.export import export
from longctx.model.huggingface import pretrained, read_config
from tests.model.families.parity import (
    SIZES,
    FamilyTests,
    check_computation,
    reference,
    write_tokenizer,
)


class TestMistral(FamilyTests):
    config_class = MistralConfig
    cases = {
        "no window": MistralConfig(
            **SIZES, num_key_value_heads=2, sliding_window=None, head_dim=16
        ),
        "window": MistralConfig(**SIZES, num_key_value_heads=2, sliding_window=9, head_dim=16),
    }
    stretched = {"num_key_value_heads": 2, "sliding_window": 40}
    # without windows it goes out as the Llama that it is
    other_class = ("no window",)


@pytest.mark.parametrize(
    ("layer_types", "window", "window_layers"),
    [
        (["sliding_attention", "full_attention"], 9, [0]),
        (["sliding_attention"] * 2, 9, None),
        (["full_attention"] * 2, None, None),
    ],
)
def test_windows_follow_layer_types(
    layer_types: list[str], window: int | None, window_layers: list[int] | None, tmp_path: Path
) -> None:
    # transformers opens a mistral folder with layer_types as Ministral
    ministral = MinistralConfig(**SIZES, num_key_value_heads=2, head_dim=8, sliding_window=9)
    reference(ministral).save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    content = json.loads(file.read_text())
    content |= {"model_type": "mistral", "layer_types": layer_types}
    file.write_text(json.dumps(content))
    config = read_config(tmp_path)
    assert (config.window, config.window_layers) == (window, window_layers)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").eval()
    check_computation(theirs, tmp_path)
    write_tokenizer(tmp_path)
    export(pretrained(tmp_path), tmp_path, tmp_path / "out")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out", attn_implementation="eager")
    tokens = torch.randint(301, (2, 101))
    assert torch.equal(again.eval()(tokens).logits, theirs(tokens).logits)


def test_sliding_layer_types_without_a_window_are_refused(tmp_path: Path) -> None:
    config = {**SIZES, "model_type": "mistral", "num_key_value_heads": 2, "sliding_window": None}
    config["layer_types"] = ["full_attention", "sliding_attention"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"layer_types\[1\]=sliding_attention is not"):
        read_config(tmp_path)
