"""Benchmarks that run models of their own, tiny and on a CPU."""

import json

import pytest
import torch

from benchmarks.decoding import bytes_of_token
from benchmarks.words import main
from longctx.model import GPT
from longctx.model.decoder import KVCache
from longctx.spec.model_config import GPTConfig

# Decoding


def test_both_are_measured_after_each_prompt(result_of):
    sizes = ["model=tiny", "model.layers=1", "model.channels=32", "model.ffn=48"]
    sizes += ["model.vocab_size=99", "prompts=5,9", "new=2", "repeats=1", "rows=2"]
    rows = result_of("decoding", *sizes)["results"]
    expected = [(prompt, peer) for prompt in (5, 9) for peer in ("longctx", "transformers")]
    assert [(row["prompt"], row["peer"]) for row in rows] == expected
    for row in rows:
        assert row["first_over_forward"] == row["first_token_ms"] / row["forward_ms"]
        assert row["tokens_per_second"] > 0
        assert row["gb_per_token"] == rows[0 if row["prompt"] == 5 else 2]["gb_per_token"]


def test_a_token_reads_weights_and_cache_once():
    sizes = {"layers": 2, "channels": 32, "heads": 4, "kv_heads": 2, "ffn": 48, "vocab_size": 99}
    tied, own = (GPTConfig(**sizes, tied=tied) for tied in (True, False))
    cache = KVCache.bytes_of(tied, 3, 70, torch.bfloat16)
    weights = sum(2 * weight.numel() for weight in GPT(tied).parameters())
    # Of `own` an lm_head, and one row of the embedding
    assert bytes_of_token(tied, 3, 70, 2) == bytes_of_token(own, 3, 70, 2) == weights + cache
    windowed = GPTConfig(**sizes, tied=True, window=7)
    assert bytes_of_token(windowed, 3, 70, 2) == weights + cache // 10


# A card


@pytest.mark.slow
@pytest.mark.no_gpu
def test_a_small_card_is_measured(tmp_path):
    shape = ["model=tiny", "model.layers=1", "model.vocab_size=300", "compile=false", "workers=0"]
    own = ["lengths=32,64", "tokens=64", "head_sizes=16", "channels=32", "minutes=1"]
    assert main(["card", *own, f"out={tmp_path}", *shape]) == 0
    result = json.loads((tmp_path / "cpu.json").read_text())
    assert len({row["mask"] for row in result["attention"]}) == 3
    ran = [row for row in result["attention"] if "skipped" not in row]
    assert {row["backend"] for row in ran} == {"flash", "sdpa-flash"}
    assert all(row["forward_spread"] >= 0 for row in ran)
    points = [(row["tokens"], row["backend"]) for row in result["steps"]]
    assert points == [(n, name) for n in (32, 64) for name in ("flash", "sdpa", "naive")]
    for row in result["steps"]:
        assert row["failed"] is None
        assert row["tokens_per_second"] == pytest.approx(64e3 / row["ms"])


# Preferences


@pytest.mark.slow
@pytest.mark.parametrize(
    ("parts", "cases"),
    [
        (["ours"], ["longctx"]),
        (["lora", "whole"], ["dpo cached", "cross_entropy", "dpo step", "dpo cached"]),
        (["packed"], ["nf4", "fp8"]),
        (["speed", "trl"], ["longctx", *["trl sdpa"] * 4, "trl sdpa, longest"]),
    ],
)
def test_preferences_are_measured(result_of, parts, cases):
    sizes = ["lengths=32", "shortest=16", "longest=64", "step=16", "side=32", "layers=2"]
    own = [f"parts={','.join(parts)}", "tiny=true", "attentions=sdpa"]
    rows = result_of("preferences", *own, *sizes)["results"]
    measured = [row for row in rows if row["case"] != "all of it"]
    assert [row["case"] for row in measured] == cases
    assert not any(row.get("failed") for row in measured)
