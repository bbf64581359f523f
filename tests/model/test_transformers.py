"""Logits and losses equal those of transformers' Llama, Qwen2 and Qwen3 on random weights, mapped
tensor by tensor.
"""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from longctx.model import GPT, GPTConfig

SIZES: dict[str, Any] = {
    "vocab_size": 71,
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "intermediate_size": 80,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "attn_implementation": "eager",
}
ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 5000.0}}
FAMILIES = {
    "llama": (
        LlamaForCausalLM,
        LlamaConfig(**SIZES, **ROPE, num_key_value_heads=6, tie_word_embeddings=False),
        {},
    ),
    "llama, grouped": (
        LlamaForCausalLM,
        LlamaConfig(**SIZES, **ROPE, num_key_value_heads=2, tie_word_embeddings=False),
        {},
    ),
    "llama, tied": (
        LlamaForCausalLM,
        LlamaConfig(**SIZES, **ROPE, num_key_value_heads=3, tie_word_embeddings=True),
        {},
    ),
    "llama, wide heads": (
        LlamaForCausalLM,
        LlamaConfig(**SIZES, **ROPE, num_key_value_heads=1, head_dim=20, tie_word_embeddings=True),
        {},
    ),
    "qwen2": (
        Qwen2ForCausalLM,
        Qwen2Config(**SIZES, **ROPE, num_key_value_heads=2, tie_word_embeddings=True),
        {"qkv_bias": True},
    ),
    "qwen3": (
        Qwen3ForCausalLM,
        Qwen3Config(**SIZES, **ROPE, num_key_value_heads=2, head_dim=16, tie_word_embeddings=False),
        {"qk_norm": "head"},
    ),
}


def mapped(theirs: dict[str, Tensor], layers: int, tied: bool) -> dict[str, Tensor]:
    """Tensors of a Hugging Face state dict under our names; every one of theirs is used once."""
    theirs = dict(theirs)
    ours = {
        "embed.weight": theirs.pop("model.embed_tokens.weight"),
        "norm.weight": theirs.pop("model.norm.weight"),
    }
    head = theirs.pop("lm_head.weight", None)
    if not tied:
        ours["head.weight"] = head
    names = {
        "attention_norm.weight": ["input_layernorm.weight"],
        "mlp_norm.weight": ["post_attention_layernorm.weight"],
        "attention.qkv.weight": [f"self_attn.{x}_proj.weight" for x in "qkv"],
        "attention.qkv.bias": [f"self_attn.{x}_proj.bias" for x in "qkv"],
        "attention.q_norm.weight": ["self_attn.q_norm.weight"],
        "attention.k_norm.weight": ["self_attn.k_norm.weight"],
        "attention.out.weight": ["self_attn.o_proj.weight"],
        "mlp.gate_up.weight": ["mlp.gate_proj.weight", "mlp.up_proj.weight"],
        "mlp.down.weight": ["mlp.down_proj.weight"],
    }
    for n in range(layers):
        for name, sources in names.items():
            if f"model.layers.{n}.{sources[0]}" in theirs:
                ours[f"blocks.{n}.{name}"] = torch.cat(
                    [theirs.pop(f"model.layers.{n}.{source}") for source in sources]
                )
    assert not theirs
    return ours


@pytest.mark.parametrize(
    ("family", "attention"),
    [
        *((family, "flash") for family in FAMILIES),
        ("llama, grouped", "naive"),
        *(
            pytest.param(family, "naive", marks=pytest.mark.slow)
            for family in FAMILIES
            if family != "llama, grouped"
        ),
    ],
)
def test_logits_loss_and_gradients_equal_those_of_transformers(family: str, attention: str) -> None:
    build, theirs, changes = FAMILIES[family]
    torch.manual_seed(0)
    reference = build(theirs).eval()
    for parameter in (
        reference.parameters()
    ):  # norms and biases too: their initial ones and zeros would hide mistakes
        torch.nn.init.normal_(parameter, mean=0.2 if parameter.ndim == 1 else 0.0, std=0.2)
    config = GPTConfig(
        vocab_size=theirs.vocab_size,
        layers=theirs.num_hidden_layers,
        channels=theirs.hidden_size,
        heads=theirs.num_attention_heads,
        kv_heads=theirs.num_key_value_heads,
        head_dim=getattr(theirs, "head_dim", None),
        ffn=theirs.intermediate_size,
        rope_theta=5000.0,
        norm_eps=theirs.rms_norm_eps,
        tied=theirs.tie_word_embeddings,
        **changes,
    )
    model = GPT(config, attention)
    model.load_state_dict(mapped(reference.state_dict(), config.layers, config.tied), strict=True)
    tokens = torch.randint(config.vocab_size or 0, (2, 301))
    expected = reference(tokens).logits
    error = (model(tokens) - expected).abs().max() / expected.abs().max()
    assert error < 1e-5
    loss = model(tokens[:, :-1], tokens[:, 1:])
    expected_loss = reference(tokens, labels=tokens).loss
    torch.testing.assert_close(loss, expected_loss, rtol=1e-5, atol=0)
    loss.backward()
    expected_loss.backward()
    want = mapped({n: p.grad for n, p in reference.named_parameters()}, config.layers, config.tied)
    for name, parameter in model.named_parameters():
        error = (parameter.grad - want[name]).abs().max() / want[name].abs().max()
        assert error < 1e-3, name
