"""Rotary embedding: transformers' frequencies, exact angles far out, scores that depend on distance
alone; what rope=NAME makes of a model and a length.
"""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from longctx.config.rope_config import RopeConfig
from longctx.model import GPT, GPTConfig
from longctx.model.context_extension import extended
from longctx.model.rope import Rope, rotate
from longctx.spec.parts import RopeSpec

SCALINGS = yaml.safe_load(Path(__file__).with_name("scalings.yaml").read_text())
CONTEXT = 16384


# Several documents: see evaluation/test_perplexity.py
@pytest.mark.parametrize("name", SCALINGS)
@pytest.mark.parametrize("theta", [10000.0, 1234567.0])
@pytest.mark.parametrize("length", [100, 2048, 2049, CONTEXT, CONTEXT + 1, 3 * CONTEXT])
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


# rope=NAME

PLAIN = GPTConfig(
    vocab_size=61, layers=2, channels=32, heads=4, kv_heads=2, ffn=40, rope_theta=1e4, context=2048
)
TABLES = yaml.safe_load(Path(__file__).with_name("extension.yaml").read_text())


@pytest.mark.parametrize(("rope", "seq_len", "scaling", "context"), TABLES["plain"])
def test_a_plain_model(rope, seq_len, scaling, context):
    stretched, how = extended(PLAIN, RopeConfig(**rope), seq_len)
    assert (stretched.rope_scaling, stretched.context) == (scaling, context)
    assert stretched.rope_theta == rope.get("theta", 1e4)
    assert scaling.get("rope_type", "") in how
    assert replace(stretched, rope_scaling={}, context=2048, rope_theta=1e4) == PLAIN
    GPT(stretched, "naive")(torch.zeros(1, 5, dtype=torch.int64))


def test_a_given_factor_is_known_to_the_next_run():
    first, _ = extended(PLAIN, RopeConfig("linear", factor=4), 4096)
    _, how = extended(first, RopeConfig("auto"), 16384)
    assert "linear" in how and "× 8" in how


@pytest.mark.parametrize(("trained", "seq_len"), [(1000, 1001), (8192, 100000), (6144, 32768)])
def test_the_advised_factor_reaches_any_length(trained, seq_len):
    model = replace(PLAIN, context=trained)
    with pytest.raises(ValueError, match=r"give rope\.factor=") as caught:
        extended(model, RopeConfig("yarn", factor=1.0), seq_len)
    advised = float(str(caught.value).partition("give rope.factor=")[2].split()[0])
    for factor in (None, advised):
        assert extended(model, RopeConfig("yarn", factor=factor), seq_len)[0].context == seq_len


@pytest.mark.parametrize(("scaling", "factor", "kept"), TABLES["continued"])
def test_auto_continues_the_scaling_of_the_weights(scaling, factor, kept):
    model = replace(PLAIN, rope_scaling=scaling)
    stretched, _ = extended(model, RopeConfig("auto"), 8192)
    expected = kept | {"rope_type": scaling["rope_type"], "factor": factor}
    assert expected.items() <= stretched.rope_scaling.items()
    assert extended(model, RopeConfig("auto"), 2048)[0] == model


def test_layers_without_positions_are_not_stretched():
    model = replace(PLAIN, nope_layers=list(range(PLAIN.layers)))
    how = "auto: kept, its layers take any length"
    assert extended(model, RopeConfig("auto"), 8192) == (model, how)


@pytest.mark.parametrize(("model", "rope", "message"), TABLES["refused"])
def test_impossible_rope_is_refused_by_key(model, rope, message):
    with pytest.raises(ValueError, match=message) as caught:
        extended(replace(PLAIN, **model), RopeConfig(**rope), 8192)
    assert "\n" not in str(caught.value)
