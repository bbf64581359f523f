"""What rope=NAME makes of a model and a length, and what it refuses."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml

from longctx.config.rope_config import RopeConfig
from longctx.model import GPT, GPTConfig
from longctx.model.context_extension import extended

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
