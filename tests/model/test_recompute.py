"""Every way to save fewer activations gives the gradients of saving all, for any backend, mask,
tile and share on the host.
"""

import gc
import sys
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import chain, repeat
from typing import Any
from weakref import WeakKeyDictionary

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

from longctx.attention import Mask, flash
from longctx.attention.description import AttentionConfig
from longctx.config.layout_config import MemoryConfig
from longctx.kernels import HAS_TRITON
from longctx.model import GPT, GPTConfig, layers, lora, offload, recompute
from longctx.model.layers import Block
from longctx.model.offload import HostBuffers, pinned
from longctx.planner import block_memory
from longctx.planner.peak_memory import attends_again
from longctx.spec.experts import ExpertsConfig
from longctx.spec.model_config import LoraConfig
from tests.live_memory import LiveMemory
from tests.planner.steps import workload

CONFIG = GPTConfig(
    vocab_size=67, layers=3, channels=32, heads=4, kv_heads=2, ffn=48, init_std=0.2, qk_norm="head"
)
B, T = 2, 150
LONG = {"keep_every": 2, "mlp_tile": 64, "offload": 0.6}
WAYS = {
    "balanced": MemoryConfig("balanced"),
    "the first block": MemoryConfig("balanced", recompute_share=0.4),
    "tiles": MemoryConfig("balanced", mlp_tile=128),
    "every second": MemoryConfig("balanced", keep_every=2),
    "the first alone": MemoryConfig("balanced", keep_every=9, mlp_tile=200),
    "host": MemoryConfig("balanced", offload=1.0),
    "long": MemoryConfig("balanced", **LONG),
    "a head at a time": MemoryConfig("balanced", heads_at_once=1, mlp_tile=128),
    "attention again": MemoryConfig("balanced", attention_again=0.7, keep_every=2),
    "all of it": MemoryConfig("balanced", heads_at_once=1, attention_again=1, **LONG),
}


# Of tests that change the model and not the way: saving all, and a way of each kind
FEW = {"fast": MemoryConfig("fast"), **{way: WAYS[way] for way in ("tiles", "balanced", "long")}}


def make(
    memory: MemoryConfig | str = "fast", config: GPTConfig = CONFIG, attention: str = "flash"
) -> GPT:
    torch.manual_seed(0)
    return GPT(config, attention, memory)


def batch(device: str = "cpu") -> tuple[Tensor, Tensor, Mask]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randint(67, (B, T), generator=generator)
    ids = torch.repeat_interleave(torch.arange(3), torch.tensor([100, 7, 43]))[None].expand(B, -1)
    targets = x.roll(-1, 1)
    targets[:, 106] = -100
    return x.to(device), targets.to(device), Mask.documents(ids)


def gradients(model: GPT, device: str = "cpu") -> list[Tensor]:
    model(*batch(device)).backward()
    return [p.grad for p in model.parameters()]


@pytest.fixture(scope="module")
def saved() -> dict[str, list[Tensor]]:
    return {name: gradients(make(attention=name)) for name in ("flash", "naive", "sdpa")}


@pytest.mark.parametrize("attention", ["flash", "naive", "sdpa"])
@pytest.mark.parametrize("way", WAYS)
def test_gradients_are_those_of_saving_all(attention, way, saved, monkeypatch):
    """To the bit, but for sums of tiles and naive's backward. Flash attends once unless asked."""
    losses = [make(memory, attention=attention)(*batch()) for memory in ("fast", WAYS[way])]
    calls, forward_for = [], flash.forward_for
    monkeypatch.setattr(flash, "forward_for", lambda *args: calls.append(1) or forward_for(*args))
    actual = gradients(make(WAYS[way], attention=attention))
    if WAYS[way].mlp_tile or attention == "naive":
        torch.testing.assert_close(actual, saved[attention], rtol=1e-5, atol=1e-6)
    else:
        assert losses[0] == losses[1] and all(map(torch.equal, actual, saved[attention]))
    again = round((WAYS[way].attention_again or 0) * CONFIG.layers)
    times = (CONFIG.layers + again) * (CONFIG.kv_heads if WAYS[way].heads_at_once else 1)
    assert len(calls) == (times if attention == "flash" else 0)


