"""The gated delta rule: that of transformers on each document, its own formula, and decoding."""

import pytest
import torch
from torch import Tensor
from transformers import Qwen3_5TextConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet

from longctx.attention import Mask
from longctx.config.fields import build
from longctx.model import GPT, recurrent
from longctx.model.decoder import Decoder
from longctx.model.mixer import Batch
from longctx.parallel.devices import mixers
from longctx.spec.model_config import GPTConfig

LENGTHS = (1, 2, 63, 70, 5, 64, 128, 3)  # of documents, against chunks of 64
OPTIONS = {"key_heads": 2, "value_heads": 6, "key_size": 8, "value_size": 16}


def model(**options: object) -> GPT:
    torch.manual_seed(0)
    sizes = {"channels": 48, "heads": 6, "kv_heads": 2, "ffn": 80, "vocab_size": 71}
    layers = {"layers": 2, "mixer": ["gdn", "softmax"], "mixer_options": {"gdn": options}}
    return GPT(GPTConfig(**sizes, **layers, init_std=0.3), "naive").double()


def packed() -> Mask:
    numbers = torch.arange(len(LENGTHS)).repeat_interleave(torch.tensor(LENGTHS))
    return Mask.documents(torch.stack([numbers, numbers]))


def branch(mixer: torch.nn.Module, x: Tensor, naive: bool = False) -> list[Tensor]:
    """The mixer's output for packed documents, and every gradient."""
    batch = Batch(packed().bind(2, x.shape[1], x.shape[1], "cpu"), 2)
    compute = mixer.naive if naive else mixer
    y = mixer.branch(compute(*mixer.project(x), batch), x)
    weight = torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view(y.shape)
    return [y, *torch.autograd.grad((y * weight).sum(), [x, *mixer.parameters()])]


@pytest.mark.parametrize("options", [{}, {**OPTIONS, "negative": True}])
def test_chunks_are_the_formula(options):
    mixer = model(**options).blocks[0].attention
    x = torch.randn(2, sum(LENGTHS), 48, dtype=torch.float64, requires_grad=True)
    for found, wanted in zip(branch(mixer, x), branch(mixer, x, naive=True), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)


def test_each_document_is_that_of_transformers():
    ours = model(**OPTIONS)
    names = ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim")
    sizes = {f"linear_{name}": x for name, x in zip(names, OPTIONS.values(), strict=True)}
    keys = {"hidden_size": 48, "num_hidden_layers": 2, "rms_norm_eps": 1e-5}
    theirs = Qwen3_5GatedDeltaNet(Qwen3_5TextConfig(**sizes, **keys), 0).double()
    own = dict(ours.blocks[0].attention.named_parameters())
    state = {name: own[name] for name in ("A_log", "dt_bias")}
    state |= {"conv1d.weight": own["taps"], "norm.weight": own["norm"]}
    state |= zip(
        ("in_proj_b.weight", "in_proj_a.weight"), own["rates.weight"].chunk(2), strict=True
    )
    named = {"in_proj_qkv": "qkv", "in_proj_z": "gate", "out_proj": "out"}
    theirs.load_state_dict(
        state | {f"{name}.weight": own[f"{x}.weight"] for name, x in named.items()}
    )
    x = torch.randn(2, sum(LENGTHS), 48, dtype=torch.float64, requires_grad=True)
    found, mixer = branch(ours.blocks[0].attention, x)[0][1:], theirs.requires_grad_(False)
    expected = torch.cat([mixer(part) for part in x[1:].split(LENGTHS, dim=1)], dim=1)
    # theirs computes in fp32
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_steps_are_the_whole_forward():
    whole = model(**OPTIONS).eval().requires_grad_(False)
    texts = torch.randint(71, (2, 80), generator=torch.Generator().manual_seed(1))
    starts, decoder = (70, 2), Decoder(whole, 2, 80)
    for _ in range(2):  # used again, it forgets
        steps = [decoder.prefill([x[:n].tolist() for x, n in zip(texts, starts, strict=True)])]
        for more in range(4):
            new = torch.stack([x[n + more] for x, n in zip(texts, starts, strict=True)])
            steps.append(decoder.step(new).clone())
        for row, n in enumerate(starts):
            expected = whole(texts[row : row + 1])[0, n - 1 : n + 4]
            torch.testing.assert_close(torch.stack(steps)[:, row], expected)


def test_a_gpu_takes_a_new_fla_alone(monkeypatch):
    config = model().config
    mixers.check(config, "cpu", 2, "auto")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    for found, triton, message in (
        ("0.5.9", "3.7.1", "fla-core 0.5.9 has wrong gradients"),
        ("0.6.0", "3.6.0", "wrong gradients with Triton 3.6.0"),
        (None, "3.7.1", "not installed"),
    ):
        recurrent.fla_refusal.cache_clear()
        versions = {"fla-core": found, "triton": triton}
        monkeypatch.setattr(recurrent, "version", lambda name, of=versions: of[name] or missing())
        with pytest.raises(ValueError, match=f"model.mixer=gdn: .*{message}.*pip install"):
            mixers.check(config, "cuda", 1, "auto")
    recurrent.fla_refusal.cache_clear()


def missing() -> str:
    raise recurrent.PackageNotFoundError


@pytest.mark.parametrize("options", [{"value_heads": 5}, {"key_size": 0}, {"key_size": 512}])
def test_sizes_are_checked(options):
    values = {"mixer": ["gdn"], "mixer_options": {"gdn": options}}
    with pytest.raises(ValueError, match=r"model\.mixer=gdn: "):
        build(GPTConfig, values, "model.").validate()
