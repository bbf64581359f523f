"""Linear layers in FP8 against fp64 of what was rounded, and models that train with them;
torch's own products of eight-bit numbers run on a CPU too.
"""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from longctx.attention import Mask
from longctx.cli import compose
from longctx.config.asked import workload_of
from longctx.model import GPT, fp8, lora
from longctx.model.fp8 import GRADIENTS, VALUES, Product, quantized
from longctx.model.layers import Linear
from longctx.planner.peak_memory import _Step
from longctx.spec.model_config import GPTConfig, LoraConfig
from tests.inputs import DEVICE, inputs

SIZES = {"vocab_size": 97, "layers": 3, "channels": 64, "heads": 4, "kv_heads": 2, "ffn": 96}
CLOSE = {"rtol": 2**-7, "atol": 1e-2}


def rounded(x: Tensor, dtype: torch.dtype = VALUES) -> Tensor:
    """x (..., C) as FP8 holds it, in fp64."""
    rows, _, scale = quantized(x.detach().reshape(-1, x.shape[-1]), dtype, columns=False)
    return (rows.double() * scale.double()).view(x.shape)


def layer_in_fp8(bias: bool = False) -> Linear:
    layer = Linear(48, 32, bias).to(DEVICE)
    with torch.no_grad():
        layer.weight.copy_(inputs(32, 48, seed=1))
    layer.product = Product()
    return layer


@pytest.mark.parametrize("bias", [False, True])
def test_a_layer_is_the_product_of_rounded_operands(bias):
    layer = layer_in_fp8(bias)
    x, dy = inputs(3, 7, 48).bfloat16().requires_grad_(), inputs(3, 7, 32, seed=2).bfloat16()
    y = layer(x)
    grads = torch.autograd.grad(y, [x, *layer.parameters()], dy)
    x8, w8, dy8 = rounded(x), rounded(layer.weight), rounded(dy, GRADIENTS)
    assert (x8 != x.double()).any() and (w8 != layer.weight.double()).any()
    want = F.linear(x8, w8, None if layer.bias is None else layer.bias.detach().double())
    torch.testing.assert_close(y.double(), want, **CLOSE)
    torch.testing.assert_close(grads[0].double(), dy8 @ w8, **CLOSE)
    flat = dy8.reshape(-1, 32).t() @ x8.reshape(-1, 48)
    assert grads[1].dtype == torch.float32
    torch.testing.assert_close(grads[1].double(), flat, rtol=2**-10, atol=1e-3)
    if bias:
        torch.testing.assert_close(grads[2].double(), dy.double().sum((0, 1)), **CLOSE)


def test_one_number_that_is_not_finite_makes_every_result_nan():
    x = inputs(5, 48)
    x[3, 2] = torch.inf
    assert layer_in_fp8()(x).isnan().all()


def test_in_eval_mode_a_layer_computes_in_the_dtype_of_its_input():
    layer, x = layer_in_fp8().eval(), inputs(5, 48)
    assert torch.equal(layer(x), F.linear(x, layer.weight))


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("with_output", [True, False])
def test_the_fused_mlp_is_the_formula(with_output):
    layer = layer_in_fp8()
    gate_up = inputs(9, 96).requires_grad_()
    down = layer.product.gated_down
    y = down(gate_up, layer.weight, None, with_output, "silu")
    dy = inputs(9, 32, seed=2)
    grads = torch.autograd.grad(y, [gate_up, layer.weight], dy)
    assert with_output or not y.any()
    gate, up = gate_up.chunk(2, dim=-1)
    act = F.silu(gate) * up
    if with_output:
        torch.testing.assert_close(y.double(), rounded(act) @ rounded(layer.weight).t(), **CLOSE)
    dact = rounded(dy, GRADIENTS) @ rounded(layer.weight)
    (want,) = torch.autograd.grad(act.double(), gate_up, dact)
    torch.testing.assert_close(grads[0], want, **CLOSE)
    dweight = rounded(dy, GRADIENTS).t() @ rounded(act)
    torch.testing.assert_close(grads[1].double(), dweight, rtol=1e-2, atol=0.3)


