"""What rope=NAME makes of a model and a length, and what it refuses."""

from dataclasses import replace

import pytest
import torch

from longctx.config.rope_config import ORIGINAL, RopeConfig
from longctx.model import GPT, GPTConfig
from longctx.model.context_extension import extended

PLAIN = GPTConfig(
    vocab_size=61, layers=2, channels=32, heads=4, kv_heads=2, ffn=40, rope_theta=1e4, context=2048
)
LLAMA3 = {
    **{"rope_type": "llama3", "factor": 8.0, ORIGINAL: 256},
    **{"low_freq_factor": 1.0, "high_freq_factor": 4.0},
}
YARN = {"rope_type": "yarn", "factor": 2.0, ORIGINAL: 1024, "beta_fast": 16}


BETA = {"rope_type": "yarn", "factor": 4, ORIGINAL: 2048, "beta_slow": 2}


@pytest.mark.parametrize(
    ("rope", "seq_len", "scaling", "context"),
    [
        ({"type": "keep"}, 9000, {}, 2048),
        ({"type": "auto"}, 2048, {}, 2048),
        ({"type": "auto"}, 16384, {"rope_type": "yarn", "factor": 8.0, ORIGINAL: 2048}, 16384),
        ({"type": "linear"}, 4096, {"rope_type": "linear", "factor": 2.0}, 4096),
        ({"type": "dynamic"}, 4096, {"rope_type": "dynamic", "factor": 2.0}, 2048),
        ({"type": "yarn", "factor": 4, "options": {"beta_slow": 2}}, 4096, BETA, 8192),
        ({"type": "llama3", "original": 256}, 4096, LLAMA3 | {"factor": 16.0}, 4096),
        ({"type": "abf", "theta": 5e5}, 8192, {}, 8192),
    ],
)
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


@pytest.mark.parametrize(
    ("scaling", "factor", "kept"),
    [
        (YARN, 8.0, {"beta_fast": 16, ORIGINAL: 1024}),
        (LLAMA3, 32.0, {"high_freq_factor": 4.0, ORIGINAL: 256}),
        ({"rope_type": "linear", "factor": 2.0}, 8.0, {}),
        ({"rope_type": "dynamic", "factor": 2.0}, 2.0, {}),
    ],
)
def test_auto_continues_the_scaling_of_the_weights(scaling, factor, kept):
    model = replace(PLAIN, rope_scaling=scaling)
    stretched, _ = extended(model, RopeConfig("auto"), 8192)
    kept |= {"rope_type": scaling["rope_type"], "factor": factor}
    assert kept.items() <= stretched.rope_scaling.items()
    assert extended(model, RopeConfig("auto"), 2048)[0] == model


FACTORS = {"short_factor": [1], "long_factor": [1]}
TINY_HEADS = {"heads": 16, "kv_heads": 16}
LONGROPE = {"rope_scaling": {"rope_type": "longrope"}}


@pytest.mark.parametrize(
    ("model", "rope", "message"),
    [
        ({}, {"type": "yarn", "factor": 2.0}, "rope.factor=2: stretches 2,048 tokens to 4,096"),
        ({"context": 16384}, {"type": "yarn"}, "16,384 tokens hold seq_len=8192 already"),
        ({"context": None}, {"type": "yarn"}, "rope=yarn: the length that .* is not known"),
        ({}, {"type": "yrn"}, "yrn: one of keep, auto, abf"),
        ({}, {"type": "abf"}, "rope=abf: needs the new base"),
        ({}, {"type": "yarn", "theta": 1e6}, "rope.theta=1000000.0: does nothing"),
        ({}, {"type": "auto", "factor": 2.0}, "rope.factor=2.0: not a key of rope=auto"),
        ({}, {"type": "yarn", "factor": float("nan")}, "rope.factor=nan: a number from 1"),
        ({}, {"type": "linear", "options": {"x": 3}}, "rope.options.x=3: not a key of rope"),
        ({}, {"type": "yarn", "options": {"beta_fast": "x"}}, "rope.options.beta_fast=x must be"),
        ({}, {"type": "longrope"}, "rope.options.short_factor is missing"),
        ({}, {"type": "longrope", "options": FACTORS}, "a list of 4 numbers"),
        (TINY_HEADS, {"type": "dynamic"}, "needs heads of more than 2 channels"),
        (LONGROPE, {"type": "auto"}, "longrope's factors were searched for 2,048 tokens"),
    ],
)
def test_impossible_rope_is_refused_by_key(model, rope, message):
    with pytest.raises(ValueError, match=message) as caught:
        extended(replace(PLAIN, **model), RopeConfig(**rope), 8192)
    assert "\n" not in str(caught.value)
