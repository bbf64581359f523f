"""Decoding: each prompt is measured by both; bytes are those of weights and cache."""

import torch

from benchmarks.decoding import bytes_of_token
from longctx.config.model_config import GPTConfig
from longctx.model import GPT
from longctx.model.decoder import KVCache


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
