"""Multi-head latent attention: kernels and decoding compute the formula of its latents."""

import math

import pytest
import torch

from longctx.model import lora
from longctx.model.decoder import Decoder
from longctx.model.mixer import Batch
from longctx.spec.model_config import GPTConfig, LoraConfig
from tests.inputs import check_decoding
from tests.model.test_mixers import packed, small

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8, "mscale": 0.7}
CASES = {
    "odd sizes": {"mixer_options": {"mla": {"kv_rank": 10, "q_rank": 14, "value_size": 5}}},
    "window": {"window": 4, "rotary_share": 0.5},
    "no positions": {"nope_layers": [0, 1, 2], "query_growth": [0.5, 4.0]},
    "yarn": {"rope_scaling": YARN | {"mscale_all_dim": 1.0}, "context": 32},
}


@pytest.mark.parametrize("case", CASES)
def test_kernels_and_decoding_compute_the_formula(case):
    model, (ids, mask), window = small("mla", **CASES[case]), packed(), CASES[case].get("window")
    layer, x = model.blocks[0].attention, torch.randn(2, 37, 48, requires_grad=True)
    inputs = x, *layer.parameters()
    for norm in filter(lambda weight: weight.ndim == 1, inputs):
        torch.nn.init.normal_(norm, mean=1, std=0.3)
    batch = Batch((mask.windowed(window) if window else mask).bind(2, 37, 37, "cpu"), 2)
    tensors, found = layer.project(x, *model.ropes[0](batch.positions)), []
    for compute in (layer, layer.naive):
        loss = layer.branch(compute(*tensors, batch), x).square().sum()
        found.append([loss, *torch.autograd.grad(loss, inputs, retain_graph=True)])
    for actual, expected in zip(*found, strict=True):
        assert (actual - expected).norm() < 1e-5 * expected.norm() < 1e9

    # Absorbed matrices have what LoRA adds to them
    lora.add(model, LoraConfig(2, targets=["kv_up"]))
    for weight in filter(lambda weight: weight.requires_grad, model.parameters()):
        torch.nn.init.normal_(weight)
    check_decoding(decoder := Decoder(model, 2, 20), ids[:, :20], (3, 12), 7)
    assert decoder.states[0][0].shape == (2, 20, 1, layer.kv_rank + model.config.rotary_size)


def test_planner_and_kernels_are_told_the_sizes_of_its_calls():
    model = GPTConfig(mixer=["mla"], head_dim=128, rotary_share=0.5, heads=8)
    part, required = model.blocks[0].attention, model.largest_attention.required()
    assert required["head_dim"] == 192 and required["group"] == 1
    assert part.flops(5) == 6 * 5 * 8 * (192 + 128)
    stretched, plain = (small("mla", **x).blocks[0].attention for x in (CASES["yarn"], {}))
    ratio = stretched.scores.scale / plain.scores.scale
    assert ratio == pytest.approx((0.1 * math.log(4) + 1) ** 2)
