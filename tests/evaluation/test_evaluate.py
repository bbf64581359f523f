"""How devices share a model is decided for the longest forward that an evaluation runs."""

from functools import partial
from typing import Any

import pytest
import torch

from longctx.config.eval_config import EvalConfig, PasskeyConfig, RulerConfig
from longctx.config.layout_config import ContextConfig, StrategyConfig
from longctx.evaluation.evaluate import (
    bytes_of_copy,
    choose_strategy,
    decisive,
    largest_forward,
    text_lengths,
)
from longctx.spec.hardware import Chip, Machine
from longctx.spec.model_config import GPTConfig

GIB = 2**30
LARGE = GPTConfig(  # the shape of Llama 3.1 8B, 15.0 GiB in bf16
    layers=32, heads=32, kv_heads=8, channels=4096, ffn=14336, vocab_size=128256, tied=False
)


def evaluation(lengths: list[int] | None = None, kind: str = "ruler", **keys: Any) -> EvalConfig:
    """RULER or pass keys with texts of these lengths; neither without them."""
    group = {"ruler": RulerConfig, "passkey": PasskeyConfig}[kind]
    texts = {} if lengths is None else {kind: group(True, lengths)}
    return EvalConfig("runs/a", **texts, **keys)


def strategy_of(config: EvalConfig) -> str:
    """The strategy on devices with 80 GiB for tensors."""
    gpu = Chip("H100", 80.8 / 0.985 * GIB, None, None, 0.0)
    machine = Machine(config.devices, gpu, 2.0**40)
    lengths = text_lengths(config, config.seq_len or 8192)
    _, rows = largest_forward(config, lengths, 8, "cuda")
    needed = partial(bytes_of_copy, config, LARGE, torch.bfloat16, rows, max(lengths))
    return choose_strategy(config, machine, "cuda", needed)


@pytest.mark.parametrize(
    ("config", "strategy"),
    [
        (evaluation([4096], devices=2), "ddp"),
        (evaluation([4096, 370_000], devices=2), "fsdp"),
        (evaluation([131_072], devices=1), "none"),
        (evaluation(devices=2), "ddp"),
        (evaluation([2_000_000], "passkey", devices=8, context=ContextConfig(4)), "fsdp"),
        (evaluation(devices=2, strategy=StrategyConfig("fsdp")), "fsdp"),
    ],
)
def test_devices_hold_slices_if_copies_do_not_fit(config, strategy):
    assert strategy_of(config) == strategy


def test_device_and_batch_size_decide_nothing():
    assert decisive(EvalConfig(device="cpu", batch_size=3)) == decisive(EvalConfig())
    assert decisive(EvalConfig(documents=1)) != decisive(EvalConfig())