ON_GPU = [pytest.param("cuda", compiled, marks=pytest.mark.gpu) for compiled in (False, True)]


@pytest.mark.parametrize(("device", "compiled"), [("cpu", False), *ON_GPU])
@pytest.mark.parametrize("way", WAYS)
def test_under_autocast_every_weight_has_its_gradient(way, device, compiled):
    """A weight that autocast cast while gradients were off is not taken for the trained one."""
    grads = []
    for memory in (MemoryConfig("fast"), WAYS[way]):
        model = make(memory, replace(CONFIG, channels=64)).to(device)
        if compiled:
            model.compile_blocks()
        with torch.autocast(device, torch.bfloat16):
            for _ in range(2):
                model(*batch(device)).backward()
        grads.append([p.grad for p in model.parameters()])
    for actual, expected in zip(*grads, strict=True):
        assert actual.dtype == torch.float32
        assert (actual - expected).norm() <= 3e-2 * expected.norm()


@pytest.mark.parametrize("way", ["balanced", "long"])
def test_without_gradients_tiles_give_the_same_logits(way, monkeypatch):
    model, longest = make(WAYS[way]), []
    after = Block.after

    def noted(self: Block, x: Tensor, *arguments: object, **more: object) -> Tensor:
        longest.append(x.shape[1])
        return after(self, x, *arguments, **more)

    monkeypatch.setattr(Block, "after", noted)
    with torch.no_grad():
        torch.testing.assert_close(model(*batch()), make()(*batch()))
    assert max(longest[: CONFIG.layers]) <= (model.memory.mlp_tile or B * T) + 128


def test_more_layers_take_no_more_memory_without_gradients():
    """The first x is a quarter of it, and gone in the second block."""
    peaks = []
    for depth in (1, 3):
        model = make(WAYS["tiles"], replace(CONFIG, layers=depth))
        with LiveMemory() as live, torch.no_grad():
            model(*batch(), "none")
        peaks.append(live.peak)
    assert peaks[1] <= 1.02 * peaks[0]


