"""What a block may be made of: its loss and gradients are those of a plain formula, however it is
trained, and decoding, memory and checkpoints follow.
"""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import yaml
from torch import Tensor

from longctx import cli
from longctx.attention import Mask
from longctx.attention.description import AttentionConfig
from longctx.config.asked import workload_of
from longctx.config.eval_config import EvalConfig
from longctx.config.train_config import TrainConfig
from longctx.hf.families import write_config
from longctx.model import GPT, GPTConfig, lora
from longctx.model.decoder import Decoder
from longctx.parallel.devices import check_attention
from longctx.planner.peak_memory import KEPT, predict
from longctx.spec.experts import ExpertsConfig
from longctx.spec.model_config import LoraConfig
from tests.model.test_recompute import FEW

SIZES = {
    **{"vocab_size": 61, "layers": 3, "channels": 24, "heads": 6, "kv_heads": 2, "ffn": 40},
    **{"init_std": 0.3, "qk_norm": "head", "window": 5, "window_layers": [0, 2]},
}
SMALL = GPTConfig.of_saved(SIZES)
CHANGES = yaml.safe_load(Path(__file__).with_name("features.yaml").read_text())
SAVED = yaml.safe_load(Path(__file__).with_name("saved.yaml").read_text())
FEATURES = {name: GPTConfig.of_saved(SIZES | changes) for name, changes in CHANGES.items()}
ATTENTION = ["qkv", "out"]  # takes LoRA in every model
DOCUMENTS = torch.repeat_interleave(torch.arange(3), torch.tensor([70, 19, 61]))
TOKENS = torch.randint(61, (1, 150), generator=torch.Generator().manual_seed(2))


def make(config: GPTConfig, attention: str = "flash", memory: str = "fast") -> GPT:
    torch.manual_seed(0)
    model = GPT(config, attention, FEW[memory])
    for name, p in model.named_parameters():
        if "norm" in name:
            torch.nn.init.normal_(p, mean=1.0, std=0.2)
        if any(part in name for part in ("sinks", "correction", ".bias", "factor")):
            torch.nn.init.normal_(p, std=0.5)
    return model


ACTIVATIONS = {"silu": F.silu, "gelu": F.gelu, "gelu_tanh": partial(F.gelu, approximate="tanh")}
ACTIVATIONS["relu2"] = lambda x: F.relu(x).square()


def activated(inner: Tensor, c: GPTConfig) -> Tensor:
    gate, up = inner.chunk(2, -1) if c.mlp_gate else (inner, 1)
    return ACTIVATIONS[c.activation](gate) * up


def rms(x: Tensor, weight: Any) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + SMALL.norm_eps).sqrt() * weight


def rotated(x: Tensor, positions: Tensor, theta: float, size: int) -> Tensor:
    """Rotate the first `size` channels of x (T, H, D); channel d turns with channel d + size/2."""
    x, rest = x[..., :size], x[..., size:]
    half = size // 2
    angles = positions[:, None] * theta ** -(torch.arange(half) / half)
    turned = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    x = x * angles.cos().repeat(1, 2)[:, None] + turned * angles.sin().repeat(1, 2)[:, None]
    return torch.cat((x, rest), dim=-1)


