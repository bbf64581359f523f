"""The model as a whole: causality, packed documents, 16 bits, compiled blocks, tied weights."""

import importlib
import sys
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from longctx.attention import Mask, registry
from longctx.config.layout_config import MemoryConfig
from longctx.model import GPT, GPTConfig
from longctx.runs import compile_cache

CONFIG = GPTConfig(vocab_size=67, layers=2, channels=32, heads=4, kv_heads=2, ffn=48, init_std=0.2)
V = 67


def make(
    config: GPTConfig = CONFIG, attention: str = "naive", seed: int = 0, memory: str = "fast"
) -> GPT:
    torch.manual_seed(seed)
    return GPT(config, attention, MemoryConfig(memory, loss_chunk=7))


def tokens(B: int, T: int, seed: int = 1) -> Tensor:
    return torch.randint(V, (B, T), generator=torch.Generator().manual_seed(seed))


def doc_ids(*lengths: int) -> Tensor:
    return torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))[None]


def test_tied_weights_stay_tied_after_loading():
    model = make()
    model.load_state_dict(make(seed=3).state_dict(), assign=True)
    assert model.lm_head_weight is model.embed.weight
    assert sum(p.shape == (V, CONFIG.channels) for p in model.parameters()) == 1
    untied = make(replace(CONFIG, tied=False))
    assert untied.lm_head_weight is not untied.embed.weight


def test_initial_weights_have_their_spread_and_depend_on_the_seed_alone():
    config = replace(CONFIG, channels=128, ffn=256, layers=8, init_std=0.02, qkv_bias=True)
    model = make(config)
    for name, p in model.named_parameters():
        if name.endswith("norm.weight"):
            assert (p == 1).all()
        elif name.endswith("bias"):
            assert (p == 0).all()
        else:
            ends_branch = name.endswith(("attention.out.weight", "mlp.down.weight"))
            expected = 0.02 / 4 if ends_branch else 0.02
            assert p.std().item() == pytest.approx(expected, rel=0.05), name
    again, other = make(config), make(config, seed=1)
    assert torch.equal(model.blocks[3].mlp.down.weight, again.blocks[3].mlp.down.weight)
    assert not torch.equal(model.blocks[3].mlp.down.weight, other.blocks[3].mlp.down.weight)


@pytest.mark.parametrize("qk_norm", ["none", "head", "whole"])
def test_16_bits_stay_near_fp32(qk_norm):
    config = replace(CONFIG, qk_norm=qk_norm, qkv_bias=True)
    x = tokens(2, 33)
    expected = make(config)(x, x)
    for dtype in (torch.float32, torch.bfloat16):  # of the weights
        model = make(config).to(dtype)
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.float32):
            loss = model(x, x)
        loss.backward()
        assert {p.grad.dtype for p in model.parameters()} == {dtype}
        torch.testing.assert_close(loss, expected, rtol=0.02, atol=0)


@pytest.mark.parametrize(
    "shapes", [((4,), None), ((2, 4), (2, 5)), ((2, 4), (4, 2)), ((1, 0), None)]
)
def test_shapes_that_do_not_fit_are_refused(shapes):
    x, y = (None if s is None else torch.zeros(s, dtype=torch.int64) for s in shapes)
    with pytest.raises(ValueError, match=r"tokens and targets must both be \(B, T\)"):
        make()(x, y)
    with pytest.raises(ValueError, match=r"mask is a Tensor; give a longctx"):
        make()(tokens(1, 4), mask=torch.ones(4, 4))


@pytest.mark.parametrize("attention", ["naive", "flash"])
def test_all_blocks_and_batches_share_one_graph(attention):
    graphs = []

    def count(graph: torch.fx.GraphModule, inputs: list) -> object:
        graphs.append(graph)
        return graph.forward

    config = replace(CONFIG, layers=4)
    plain, model = make(config, attention), make(config, attention)
    torch.compiler.reset()
    for block in model.blocks:
        block.compile(backend=count, fullgraph=True)
    for seed in range(3):
        mask = Mask.documents(doc_ids(3 + seed, 20 - seed).expand(2, -1))
        batch = tokens(2, 23, seed), tokens(2, 23, seed), mask
        loss = model(*batch)
        torch.testing.assert_close(loss, plain(*batch))
        loss.backward()
    assert len(graphs) == 1
    assert all(p.grad.isfinite().all() for p in model.parameters())


