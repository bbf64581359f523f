"""Mixers with a state: those of transformers on each document, their own formulas, and decoding."""

from importlib.metadata import version
from itertools import product

import pytest
import torch
from torch import Tensor, nn
from transformers import KimiLinearConfig
from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearDeltaAttention

from longctx.attention import Mask
from longctx.attention.description import AttentionConfig
from longctx.attention.exchange import Ranks
from longctx.model import GPT, recurrent
from longctx.model.decoder import Decoder
from longctx.model.mixer import Batch
from longctx.parallel.devices import mixers
from longctx.spec.model_config import GPTConfig
from tests.inputs import check_decoding

LENGTHS = (1, 2, 63, 70, 5, 64, 128, 3)  # of documents, against chunks of 64 and 16
SIZES = {"key_heads": 2, "value_heads": 6, "key_size": 8, "value_size": 16}
GROUPS = {"heads": 6, "head_size": 8, "state": 16, "groups": 2}
OPTIONS = {"gdn": {**SIZES, "negative": True}, "kda": SIZES, "mamba2": GROUPS}


def model(name: str, **options: object) -> GPT:
    torch.manual_seed(0)
    sizes = {"channels": 48, "heads": 6, "kv_heads": 2, "ffn": 80, "vocab_size": 71}
    layers = {"layers": 2, "mixer": [name, "softmax"], "mixer_options": {name: options}}
    made = GPT(GPTConfig(**sizes, **layers, init_std=0.3), "naive").double()
    if name == "mamba2":
        torch.nn.init.normal_(made.blocks[0].attention.shift)
    return made


def packed() -> Mask:
    numbers = torch.arange(len(LENGTHS)).repeat_interleave(torch.tensor(LENGTHS))
    return Mask.documents(torch.stack([numbers, numbers]))


def branch(mixer: nn.Module, x: Tensor, naive: bool = False) -> list[Tensor]:
    """The mixer's output for packed documents, and every gradient."""
    batch = Batch(packed().bind(2, x.shape[1], x.shape[1], "cpu"), 2)
    compute = mixer.naive if naive else mixer
    y = mixer.branch(compute(*mixer.project(x), batch), x)
    weight = torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view(y.shape)
    return [y, *torch.autograd.grad((y * weight).sum(), [x, *mixer.parameters()])]


@pytest.mark.parametrize("bias", [0.0, 100.0])  # channels then forget all at once
@pytest.mark.parametrize(("name", "sized"), product(OPTIONS, (False, True)))
def test_chunks_are_the_formula(name, sized, bias):
    mixer = model(name, **(OPTIONS[name] if sized else {})).blocks[0].attention
    mixer.dt_bias.data += bias
    x = torch.randn(2, sum(LENGTHS), 48, dtype=torch.float64, requires_grad=True)
    found, wanted = (branch(mixer, x, naive) for naive in (False, True))
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)


def test_each_document_of_kda_is_that_of_transformers():
    keys = {"linear_num_heads": 3, "linear_head_dim": 8, "rms_norm_eps": 1e-5, "hidden_size": 48}
    theirs = KimiLinearDeltaAttention(KimiLinearConfig(num_hidden_layers=2, **keys), 0).double()
    for weight in theirs.parameters():
        torch.nn.init.normal_(weight, std=0.3)
    mixer = model("kda", key_heads=3, key_size=8).blocks[0].attention
    state = {key.removeprefix("forget_gate."): x for key, x in theirs.state_dict().items()}
    state["A_log"] = state["A_log"].flatten()
    state["qkv.weight"] = torch.cat([state.pop(f"{x}_proj.weight") for x in "qkv"])
    names = ("decay_in", "decay_out", "strengths", "gate_in", "gate_out", "out")
    letters = ("f_a", "f_b", "b", "g_a", "g_b", "o")
    for name, theirs_name in zip(names, letters, strict=True):
        state[f"{name}.weight"] = state.pop(f"{theirs_name}_proj.weight")
    state |= {"taps": state.pop("conv1d.weight"), "norm": state.pop("o_norm.weight")}
    mixer.load_state_dict(state)
    x = torch.randn(2, sum(LENGTHS), 48, dtype=torch.float64, requires_grad=True)
    found, layer = branch(mixer, x)[0][1:], theirs.requires_grad_(False)
    expected = torch.cat([layer(part) for part in x[1:].split(LENGTHS, dim=1)], dim=1)
    # theirs computes in fp32
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", OPTIONS)
def test_steps_are_the_whole_forward(name):
    whole = model(name, **OPTIONS[name]).eval().requires_grad_(False)
    texts = torch.randint(71, (2, 80), generator=torch.Generator().manual_seed(1))
    decoder = Decoder(whole, 2, 80)
    for _ in range(2):  # used again, it forgets
        check_decoding(decoder, texts, (70, 2), 4)


@pytest.mark.parametrize("groups", [1, 2])
def test_ranks_may_share_a_group(groups):
    options = {"heads": 8, "head_size": 8, "state": 16, "groups": groups}
    mixer = model("mamba2", **options).blocks[0].attention
    tensors = mixer.project(torch.randn(2, sum(LENGTHS), 48, dtype=torch.float64))
    mask, outs = packed().bind(2, sum(LENGTHS), sum(LENGTHS), "cpu"), []
    wide = [x.repeat_interleave(max(1, 4 // x.shape[2]), 2).chunk(4, dim=2) for x in tensors]
    for rank, own in enumerate(zip(*wide, strict=True)):
        outs.append(mixer.forward(*own, Batch(mask, 2, Ranks(rank, 4))))
    torch.testing.assert_close(torch.cat(outs, dim=2), mixer.forward(*tensors, Batch(mask, 2)))


def test_a_gpu_takes_a_new_fla_alone(monkeypatch):
    config = model("gdn").config
    mixers.check(config, AttentionConfig(), "cpu", 2, "auto")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    for found, triton, message in (
        ("0.5.9", "3.7.1", "fla-core 0.5.9 has wrong gradients"),
        ("0.6.0", "3.6.0", "wrong gradients with Triton 3.6.0"),
        (None, "3.7.1", "not installed"),
    ):
        recurrent.fla_refusal.cache_clear()
        versions = {"fla-core": found, "triton": triton}
        monkeypatch.setattr(recurrent, "version", lambda x, of=versions: of[x] or version("none"))
        with pytest.raises(ValueError, match=f"model.mixer=gdn: .*{message}.*pip install"):
            mixers.check(config, AttentionConfig(), "cuda", 1, "auto")
    recurrent.fla_refusal.cache_clear()
