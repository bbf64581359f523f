"""The registry: explicit requests, no fallback, a record of what ran, and backends from outside."""

from dataclasses import replace

import pytest
import torch

from longctx.attention import (
    Attention,
    Backend,
    Mask,
    attention,
    check,
    kernels_run,
    register,
    registered,
    registry,
)
from longctx.attention.description import DESCRIPTIONS, AttentionConfig, Description
from longctx.attention.naive import Naive
from longctx.config.asked import divisions, with_vocabulary, workload_of
from longctx.config.train_config import TrainConfig
from longctx.planner.peak_memory import predict
from tests.planner.steps import with_policy

q = torch.randn(1, 5, 2, 16)
EVERY = ("naive", "sdpa", "flash", "flex", "flash_attn")
CPU = {"device": "cpu", "dtype": torch.bfloat16, "head_dim": 64}


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: attention(q, q, q, backend="flahs"), "attention=flahs .*flash"),
        (lambda: attention(q, q, q, backend="sdpa", kernle="flash"), r"options\.kernle=flash"),
        (lambda: attention(q, q, q, backend="sdpa", kernel="fastest"), "auto, flash, cudnn"),
        (lambda: attention(*[q.double()] * 3, backend="flash"), "use attention=naive"),
        (lambda: attention(q[:, :, [0, 1, 0]], q, q), "3 query heads are not a multiple of 2"),
        (lambda: attention(q, q.half(), q.half()), "one dtype"),
        (lambda: attention(q.long(), q.long(), q.long()), "fp32, bf16 or fp16"),
        (lambda: attention(q, q, q, scale=-1.0), "scale=-1.0 must be"),
        (lambda: attention(q, q, q, softcap=float("inf")), "softcap=inf must be"),
        (lambda: attention(q, q, q, softcap=0.0), "softcap=0.0 must be"),
        (lambda: attention(q, q, q, backend="sdpa", softcap=3.0), "use attention=flash or naive"),
        (lambda: attention(q, q, q, backend="flash_attn", softcap=3.0), "=flash or naive"),
        *((lambda b=b: attention(*[q[:, :0]] * 3, backend=b), "from 1 up") for b in EVERY),
        (lambda: attention(q, q, q, sinks=torch.zeros(3)), "one for each of 2 heads"),
        (lambda: attention(q, q, q, sinks=torch.zeros(2, 1)), "one for each of 2 heads"),
        (lambda: attention(q, q, q, scale=torch.tensor(0.3)), "a tensor gets no gradient"),
        (lambda: Attention("flahs"), "attention=flahs"),
        (lambda: attention(q, q, q, backend="auto"), "for runs alone; use .*flash"),
        (lambda: attention(q, q, q, is_causal=True), r"mask=Mask\.causal\(\)"),
        (lambda: Attention("sdpa", {"kernel": "fastest"}), r"attention\.options\.kernel=fastest"),
        (lambda: attention(q, q, q, torch.ones(5, 5).bool()), "mask is a Tensor; give a longctx"),
        (lambda: attention(q[0], q, q), "takes q"),
        (lambda: check("flash_attn", **CPU), "use attention=flash"),
        (lambda: check("flex", **CPU), "use attention=flash"),
    ],
)
def test_impossible_requests_name_a_remedy(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.fixture
def mine():
    """A backend of the user's, registered as "mine", with a description of its own."""

    class Mine(Naive):
        description = Description(options={"factor": (2, 3)}, takes_intervals=False)

        def run(self, q, k, v, mask, scale, factor=2):
            out, lse, _ = super().run(q, k, v, mask, scale)
            return factor * out, lse, "mine"

    register("mine", Mine())
    yield Mine
    del registry._backends["mine"], DESCRIPTIONS["mine"]


def test_register_adds_a_backend(mine):
    expected = attention(q, q, q, backend="naive")
    assert torch.equal(attention(q, q, q, backend="mine"), 2 * expected)
    assert torch.equal(attention(q, q, q, backend="mine", factor=3), 3 * expected)
    assert kernels_run()["mine"] == "mine"
    with pytest.raises(ValueError, match="already registered"):
        register("mine", Naive())
    with pytest.raises(TypeError, match="Backend"):
        register("object", object())
    with pytest.raises(ValueError, match="it has no softcap"):
        attention(q, q, q, backend="mine", softcap=5.0)


def test_a_backward_of_a_plugin_gives_three_gradients(mine, monkeypatch):
    monkeypatch.setattr(mine, "backward", lambda *_: (q, 2 * q, 3 * q), raising=False)
    of_mine = replace(DESCRIPTIONS["mine"], has_backward=True)
    monkeypatch.setitem(DESCRIPTIONS, "mine", of_mine)
    mask, lse = Mask.causal(), torch.zeros(1, 2, 5)
    found = Attention("mine").backward(q, (q, q, q, q, lse), mask)
    assert [torch.equal(x, n * q) for n, x in enumerate(found[:3], 1)] == [True] * 3
    assert found.dsinks is None


def test_register_adds_a_description(mine):
    AttentionConfig("mine", {"factor": 3}).validate()
    with pytest.raises(ValueError, match="factor=4"):
        AttentionConfig("mine", {"factor": 4}).validate()
    config = TrainConfig(attention=AttentionConfig("mine"), devices=4)
    methods = {division.context_method for division in divisions(config, config.model)}
    assert "allgather" not in methods
    step = with_policy(with_vocabulary(workload_of(config, "cuda", 4096), 512), "fast")
    fused = replace(step, attention=AttentionConfig("sdpa"))
    assert predict(step) == predict(fused)
    assert not replace(step, devices=1, strategy="none").captured


@pytest.mark.parametrize("name", ["naive", "sdpa", "flash", "flex", "flash_attn"])
def test_descriptions_match_their_backends(name):
    backend = registered()[name]
    assert DESCRIPTIONS[name] is not None and backend.description == DESCRIPTIONS[name]
    assert backend.description.has_backward == (type(backend).backward is not Backend.backward)


def test_handle_refuses_again_and_compiles_to_one_graph():
    attend, mask = Attention("flash"), Mask.causal().bind(1, 5, 5, "cpu")
    attend(q, q, q, Mask.causal())
    for _ in range(2):
        with pytest.raises(ValueError, match="use attention=naive"):
            attend(q.double(), q.double(), q.double(), Mask.causal())
    compiled = torch.compile(lambda x: attend(x, x, x, mask), backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(q), attend(q, q, q, mask))
    with pytest.raises(Exception, match="attention=flash cannot run here"):
        compiled(q.double())


def test_autocast_chooses_the_dtype():
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert attention(q, q, q).dtype == torch.bfloat16
        assert attention(q, q.bfloat16(), q.bfloat16(), mask=Mask.full()).dtype == torch.bfloat16


def test_more_heads_than_tokens_warn_once(recwarn):
    x = torch.randn(1, 6, 19, 16)
    for _ in range(2):
        attention(x, x, x)
    attention(x[:, :1], x, x)  # a step of decoding
    assert [str(w.message).count("(B, H, T, D)") for w in recwarn] == [1]