def test_compiled_code_is_kept_for_one_source_of_a_backend(tmp_path, monkeypatch):
    """A backend may be of a file of the user's, whose gradients are in what was compiled."""
    file, known = tmp_path / "own_backend_of_a_user.py", {compile_cache.traced()}
    file.write_text("from longctx.attention.naive import Naive\nclass Own(Naive): ...\n")
    monkeypatch.syspath_prepend(tmp_path)
    own = importlib.import_module(file.stem)
    monkeypatch.setitem(registry._backends, "own", own.Own())
    known.add(compile_cache.traced())
    file.write_text(file.read_text() + "# with another backward\n")
    known.add(compile_cache.traced())
    del sys.modules[file.stem]
    assert len(known) == 3


@pytest.mark.gpu
@pytest.mark.parametrize("memory", ["fast", "balanced"])
def test_compiled_blocks_are_found_again(memory):
    """As by the next process: torch's cache has the backward too, and it gives the same loss."""
    counters = torch._dynamo.utils.counters["aot_autograd"]
    x, mask = tokens(2, 200).cuda(), Mask.documents(doc_ids(120, 80).expand(2, -1))
    losses = []
    for _ in range(2):
        torch._dynamo.reset()
        counters.clear()
        model = make(replace(CONFIG, channels=64, heads=4), "flash", memory=memory).cuda()
        model.compile_blocks()
        with torch.autocast("cuda", torch.bfloat16):
            losses.append(model(x, x, mask))
        losses[-1].backward()
    assert losses[0] == losses[1]
    assert counters["autograd_cache_hit"] and not counters["autograd_cache_bypass"], counters


@pytest.mark.gpu
def test_forward_and_backward_do_not_wait_for_the_gpu(request):
    model = make(replace(CONFIG, channels=64, heads=4), "flash").cuda().bfloat16()
    x = tokens(2, 200).cuda()
    targets = x.masked_fill(x == 0, -100)
    mask = Mask.documents(doc_ids(120, 80).expand(2, -1)).to("cuda")
    model(x, targets, mask).backward()
    request.addfinalizer(lambda: torch.cuda.set_sync_debug_mode("default"))
    torch.cuda.set_sync_debug_mode("error")
    model(x, targets, mask).backward()


def test_block_at_the_recompile_limit_is_an_error():
    """At torch's recompile limit an error, not a silent fall back to eager."""
    torch._dynamo.reset()
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=False):
        for model in (make(), make()):
            model.compile_blocks()
        assert len(torch._dynamo.callback_handler.end_callbacks) == 1  # of both
        assert torch._dynamo.config.fail_on_recompile_limit_hit
        with torch._dynamo.config.patch(recompile_limit=1):
            for block in model.blocks:
                block.compile(backend="eager")
            model(tokens(1, 8))
            with pytest.raises(torch._dynamo.exc.FailOnRecompileLimitHit):
                model.double()(tokens(1, 8))


@pytest.mark.gpu
def test_tied_gradients_add_in_one_order_where_runs_must_repeat(monkeypatch):
    """Gradients of tokens that come up a hundred times are the same each time, as in fp64."""
    config = replace(CONFIG, channels=64)
    model, x = make(config, "flash").cuda(), tokens(2, 301) % 3
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    sums = []
    torch.use_deterministic_algorithms(True)
    for _ in range(3):
        model.zero_grad()
        model(x[:, :-1].cuda(), x[:, 1:].cuda()).backward()
        sums.append(model.embed.weight.grad.clone())
    assert torch.equal(sums[0], sums[1]) and torch.equal(sums[0], sums[2])
    oracle = make(config).double()
    oracle.load_state_dict(model.state_dict())
    oracle(x[:, :-1], x[:, 1:]).backward()
    expected = oracle.embed.weight.grad
    assert (sums[0].double().cpu() - expected).norm() <= 2e-5 * expected.norm()