def formula(model: GPT, tokens: Tensor, documents: Tensor) -> Tensor:
    """Return the logits (T, V) of one sequence, from the weights of `model` by name."""
    c = model.config
    one = c.norm_plus_one
    w = {n: p + (one and n.endswith("norm.weight")) for n, p in model.named_parameters()}

    def norm(x: Tensor, of: dict[str, Tensor], name: str) -> Tensor:
        if f"{name}.weight" not in of:
            return x
        x = x if c.norm_form == "rms" else x - x.mean(-1, keepdim=True)
        return rms(x, of[f"{name}.weight"]) + of.get(f"{name}.bias", 0)

    T, place = len(tokens), torch.arange(len(tokens))
    positions = place - (documents[:, None] > documents).sum(1)
    x = w["embed.weight"][tokens] * c.multipliers.embedding
    for n in range(c.layers):
        of = {name.removeprefix(f"blocks.{n}."): p for name, p in w.items()}
        before, normed = x, norm(x, of, "attention_norm")
        qkv = normed @ of["attention.qkv.weight"].T
        window = c.window_of(n)
        D = (window is None and c.full_head_dim) or c.head_size
        kv = (window is None and c.full_kv_heads) or c.kv_heads
        widths = (c.heads * D, kv * D, kv * D)[: 2 if c.full_shares_kv and window is None else 3]
        parts = [t if c.qk_norm == "whole" else t.view(T, -1, D) for t in qkv.split(widths, dim=1)]
        q, k, v = *parts[:2], parts[-1]
        weights = [of.get(f"attention.{s}_norm.weight") for s in ("q", "k")]
        if c.qk_norm != "none" and not c.qk_norm_after_rope:
            q, k = (rms(t, weight) for t, weight in zip((q, k), weights, strict=True))
        q, k, v = (t.reshape(T, -1, D) for t in (q, k, v))
        v = rms(v, 1) if c.v_norm else v
        theta = (window and c.window_rope_theta) or c.rope_theta
        q, k = (rotated(t, positions, theta, int(D * c.rotary_share)) for t in (q, k))
        if c.qk_norm_after_rope:
            q, k = (rms(t, weight) for t, weight in zip((q, k), weights, strict=True))
        if c.query_growth:
            beta, each = c.query_growth
            q = q * (1 + beta * (1 + positions // each).log())[:, None, None]
        k, v = (t.repeat_interleave(c.heads // kv, dim=1) for t in (k, v))
        scores = torch.einsum("ihd,jhd->hij", q, k) * (c.attention_scale or D**-0.5)
        if cap := c.softcap:
            scores = cap * torch.tanh(scores / cap)
        distance = place[:, None] - place
        seen = (distance >= 0) & (distance < (window or T)) & (documents[:, None] == documents)
        scores = scores.masked_fill(~seen, -torch.inf)
        if c.sinks:  # a key that nobody's value comes from
            sinks = of["attention.sinks"][:, None, None].expand(-1, T, 1)
            scores = torch.cat((scores, sinks), dim=-1)
        out = torch.einsum("hij,jhd->ihd", scores.softmax(-1)[..., :T], v)
        if c.attention_gate != "none":
            gate = (normed @ of["attention.gate.weight"].T).view(T, c.heads, -1)
            out = out * gate.sigmoid()
        branch = out.reshape(T, -1) @ of["attention.out.weight"].T
        branch = norm(branch, of, "attention_out_norm")
        x = x + branch * c.multipliers.residual
        if c.norms != "shared":
            normed = norm(before if c.norms == "parallel" else x, of, "mlp_norm")
        normed = normed * c.multipliers.mlp
        if n in c.no_mlp:
            continue
        if c.has_experts(n):
            branch = routed(normed, of, c, c.experts)
        else:
            inner = normed @ of["mlp.gate_up.weight"].T + of.get("mlp.gate_up.bias", 0)
            branch = activated(inner, c) @ of["mlp.down.weight"].T + of.get("mlp.down.bias", 0)
        branch = norm(branch, of, "mlp_out_norm")
        x = (x + branch * c.multipliers.residual) * of.get("out_factor.weight", 1)
    z = norm(x, w, "norm") @ w["embed.weight"].T * c.multipliers.logits
    cap = c.multipliers.logit_softcap
    return z if cap is None else cap * torch.tanh(z / cap)


def routed(x: Tensor, of: dict[str, Tensor], model: GPTConfig, c: ExpertsConfig) -> Tensor:
    """Return what experts make of x (T, C): all of them compute, those not chosen weigh 0."""

    def norm(name: str, x: Tensor) -> Tensor:
        return rms(x, of[f"mlp.norms.{name}.weight"]) if c.beside else x

    z = norm("router", x) @ of["mlp.router.weight"].T * (x.shape[1] ** -0.5 if c.beside else 1)
    p = z.softmax(-1) if c.router == "softmax" else z.sigmoid()
    scores = p + of.get("mlp.correction.weight", 0)
    groups = scores.unflatten(-1, (c.groups, -1))
    sums = groups.topk(c.group_scores).values.sum(-1, keepdim=True)
    left = sums < sums.topk(min(c.groups, c.top_groups), 1).values[:, -1:]
    scores = groups.masked_fill(left, -torch.inf).flatten(1)
    w = p.masked_fill(scores < scores.topk(c.per_token).values[:, -1:], 0)
    w = (w / w.sum(-1, keepdim=True) if c.normalize else w) * c.scale
    w = w * of.get("mlp.norms.experts.weight", 1)
    shared = torch.zeros(())
    if c.shared or c.beside:
        inner = activated(norm("mlp", x) @ of["mlp.shared.gate_up.weight"].T, model)
        shared = norm("mlp_out", inner @ of["mlp.shared.down.weight"].T)
    if c.shared_gate:
        shared = shared * torch.sigmoid(x @ of["mlp.shared_gate.weight"].T)
    gate_up, down = (of[f"mlp.{s}.weight"].unflatten(0, (c.count, -1)) for s in ("gate_up", "down"))
    inner = activated(torch.einsum("tc,efc->tef", norm("routed", x), gate_up), model)
    return shared + norm("routed_out", torch.einsum("tef,ecf,te->tc", inner, down, w))


@pytest.mark.parametrize(("attention", "memory"), [("naive", "fast"), *(("flash", x) for x in FEW)])
@pytest.mark.parametrize("feature", FEATURES)
def test_gradients_are_those_of_the_formula(feature, attention, memory):
    """The loss has the value and gradients of the formula."""
    model, expected = make(FEATURES[feature], attention, memory), make(FEATURES[feature])
    loss = model(TOKENS, TOKENS.roll(-1, 1), Mask.documents(DOCUMENTS[None]))
    want = F.cross_entropy(formula(expected, TOKENS[0], DOCUMENTS), TOKENS[0].roll(-1))
    torch.testing.assert_close(loss, want, rtol=1e-5, atol=1e-5)
    loss.backward()
    want.backward()
    for (name, p), q in zip(model.named_parameters(), expected.parameters(), strict=True):
        if p.requires_grad:
            assert (p.grad - q.grad).abs().max() < 1e-4 * q.grad.abs().max() + 1e-6, name


@pytest.mark.parametrize("feature", FEATURES)
def test_lora_adds_to_the_formula(feature):
    model = lora.add(make(FEATURES[feature], memory="balanced"), LoraConfig(2, targets=ATTENTION))
    for name, p in model.named_parameters():
        if name.endswith("lora_b"):
            torch.nn.init.normal_(p, std=0.1)
    logits = model(TOKENS, mask=Mask.documents(DOCUMENTS[None]))[0]
    expected = formula(lora.merge(model), TOKENS[0], DOCUMENTS)
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("feature", FEATURES)
def test_decoding_continues_the_formula(feature):
    model = make(FEATURES[feature]).eval()
    decoder, n = Decoder(model, 2, 12), 7
    logits = [decoder.prefill([TOKENS[0, :n].tolist(), TOKENS[0, 1:3].tolist()])[0]]
    for token in TOKENS[0, n : n + 4]:
        logits.append(decoder.step(torch.stack([token, token]))[0].clone())
    expected = formula(model, TOKENS[0, : n + 4], torch.zeros(n + 4))[n - 1 :]
    torch.testing.assert_close(torch.stack(logits), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("feature", [name for name in FEATURES if not FEATURES[name].experts.count])
def test_no_class_of_transformers_is_claimed_for_it(feature):
    with pytest.raises(ValueError, match=r"no class of [^()]*$"):
        write_config(FEATURES[feature], 64)


def saved_activations(attention: str = "flash", **changes: Any) -> float:
    """Return the bytes that blocks are predicted to save, uncompiled in fp32 on a GPU."""
    overrides = ["model=tiny", "precision=fp32", "seq_len=512", "compile=false"]
    config = cli.compose("train", [*overrides, f"attention={attention}"]).config
    changes["experts"] = ExpertsConfig(**changes.get("experts", {}))
    model = replace(config.model, vocab_size=512, **changes)
    work = replace(workload_of(config, "cuda", 512, model), memory=FEW["fast"])
    return predict(work).gpu[KEPT]


N = 512 * 32  # tokens of a micro-batch on a GPU


@pytest.mark.parametrize(("attention", "changes", "more"), SAVED)
def test_what_parts_save_is_counted(attention, changes, more):
    assert saved_activations(attention, **changes) - saved_activations(attention) == more * N


def test_scaling_leaves_the_base_of_windows_alone():
    scaling = {"rope_type": "linear", "factor": 4.0}
    model = replace(SMALL, rope_scaling=scaling, window_rope_theta=300.0)
    ropes = [(rope.theta, rope.scaling) for rope in model.ropes()]
    assert ropes == [(300.0, {}), (model.rope_theta, scaling)]
    with pytest.raises(ValueError, match=r"window_rope_theta=300\.0: .* model\.window"):
        replace(model, window=None, window_layers=None).validate()


@pytest.mark.parametrize("feature", ["softcap=30", "sinks=true"])
def test_a_backend_without_a_part_is_refused_at_the_door(feature, tmp_path, capsys):
    overrides = ["model=tiny", f"model.{feature}", "device=cpu", "attention=sdpa"]
    assert cli.main(["train", *overrides, f"runs={tmp_path}"]) == 2
    error = capsys.readouterr().err
    assert feature.partition("=")[0] in error and "attention=flash" in error
    assert not any(tmp_path.iterdir())


def test_sinks_are_not_trained_by_a_backend_without_their_gradient():
    model, tokens = GPT(GPTConfig(vocab_size=61, sinks=True), "sdpa"), TOKENS[:, :17]
    check_attention(EvalConfig(attention=AttentionConfig("sdpa")), model.config, "cpu")
    with torch.no_grad():
        model(tokens, tokens)
    with pytest.raises(ValueError, match="sinks"):
        check_attention(TrainConfig(attention=AttentionConfig("sdpa")), model.config, "cpu")
    with pytest.raises(ValueError, match="sinks"):
        model(tokens, tokens).backward()
