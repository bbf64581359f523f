"""The memory of layers that transformers computes: predicted as torch allocates it."""

import functools
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from benchmarks.shapes import settings_of
from longctx.attention import Mask
from longctx.config.asked import workload_of
from longctx.config.layout_config import MemoryConfig
from longctx.config.train_config import TrainConfig
from longctx.hf.layer_memory import Alive, layers_of, measured_layers
from longctx.hf.transformers_model import described
from longctx.model.gpt import build
from longctx.planner.peak_memory import BATCH, OPTIMIZER, _Step, predict
from longctx.spec.step import Workload

SIZES = {"hidden_size": 128, "intermediate_size": 352, "moe_intermediate_size": 64}


@functools.cache
def measured(kind: str) -> Workload:
    """Return a step in bf16 with the measured layers of a model of `kind`."""
    model = described(settings_of(kind) | SIZES | {"num_hidden_layers": 5})
    config = TrainConfig(model=model, precision="bf16", batch_size=1, accumulate=1)
    step = workload_of(config, "cpu", 256)
    return replace(step, validates=False, measured=measured_layers(step, print))


def allocated(step: Workload, trains: bool = True) -> tuple[int, int]:
    """Return the bytes that the layers of a real step save, and its peak without weights."""
    with torch.device("meta"):
        model = build(step.model, step.attention, step.memory).train(trains)
    model.to_empty(device="cpu")
    model.init_weights()
    alive, at = Alive([*model.parameters(), *model.buffers()]), []
    last = [name for name, _ in model.backbone.named_children() if "norm" in name][-1]
    for module in (model.blocks[0], model.backbone.get_submodule(last)):
        module.register_forward_pre_hook(lambda *_: at.append(alive.now))
    tokens: Tensor = torch.randint(301, (step.batch_size, step.seq_len))
    with alive, torch.set_grad_enabled(trains):
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(tokens, tokens, Mask.causal())
        if trains:
            loss.backward()
    return at[1] - at[0], alive.peak


@pytest.mark.parametrize("seq_len", [256, 1024])
@pytest.mark.parametrize("policy", ["fast", "balanced"])
@pytest.mark.parametrize("kind", ["llama", "qwen3_moe", "gpt_neox"])
def test_layers_take_what_is_predicted(kind, policy, seq_len):
    memory = MemoryConfig(policy, loss_chunk=32).filled(policy)
    step = replace(measured(kind), memory=memory, seq_len=seq_len)
    saved, peak = allocated(step)
    predicted, layers = predict(step), step.measured[memory.recompute or ""]
    # of weights, which backward needs if nothing is computed again
    copies = sum(layer.saved.intercept for layer in layers) if policy == "balanced" else 0
    assert _Step(step).saved_by_first[-1] + copies == pytest.approx(saved, rel=0.02)
    beside = 4 * step.model.parameters() + predicted.gpu[OPTIMIZER] + predicted.gpu[BATCH]
    assert predicted.peak - beside == pytest.approx(peak, rel=0.02)


@pytest.mark.parametrize("kind", ["llama", "qwen3_moe", "gpt_neox"])
def test_validation_takes_what_is_predicted(kind):
    memory = MemoryConfig("fast", loss_chunk=32).filled("fast")
    step = replace(measured(kind), memory=memory, seq_len=4096)
    predicted = sum(_Step(step).validation(1, 4096).values()) + predict(step).gpu[BATCH]
    assert predicted == pytest.approx(allocated(step, trains=False)[1], rel=0.06)


def test_a_single_layer_is_measured():
    models = (described(settings_of("llama") | {"num_hidden_layers": n}) for n in (1, 2))
    one, two = (workload_of(TrainConfig(model=model), "cpu", 256) for model in models)
    assert layers_of(one) == layers_of(two)[:1]


def test_layers_that_cannot_be_measured_are_named():
    said: list[str] = []
    step = workload_of(TrainConfig(model=described(settings_of("dbrx"))), "cpu", 256)
    assert measured_layers(step, said.append) == {}
    assert "memory" in said[0] and "nonzero" in said[0]
