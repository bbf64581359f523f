"""Rotary embedding: transformers' frequencies, exact angles far out, scores that depend on distance
alone.
"""

import math
from pathlib import Path

import pytest
import torch
import yaml
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from longctx.model.rope import Rope, rotate
from longctx.spec.parts import RopeSpec

SCALINGS = yaml.safe_load(Path(__file__).with_name("scalings.yaml").read_text())
CONTEXT = 16384


# Several documents: see evaluation/test_perplexity.py
@pytest.mark.parametrize("name", SCALINGS)
@pytest.mark.parametrize("theta", [10000.0, 1234567.0])
@pytest.mark.parametrize("length", [100, 2049, CONTEXT, CONTEXT + 1, 3 * CONTEXT])
def test_rotation_is_that_of_transformers(name, theta, length):
    sizes = {"hidden_size": 64, "num_attention_heads": 1, "max_position_embeddings": CONTEXT}
    scaled = {"rope_parameters": {"rope_theta": theta, **SCALINGS[name]}}
    rotary, positions = LlamaRotaryEmbedding(LlamaConfig(**sizes, **scaled)), torch.arange(length)
    theirs = rotary(torch.zeros(1), positions[None])
    rope, own = Rope(RopeSpec(64, theta, SCALINGS[name], CONTEXT)), None
    if rope.follows_length:
        table, number = rope.of_documents([length], length)
        own = table[number][None]
    ours = rope(positions[None], own)
    assert torch.equal(rope.frequencies if own is None else own[0, 0], rotary.inv_freq)
    assert rope.attention_factor == rotary.attention_scaling
    for a, b in zip(ours, theirs, strict=True):  # which has angles in fp32
        assert (a[:, :, 0] - b[..., :32]).abs().max() < length * 2**-23 * rope.attention_factor


@pytest.mark.parametrize("name", SCALINGS)
def test_cos_and_sin_are_right_at_a_million_positions(name):
    rope = Rope(RopeSpec(64, 500000.0, SCALINGS[name], CONTEXT))
    position = 1_000_003
    cos, sin = rope(torch.tensor([[position]]))
    angles = [position * frequency for frequency in rope.frequencies.double().tolist()]
    for found, function in ((cos, math.cos), (sin, math.sin)):
        expected = [function(angle) * rope.attention_factor for angle in angles]
        assert found[0, 0, 0].tolist() == pytest.approx(expected, abs=2e-7)


def test_no_document_is_longer_than_the_row_without_padding():
    rope = Rope(RopeSpec(64, 500000.0, SCALINGS["dynamic"], 64))
    table, number = rope.of_documents([104, 104], 100)
    expected, _ = rope.of_documents([100], 100)
    assert torch.equal(table, expected)
    assert number.tolist() == [0] * 208


def test_frequencies_stay_fp32_in_a_16_bit_module():
    rope = Rope(RopeSpec(8, 10000.0, {}, None)).bfloat16()
    cos, _ = rope(torch.arange(4)[None])
    assert rope.frequencies.dtype == cos.dtype == torch.float32
    x = torch.randn(1, 4, 2, 8, dtype=torch.bfloat16)
    assert rotate(x, *rope(torch.arange(4)[None])).dtype == torch.bfloat16


def test_a_model_made_on_the_meta_device_has_its_frequencies():
    with torch.device("meta"):
        ropes = [Rope(RopeSpec(64, 5e5, scaling, CONTEXT)) for scaling in SCALINGS.values()]
    assert all(rope.frequencies.device.type == "cpu" for rope in ropes)
