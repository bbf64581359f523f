"""What is decided before an evaluation: how devices share a model."""

import pytest
import torch

from longctx.config.eval_config import EvalConfig
from longctx.config.layout_config import StrategyConfig
from longctx.evaluation.evaluate import choose_strategy
from longctx.spec.hardware import Chip, Machine
from longctx.spec.model_config import GPTConfig

GIB = 2**30
LARGE = GPTConfig(  # the shape of Llama 3.1 8B, 15.0 GiB in bf16
    layers=32, heads=32, kv_heads=8, channels=4096, ffn=14336, vocab_size=128256, tied=False
)


@pytest.mark.parametrize(
    ("gib", "devices", "keys", "strategy"),
    [
        (80, 2, {}, "ddp"),
        (24, 2, {}, "fsdp"),
        (24, 1, {}, "none"),
        (80, 2, {"strategy": StrategyConfig("fsdp")}, "fsdp"),
    ],
)
def test_devices_hold_slices_if_copies_do_not_fit(gib, devices, keys, strategy):
    config = EvalConfig("runs/a", devices=devices, **keys)
    machine = Machine(devices, Chip("H100", gib * GIB, None, None, 0.0), 2.0**40)
    assert choose_strategy(config, LARGE, machine, torch.bfloat16) == strategy
