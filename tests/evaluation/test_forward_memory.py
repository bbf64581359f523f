"""How devices share a model is decided for the longest forward that an evaluation runs."""

from typing import Any

import pytest
import torch

from longctx.attention.description import AttentionConfig
from longctx.config.eval_config import EvalConfig, PasskeyConfig, RulerConfig
from longctx.config.model_config import GPTConfig
from longctx.config.parallel_config import ContextConfig
from longctx.evaluation import forward_memory
from longctx.evaluation.forward_memory import Forward, largest_forward, text_lengths

GIB = 2**30
LARGE = GPTConfig(  # the shape of Llama 3.1 8B, 15.0 GiB in bf16
    layers=32, heads=32, kv_heads=8, channels=4096, ffn=14336, vocab_size=128256, tied=False
)
SEQ_LEN = 8192


def forward_of(config: EvalConfig, rows: int = 8) -> Forward:
    lengths = text_lengths(config, config.seq_len or SEQ_LEN)
    return largest_forward(config, lengths, rows, "cuda")


def of_ruler(lengths: list[int] | None, **keys: Any) -> EvalConfig:
    keys = {"devices": 2, "ruler": RulerConfig(True, lengths)} | keys
    return EvalConfig("runs/a", **keys)


def strategy_of(config: EvalConfig, there: float = 80 * GIB) -> str:
    forward = forward_of(config)
    return forward_memory.choose_strategy(config, LARGE, torch.bfloat16, forward, there)


def check(config: EvalConfig, there: float, strategy: str = "fsdp") -> None:
    forward = forward_of(config)
    forward_memory.check_fits(config, LARGE, torch.bfloat16, forward, strategy, there, "cuda")


def test_a_forward_is_as_long_as_the_longest_text() -> None:
    assert forward_of(of_ruler([4096, 300_000])) == Forward("ruler.lengths", 1, 300_000, 1, True)
    assert forward_of(of_ruler(None)) == Forward("seq_len", 8, SEQ_LEN, 1, True)
    passkey = PasskeyConfig(True, [131_072, 2048])
    shared = EvalConfig("runs/a", passkey=passkey, devices=4, context=ContextConfig(2))
    forward = forward_of(shared)
    assert forward == Forward("passkey.lengths", 1, 131_072, 2, False)
    assert forward.tokens == 65_536
    plain = EvalConfig("runs/a", seq_len=5000)
    assert forward_of(plain, rows=3) == Forward("seq_len", 3, 5000, 1, False)


def test_the_cache_is_counted_to_the_byte() -> None:
    config = of_ruler([100_000])
    counted = forward_memory.needed(config, LARGE, torch.bfloat16, forward_of(config), "ddp")
    assert counted.cache == 100_000 * 2 * 32 * 8 * 128 * 2
    assert counted.weights == pytest.approx(2 * LARGE.parameters(), rel=0.1)  # embedding in fp32
    plain = EvalConfig("runs/a")
    assert not forward_memory.needed(plain, LARGE, torch.bfloat16, forward_of(plain), "ddp").cache


def test_slices_where_a_copy_does_not_fit_beside_the_cache_of_the_longest_text() -> None:
    assert strategy_of(of_ruler([4096])) == "ddp"
    assert strategy_of(of_ruler([4096, 524_288])) == "fsdp"
    assert strategy_of(of_ruler([524_288], devices=1)) == "none"
    assert strategy_of(EvalConfig("runs/a", devices=2)) == "ddp"
    longest = EvalConfig("runs/a", devices=2, passkey=PasskeyConfig(True, [2_000_000]))
    assert strategy_of(longest) == "fsdp"


def test_what_cannot_fit_is_refused_with_the_key_that_decides() -> None:
    check(of_ruler([131_072]), 80 * GIB)
    with pytest.raises(ValueError, match=r"^ruler\.lengths=\[4194304\].*shorter ruler\.lengths"):
        check(of_ruler([4096, 4_194_304]), 80 * GIB)
    with pytest.raises(ValueError, match=r"^seq_len=8192.*strategy=fsdp"):
        check(EvalConfig("runs/a"), 8 * GIB, "ddp")
    naive = EvalConfig("runs/a", seq_len=100_000, attention=AttentionConfig("naive"))
    with pytest.raises(ValueError, match=r"^seq_len=100000.*attention=flash"):
        check(naive, 80 * GIB)