def test_a_compiled_layer_has_the_same_gradients():
    layer, x = layer_in_fp8(), inputs(3, 7, 48).bfloat16()
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    grads = [torch.autograd.grad(f(x).sum(), layer.weight)[0] for f in (layer, compiled)]
    assert torch.equal(*grads)


def model_of(precision: str, memory: str = "fast", **choices: object) -> GPT:
    torch.manual_seed(3)
    model = GPT(GPTConfig(**SIZES), memory=memory)
    return (fp8.convert(model, **choices) if precision == "fp8" else model).to(DEVICE)


@pytest.mark.usefixtures("interpreter")
def test_a_block_saves_as_many_bytes_more_or_fewer_as_is_planned():
    """Than one in 16 bits, for N tokens that need no padding."""
    N, saved, planned, config = 32, [], [], GPTConfig(**SIZES)
    request = replace(compose("train", ["memory=fast"]).config, seq_len=N, batch_size=1)
    cos = torch.ones(1, N, 1, config.head_size // 2, device=DEVICE)
    for precision in ("bf16", "fp8"):
        block, storages = model_of(precision).blocks[0], []
        x = inputs(1, N, 64).half().requires_grad_()

        def keep(t: Tensor, storages: list[tuple[int, int]] = storages) -> Tensor:
            storages.append((t.untyped_storage().data_ptr(), t.untyped_storage().nbytes()))
            return t

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
            angles = cos, torch.zeros_like(cos)
            block(x, angles, Mask.causal().bind(1, N, N, x.device))
        of_weights = {p.untyped_storage().data_ptr() for p in block.parameters()}
        saved.append(sum(size for at, size in set(storages) if at not in of_weights))
        work = workload_of(replace(request, precision=precision, model=config), "cuda", N)
        planned.append(_Step(replace(work, accumulate=1)).saved_by_block[0])
    scales = 64  # bytes at most
    assert saved[1] - saved[0] == pytest.approx(planned[1] - planned[0], abs=scales)


def losses(model: GPT, steps: int) -> list[float]:
    """Of AdamW's steps on the same 40 tokens."""
    tokens = torch.randint(97, (2, 21), generator=torch.Generator().manual_seed(0)).to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    each = []
    for _ in range(steps):
        with torch.autocast(DEVICE, torch.bfloat16):
            loss = model(tokens[:, :-1], tokens[:, 1:])
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        each.append(loss.item())
    return each


def test_a_model_trains_as_in_bf16():
    bf16, eight = (losses(model_of(precision), 12) for precision in ("bf16", "fp8"))
    assert eight != bf16
    assert bf16[-1] < 0.7 * bf16[0]
    assert eight == pytest.approx(bf16, rel=0.02)


def test_recomputed_blocks_have_the_gradients_of_saved_ones():
    grads = []
    for memory in ("fast", "balanced"):
        model = model_of("fp8", memory)
        tokens = torch.arange(60, device=DEVICE).view(2, 30)
        with torch.autocast(DEVICE, torch.bfloat16):
            model(tokens, tokens).backward()
        grads.append({name: p.grad for name, p in model.named_parameters()})
    for other in grads[1:]:
        for name, grad in grads[0].items():
            assert (other[name] - grad).norm() <= 0.02 * grad.norm(), name


def test_chosen_blocks_stay_in_bf16_and_names_stay_as_they_are():
    model = model_of("fp8", bf16_layers=[0, -1])
    is_fp8 = [isinstance(block.mlp.down.product, Product) for block in model.blocks]
    assert is_fp8 == [False, True, False]
    assert model.state_dict().keys() == model_of("bf16").state_dict().keys()


def test_lora_multiplies_its_frozen_weights_in_eight_bits():
    model = lora.add(model_of("bf16"), LoraConfig(rank=4))
    fp8.convert(model.to(DEVICE))
    layer, x = model.blocks[0].attention.qkv, inputs(5, 64).requires_grad_()
    with torch.no_grad():
        layer.lora_b.copy_(inputs(*layer.lora_b.shape, seed=4))
    y = layer(x)
    low = x.double() @ layer.lora_a.double().t() * layer.scale @ layer.lora_b.double().t()
    torch.testing.assert_close(y.double(), rounded(x) @ rounded(layer.weight).t() + low, **CLOSE)
    y.sum().backward()
    assert layer.weight.grad is None and layer.lora_b.grad is not None and x.grad is not None