@contextmanager
def traced(name: str, tokens: int, *keys: str) -> Iterator[tuple[Any, ...]]:
    """Give the step of a real model, and on fake tensors a block, its x and out, and angles."""
    if not HAS_TRITON:
        pytest.skip("needs Triton, whose kernels are traced")
    step = workload(*f"model={name}".split(), "memory.recompute=block", *keys)
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    with pytest.MonkeyPatch.context() as patch, fake, torch.autocast("cpu", torch.bfloat16):
        patch.setattr(layers, "fused", lambda x: x.dtype == torch.bfloat16)
        block = Block(step.model.blocks[0], AttentionConfig("flash"))
        x = torch.empty(1, tokens, step.model.channels, dtype=torch.bfloat16)
        angles = [torch.empty(1, tokens, 1, step.model.head_size // 2) for _ in range(2)]
        yield step, block, x, x.unflatten(-1, (step.model.heads, -1)), angles


@pytest.mark.parametrize("tokens", [32768, 65536, 262144])
@pytest.mark.parametrize("name", ["1b", "8b", "1b model.norms=sandwich"])
def test_tiles_of_backward_take_predicted_memory(name, tokens):
    """A tile holds nothing of the one before."""
    with traced(name, tokens, "memory.mlp_tile=32768") as (step, block, x, out, _):
        dy = torch.empty_like(x)
        with LiveMemory() as live:
            sums = recompute._Sums(block, recompute._trained(block))
            into = [dy, torch.empty_like(out)] if tokens > 32768 else None
            after = partial(block.after, needs_value=False)
            recompute.gradients_in_tiles(after, 32768, (x, out), (), (dy,), sums, into)
    through, spec = step.pass_of(1, tokens), step.model.blocks[0]
    # Not compiled, SwiGLU's backward still has the down projection in 16 bits
    peak = live.peak + dy.nbytes - 2 * spec.mlp.linears[1].weights
    assert peak == pytest.approx(block_memory.mlp_backward(spec, through), rel=1e-3)


@pytest.mark.parametrize(("name", "at_once"), [("1b", 1), ("8b", 1), ("1b", 5), ("8b", 7)])
def test_a_group_of_heads_takes_predicted_memory(name, at_once):
    """Without the workspace of the kernels: no group holds the one before."""
    keys, tokens = (f"memory.heads_at_once={at_once}", "memory.mlp_tile=8192"), 262144
    with traced(name, tokens, *keys) as (step, block, x, out, angles):
        dy = torch.empty_like(x)
        mask = Mask.causal().bind(1, tokens, tokens, x.device)
        tape = recompute._Tape([block], x.shape[:2], [angles], [mask], step.memory, x.device)
        tape.save(0, x, {"out": out, "lse": torch.empty(1, step.model.heads, tokens)})
        with LiveMemory() as live:
            sums = recompute._Sums(block, recompute._trained(block))
            recompute._block_backward(tape, 0, tape.input(0), dy, sums)
    through, spec = step.pass_of(1, tokens)._replace(on_gpu=False), step.model.blocks[0]
    expected = block_memory.attention_backward(spec, through)
    expected += block_memory.attention_workspace(spec.attention, through)
    assert live.peak + dy.nbytes == pytest.approx(expected, rel=0.01)


def test_a_block_in_one_piece_holds_no_more_than_attentions_output(monkeypatch):
    """While its MLP computes: a validation held q, k, v and the normed input, a tenth more."""
    monkeypatch.setattr(layers.SelfAttention, "forward", lambda *x: torch.empty_like(x[1]))
    with traced("8b", 65536) as (_, block, x, out, angles), torch.no_grad():
        with LiveMemory() as whole:
            block(x, angles, Mask.causal())
        with LiveMemory() as half:
            block.after(x, out)
    assert whole.peak == half.peak + x.nbytes


def test_a_graph_that_is_kept_holds_no_block_after_backward():
    node: Any = (loss := make(WAYS["every second"])(*batch())).grad_fn
    while not hasattr(node, "tape"):
        node = node.next_functions[0][0]
    loss.backward()
    tape = node.tape
    assert not (tape.blocks or tape.angles or tape.masks or tape.saved or hasattr(node, "weights"))


PARTS = {
    "sinks": {"sinks": True},
    "windows": {"window": 20, "window_layers": [1]},
    "norms of all heads": {"qk_norm": "whole"},
    "biases and a gate": {"qkv_bias": True, "out_bias": True, "attention_gate": "channel"},
    "part of the heads at the end": {"heads": 6, "kv_heads": 3, "head_dim": 16},
}


@pytest.mark.parametrize("rank", [None, 4])
@pytest.mark.parametrize("parts", PARTS)
def test_groups_of_heads_and_attention_again_change_no_bit(parts, rank):
    """In fp32: a sum over heads is the one that it was. Rounded, all are those of saving all."""
    config, grads = replace(CONFIG, **PARTS[parts]), []
    groups = {"heads_at_once": 2, "attention_again": 0.7}
    long, grouped = (MemoryConfig("balanced", **LONG, **more) for more in ({}, groups))
    for memory in ("fast", long, grouped):
        model = make(memory, config)
        if rank:
            lora.add(model, LoraConfig(rank=rank))
        model(*batch()).backward()
        grads.append([p.grad for p in model.parameters() if p.requires_grad])
    assert grads[0] and all(map(torch.equal, *grads[1:]))
    torch.testing.assert_close(grads[0], grads[1], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("way", ["balanced", "every second", "all of it"])
def test_weights_on_the_host_change_no_bit(way, device, monkeypatch, capsys):
    """And those of two blocks at most are on the device, but for what the host has no memory."""
    config, results = replace(CONFIG, layers=5, channels=64, experts=ExpertsConfig(4, ffn=16)), []
    after = Block.after
    offload.print_once.cache_clear()
    for share, room, number in ((0.0, 99, 0), (0.6, 99, 3), (1.0, 99, 5), (1.0, 7, 2)):
        memory = chain(repeat(pinned, room), repeat(lambda *size: pinned(1 << 62, torch.uint8)))
        monkeypatch.setattr(offload, "pinned", lambda *size, of=memory: next(of)(*size))
        with torch.device("meta"):
            model = lora.add(make(WAYS[way], config), LoraConfig(rank=8))
        offload.allocate(model, share, torch.device(device))
        generator = torch.Generator().manual_seed(1)
        for weight in model.parameters():
            weight.data.copy_(torch.randn(weight.shape, generator=generator) / 5)
        each = [block.away for block in model.blocks if block.away.on_host]

        def noted(self: Block, *arguments: Any, each: Any = each, **more: Any) -> Tensor:
            assert self.away not in each or self.away.on_device
            assert sum(away.on_device is not None for away in each) <= 2
            return after(self, *arguments, **more)

        monkeypatch.setattr(Block, "after", noted)
        model(*batch(device)).backward()
        assert len(each) == number and not any(away.on_device for away in each)
        results.append([p.grad for p in model.parameters() if p.requires_grad])
    assert all(all(map(torch.equal, results[0], x)) for x in results[1:])
    assert capsys.readouterr().err.count("GiB of host memory: ") == 1


def test_blocks_with_short_windows_attend_again_first(monkeypatch):
    config, blocks = replace(CONFIG, window=20, window_layers=[1]), []
    memory = MemoryConfig("balanced", attention_again=0.34).filled("balanced")
    attend = recompute._Tape.attend
    noted = lambda tape, i, x: blocks.append(i) or attend(tape, i, x)  # noqa: E731
    monkeypatch.setattr(recompute._Tape, "attend", noted)
    gradients(make(memory, config))
    assert blocks == [0, 1, 2, *attends_again(workload(model=config, memory=memory))]
    assert blocks[3:] == [1]


def test_tiles_come_from_the_host_while_the_one_before_is_computed(monkeypatch):
    """As if the CPU were a GPU: "meta" has no values, so each copy is noted instead."""
    events, arrived = list[str](), list[weakref.ref[Tensor]]()

    def copy(sources: Iterable[Tensor], targets: Iterable[Tensor], device: torch.device) -> None:
        others = sum(tile() is not None for tile in arrived)
        events.append(f"copy {next(iter(sources)).shape[1]} next to {others}")
        arrived.append(weakref.ref(next(iter(targets))))

    monkeypatch.setattr(offload, "_copy", copy)
    x, there = torch.ones(1, 300, 8), torch.ones(1, 300, 8, device="meta")

    def function(x: Tensor, there: Tensor) -> Tensor:
        assert x.device == there.device
        events.append(f"compute {x.shape[1]}")
        return x

    (y,) = recompute.in_tiles(function, 128, (x, there), torch.device("meta"))
    assert y.shape == x.shape
    first, later = "copy 128 next to 0", ("copy 128 next to 1", "copy 44 next to 1")
    assert events == [first, later[0], "compute 128", later[1], "compute 128", "compute 44"]


def test_gradients_of_tiles_are_their_sums():
    block, tokens, size = make().blocks[0], 300, (CONFIG.heads, 8)
    x, out, dy = (torch.randn(1, tokens, *shape) for shape in ((32,), size, (32,)))
    want, sums = [], recompute._Sums(block, recompute._trained(block))
    for at in (slice(0, 128), slice(128, 256), slice(256, 300)):
        leaves = [t[:, at].clone().requires_grad_() for t in (x, out)]
        y = block.after(*leaves)
        every = torch.autograd.grad(y, [*leaves, *sums.weights], dy[:, at], allow_unused=True)
        want.append(every)
    into = [dy.clone(), torch.empty_like(out)]
    got = recompute.gradients_in_tiles(block.after, 128, (x, out), (), (dy,), sums, into)
    dx, do, *dweights = zip(*want, strict=True)
    assert torch.equal(got[0], torch.cat(dx, 1)) and torch.equal(got[1], torch.cat(do, 1))
    for total, parts in zip(sums.gradients(), dweights, strict=True):
        assert total is None or torch.equal(total, sum(parts[1:], parts[0]))


def test_compiled_parts_share_their_graphs_and_hold_nothing(monkeypatch):
    graphs, outs, alive, attend = [], [], [], recompute._Tape.attend

    def leaving(graph: torch.fx.GraphModule, inputs: list) -> object:
        own = [sys._getframe()]  # a cycle, as torch 2.11 leaves it
        gc.collect()  # and an old one: torch collects the young ones
        graphs.append(graph)
        return own and graph.forward

    def watched(*arguments: Any) -> dict[str, Tensor]:
        results = attend(*arguments)
        alive.extend(out for out in outs if out() is not None)
        outs.append(weakref.ref(results["out"]))
        return results

    want = gradients(make(config=replace(CONFIG, layers=4)))
    memory = MemoryConfig("balanced", mlp_tile=150, attention_again=1)
    model = make(memory, config=replace(CONFIG, layers=4))
    torch.compiler.reset()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=leaving, fullgraph=True))
    monkeypatch.setattr(recompute._Tape, "attend", watched)
    model.compile_blocks()
    torch.testing.assert_close(gradients(model), want, rtol=1e-5, atol=1e-6)
    assert len(graphs) <= 4  # before and after, each with and without gradient
    assert len(outs) == 8 and not alive


@pytest.mark.parametrize("way", ["balanced", "long"])
def test_the_whole_model_can_be_compiled(way):
    torch.compiler.reset()
    model = make(WAYS[way])
    torch.compile(model, backend="aot_eager")(*batch()).backward()
    torch.testing.assert_close([x.grad for x in model.parameters()], gradients(make()))


@pytest.mark.parametrize("way", ["balanced", "long"])
def test_weights_that_left_before_backward_are_refused(way):
    model = make(WAYS[way])
    others = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    loss = torch.func.functional_call(model, others, batch())
    with pytest.raises(RuntimeError, match="memory=fast"):
        loss.backward()


def test_without_host_memory_what_is_missing_stays_on_the_device(saved, monkeypatch, capsys):
    def like(self: HostBuffers, name: str, x: Tensor) -> Tensor:
        if sum(map(len, HostBuffers._pool.values())) > 2:
            raise MemoryError("0.1 GiB of host memory could not be pinned")
        return torch.empty_like(x)

    monkeypatch.setattr(HostBuffers, "_pool", WeakKeyDictionary())
    monkeypatch.setattr(HostBuffers, "like", like)
    for way in ("host", "all of it"):
        for _ in range(2):
            grads = gradients(make(WAYS[way]))
            torch.testing.assert_close(grads, saved["flash"], rtol=1e-5, atol=1e-6)
    assert capsys.readouterr().err.count("stays on the GPU") == 1
    assert sum(map(len, HostBuffers._pool.values())) < 10


@pytest.mark.gpu
def test_memory_that_cannot_be_pinned_leaves_no_error(monkeypatch):
    pages = offload._Pages(-1, 4096)
    monkeypatch.setattr(offload, "_Pages", lambda *_, **__: pages)
    pinned(1024, torch.float32)
    with pytest.raises(MemoryError, match="could not be pinned"):  # its pages are pinned already
        pinned(1024, torch.float32)
    assert torch.ones(1, device="cuda").item() == 1


def test_forwards_share_no_host_memory_and_give_it_back(saved, monkeypatch):
    monkeypatch.setattr(HostBuffers, "_pool", WeakKeyDictionary())
    model = make(WAYS["host"])
    losses = [model(*batch()) for _ in range(2)]
    HostBuffers.free()
    assert any(HostBuffers._pool.values())
    while losses:
        losses.pop().backward()
    doubled = [2 * g for g in saved["flash"]]
    torch.testing.assert_close([p.grad for p in model.parameters()], doubled, rtol=1e-5, atol=1e-6)
    HostBuffers.free()
    assert not any(HostBuffers._pool.values())
    del model
    assert not HostBuffers._pool
