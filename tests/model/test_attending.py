"""Mixers that call softmax attention: kernels compute their formulas, and its gradients. All else
is tried by `longctx check`, see tests/hf/test_check.py.
"""

from collections.abc import Iterator

import pytest
import torch
from torch.autograd.profiler import profile

from longctx.attention import Mask
from longctx.attention.description import AttentionConfig
from longctx.model import GPT
from longctx.model.mixer import Batch
from longctx.parallel.devices import mixers
from longctx.spec.model_config import GPTConfig
from tests.model.test_mixers import SIZES, loaded, small, step
from tests.processes import ROOT

NAMES = ("fox", "xsa", "differential")
MORE = {"window": 4, "attention_gate": "channel", "qk_norm": "head"}


@pytest.fixture(autouse=True)
def examples() -> Iterator[None]:
    """Register the mixers of examples/."""
    fox, xsa, differential = (loaded(ROOT / f"examples/{name}.py") for name in NAMES)
    with fox, xsa, differential:
        yield


def gradients(model: GPT) -> list[torch.Tensor]:
    """Loss and gradients of packed documents, with weights of the mixer that begin at 0 moved."""
    for name, weight in model.named_parameters():
        if name.endswith(("remember", "mix")):
            torch.nn.init.normal_(weight, generator=torch.Generator().manual_seed(2))
    return step(model)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("changes", [{}, MORE])
def test_the_kernel_and_its_gradients_are_the_formula(name, changes):
    found = gradients(small(name, **changes))
    model = small(name, **changes)
    for block in model.blocks:
        block.attention.forward = block.attention.naive
    torch.testing.assert_close(found, gradients(model), rtol=1e-4, atol=1e-5)
    assert all(x.abs().max() > 0 for x in found)
    assert (gradients(small("softmax", **changes))[0] - found[0]).abs() > 1e-3


def test_forgetting_begins_anew_in_each_document():
    model, tokens = small("fox"), torch.arange(2**11).remainder(71)[None]
    with torch.no_grad():
        packed = model(tokens, mask=Mask.documents(torch.arange(2**11)[None] // 32))[:, -32:]
        alone = model(tokens[:, -32:])
    # Sums over all documents would end above 1,024, where fp32 has steps of 2^-13
    assert (packed - alone).abs().max() < 2**-18 * alone.abs().max()


def test_deterministic_sums_are_those_of_cumsum(monkeypatch):
    x, forward = torch.rand(2, 3, 77), small("fox").blocks[0].attention.forward
    expected = x.cumsum(2)
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    monkeypatch.setattr(torch.Tensor, "cumsum", None)  # which raises on a GPU
    torch.testing.assert_close(forward.__func__.__globals__["running_sums"](x), expected)


@pytest.mark.parametrize("name", [*NAMES, "mla"])
def test_graphs_can_hold_their_passes(name):
    layer, x = small(name).blocks[0].attention, torch.randn(1, 37, 48, requires_grad=True)
    layer.attend, batch = lambda q, *_: q * 2, Batch(Mask.causal().bind(1, 37, 37, "cpu"), 1)
    tensors = layer.project(x, *small(name).ropes[0](batch.positions))
    with profile() as calls:
        layer.branch(layer(*tensors, batch), x).sum().backward()
    waits = {"aten::nonzero", "aten::_local_scalar_dense"}  # for a GPU
    assert not waits & {x.name for x in calls.function_events}


def test_settings_that_they_lack_are_refused():
    with pytest.raises(ValueError, match=r"mixer=xsa: it has no model\.sinks=True"):
        small("xsa", sinks=True)
    with pytest.raises(ValueError, match="kv_heads=1: pairs"):
        small("differential", kv_heads=1)
    with pytest.raises(ValueError, match=r"start=1\.0: give a number from 0 up, below 1"):
        small("differential", mixer_options={"differential": {"start": 1.0}})
    with pytest.raises(ValueError, match="fox attention=sdpa: it has no key bias; use attention=f"):
        mixers.check(GPTConfig(mixer=["fox"], **SIZES), AttentionConfig("sdpa"), "cpu", 1, "auto")
