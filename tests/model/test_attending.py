"""Mixers that call softmax attention: kernels compute their formulas, and its gradients; documents
are alone. `longctx check` tries ranks and recomputation, see tests/hf/test_check.py.
"""

from collections.abc import Iterator

import pytest
import torch

from longctx.model import GPT
from longctx.model.decoder import Decoder
from longctx.model.mixer import Batch
from longctx.spec.model_config import GPTConfig
from tests.model.test_mixers import LENGTHS, SIZES, loaded, packed, small, step
from tests.processes import ROOT

NAMES = ("fox", "xsa", "differential")


@pytest.fixture(autouse=True)
def examples() -> Iterator[None]:
    """Register the mixers of examples/."""
    with loaded(ROOT / "examples/xsa.py"), loaded(ROOT / "examples/differential.py"):
        yield


def gradients(model: GPT) -> list[torch.Tensor]:
    """Loss and gradients of packed documents, with weights of the mixer that begin at 0 moved."""
    for name, weight in model.named_parameters():
        if name.endswith(("remember", "mix")):
            torch.nn.init.normal_(weight, generator=torch.Generator().manual_seed(2))
    return step(model)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "changes", [{}, {"window": 4, "attention_gate": "channel", "qk_norm": "head"}]
)
def test_the_kernel_and_its_gradients_are_the_formula(name, changes):
    found = gradients(small(name, **changes))
    model = small(name, **changes)
    for block in model.blocks:
        block.attention.forward = block.attention.naive
    for actual, expected in zip(found, gradients(model), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
    assert all(x.abs().max() > 0 for x in found)
    plain = small("softmax", **changes)
    assert (gradients(plain)[0] - found[0]).abs() > 1e-3


@pytest.mark.parametrize("name", NAMES)
def test_packed_documents_are_alone_and_decode(name):
    model = small(name, "softmax").eval().requires_grad_(False)
    ids, mask = packed()
    alone = [model(x) for x in ids[:1].split(LENGTHS, dim=1)]
    logits = model(ids, mask=mask)[:1]
    torch.testing.assert_close(torch.cat(alone, dim=1), logits, rtol=1e-4, atol=1e-5)
    decoder, text = Decoder(model, 1, 9), ids[:1, 1:10]
    found = [decoder.prefill([text[0, :6].tolist()]), *map(decoder.step, text[:, 6:8].mT)]
    torch.testing.assert_close(torch.cat(found), model(text)[0, 5:8], rtol=1e-4, atol=1e-4)


def called(name: str, *more: torch.Tensor, **weights: float) -> tuple[torch.Tensor, torch.Tensor]:
    """The output of a mixer for random q, k and v of packed documents, and the v of each head."""
    mixer = small(name).blocks[0].attention
    batch = Batch(packed()[1].bind(2, 37, 37, "cpu"), 2)
    for weight, value in weights.items():
        getattr(mixer, weight).data.fill_(value)
    q, k, v = (torch.randn(2, 37, heads, 8) for heads in (6, 2, 2))
    return mixer(q, k, v, *more, batch), v.repeat_interleave(3, 2)


def test_fox_that_forgets_all_sees_the_token_alone():
    out, own = called("fox", torch.zeros(2, 37, 6), remember=-1e4)
    torch.testing.assert_close(out, own)


def test_xsa_has_nothing_along_its_own_value():
    out, own = called("xsa")
    assert (out * own).sum(-1).abs().max() < 1e-4
    assert out[:, 0].abs().max() < 1e-5 < out[:, 2].abs().max()  # one token sees itself alone


def test_settings_that_they_lack_are_refused():
    with pytest.raises(ValueError, match=r"mixer=xsa: it has no model\.sinks=True"):
        small("xsa", sinks=True)
    with pytest.raises(ValueError, match="kv_heads=1: pairs"):
        small("differential", kv_heads=1)
    with pytest.raises(ValueError, match=r"start=1\.0: give a number from 0 up, below 1"):
        small("differential", mixer_options={"differential": {"start": 1.0}})
    with pytest.raises(ValueError, match="fox attention=sdpa: it has no key bias; use attention=f"):
        GPT(GPTConfig(mixer=["fox"], **SIZES), "sdpa")
