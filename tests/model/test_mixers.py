"""Mixers: what holds for all of them, with the one of the docs; registration and refusals."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from inspect import getfile
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor

from longctx import plugins
from longctx.attention import Mask
from longctx.attention.description import AttentionConfig
from longctx.config.asked import divisions, workload_of
from longctx.config.fields import build, refuse
from longctx.config.layout_config import ContextConfig, MemoryConfig
from longctx.config.train_config import TrainConfig
from longctx.hf.families import write_config
from longctx.model import GPT
from longctx.model.decoder import Decoder
from longctx.model.mixer import Batch, Mixer
from longctx.model.mixers.description import MIXERS, Cost, MixerSpec, mistake, register
from longctx.parallel.devices import check_attention
from longctx.planner import block_memory, step_time
from longctx.spec import hardware
from longctx.spec.model_config import GPTConfig
from longctx.spec.parts import AttentionSpec
from longctx.training import kernel_lock
from tests.inputs import check_decoding
from tests.test_docs import blocks

SHORT = next(code for code in blocks("extend.md", "python") if "class ShortConvolution" in code)
SIZES = {"channels": 48, "heads": 6, "kv_heads": 2, "ffn": 80, "vocab_size": 71, "init_std": 0.3}
LENGTHS = (1, 2, 17, 5, 12)  # of documents


@contextmanager
def loaded(file: Path, registered: dict[str, Any] = MIXERS) -> Iterator[None]:
    """Register the mixers, or score functions, of a file; forget them afterwards."""
    before = registered.copy()
    plugins.load([str(file)])
    yield
    for name in registered.keys() - before.keys():
        del registered[name]
    for name in [name for name in sys.modules if name.startswith(f"{file.stem}_")]:
        del sys.modules[name]


@pytest.fixture(autouse=True)
def short(tmp_path) -> Iterator[None]:
    """Register the mixer of the docs."""
    (tmp_path / "my_mixer.py").write_text(SHORT)
    with loaded(tmp_path / "my_mixer.py"):
        yield


def small(*mixer: str, memory: MemoryConfig | str = "fast", **changes: object) -> GPT:
    torch.manual_seed(0)
    return GPT(GPTConfig(layers=3, mixer=list(mixer), **SIZES | changes), "flash", memory)


def packed() -> tuple[Tensor, Mask]:
    ids = torch.randint(71, (2, sum(LENGTHS)), generator=torch.Generator().manual_seed(1))
    numbers = torch.arange(len(LENGTHS)).repeat_interleave(torch.tensor(LENGTHS))
    return ids, Mask.documents(torch.stack([numbers, numbers]))


def step(model: GPT) -> list[Tensor]:
    ids, mask = packed()
    loss = model(ids, ids.roll(-1, 1), mask)
    return [loss, *torch.autograd.grad(loss, list(model.parameters()))]


def test_layers_repeat_and_their_file_is_locked():
    config = small("short", "softmax").config
    assert [config.mixer_of(n) for n in range(3)] == ["short", "softmax", "short"]
    assert [type(x.attention) for x in config.blocks] == [MixerSpec, AttentionSpec, MixerSpec]
    assert config.with_layers([1, 2]).mixer == ["softmax", "short"]
    assert {type(x.attention) for x in GPTConfig().blocks} == {AttentionSpec}
    assert config.parameters() == sum(x.numel() for x in GPT(config).parameters())
    locked = kernel_lock.of_workload(workload_of(TrainConfig(model=config), "cpu", 64))
    assert "my_mixer.py" in locked["fingerprint"]


MEMORIES = (
    MemoryConfig("balanced", recompute_share=0.5),
    MemoryConfig("balanced", keep_every=2, mlp_tile=9, attention_again=1.0),
    MemoryConfig("balanced", heads_at_once=1),
)


@pytest.mark.parametrize("memory", MEMORIES, ids=str)
def test_recomputation_changes_nothing(memory):
    exact, found = (step(small("short", "softmax", memory=x)) for x in ("fast", memory))
    torch.testing.assert_close(found, exact, rtol=1e-4, atol=1e-6)


def test_a_mixer_without_a_step_is_decoded_by_its_forward(capsys):
    decoder = Decoder(small("short", "softmax").eval().requires_grad_(False), 1, 9)
    check_decoding(decoder, packed()[0][:1, 1:10], (6,), 2)
    assert "model.mixer=short has no decoding" in capsys.readouterr().err and not decoder.states


MISTAKES = yaml.safe_load(Path(__file__).with_name("mixers.yaml").read_text())


@pytest.mark.parametrize(("message", "values"), MISTAKES)
def test_layers_and_options_are_checked(message, values):
    with pytest.raises(ValueError, match=message.replace("?", r"\?")):
        build(GPTConfig, values, "model.").validate()


def test_what_a_mixer_lacks_is_refused(monkeypatch):
    monkeypatch.setattr(MIXERS["short"], "needs", {"score"})
    config = TrainConfig(devices=2, model=small("short").config, attention=AttentionConfig("naive"))
    scored, two = AttentionConfig("naive", options={"score": "x"}), ContextConfig(2)
    wrong: Any = {"flash: it has no score function; use": {"attention": AttentionConfig("flash")}}
    wrong |= {"x: the mixer has its own": {"attention": scored, "devices": 1}}
    for message, changes in (wrong | {"share = .heads.; give con": {"context": two}}).items():
        with pytest.raises(ValueError, match=rf"mixer=short.*{message}"):
            check_attention(replace(config, **changes), config.model, "cpu")
    shared = replace(config, context=ContextConfig("auto"))
    assert {division.context for division in divisions(shared, config.model)} == {1}
    of_family = replace(config.model, source={"model_type": "mine"})
    for model, message in ((config.model, r"mixer=\[short\]"), (of_family, "=mine: of a plugin")):
        with pytest.raises(ValueError, match=message):
            write_config(model, 64)
    with pytest.raises(ValueError, match=r"graphs=true: .*mixer=short launches"):
        workload_of(replace(config, devices=1, graphs="true"), "cuda", 64).check_graphs()
    with pytest.raises(ValueError, match=r"model\.mixer takes"):
        small("short")(packed()[0], mask=Mask.full())
    monkeypatch.setattr(MIXERS["short"], "exact", ("tap",))
    with pytest.raises(ValueError, match=r"exact=\['tap'\]: its weights are inputs, taps, out"):
        small("short")
    monkeypatch.setattr(MIXERS["short"], "exact", ())
    for question in ("cost", "weights"):
        monkeypatch.setattr(MIXERS["short"], question, lambda spec, *e: spec.no_such)
        with pytest.raises(ValueError, match=rf"test_mixers\.py, line \d+: {question}: Attr"):
            small("short").config.block(0).attention.cost(2)
    for shape, error in ((4, "TypeError: 'int'"), ((), "IndexError: tuple")):
        monkeypatch.setattr(MIXERS["short"], "weights", lambda spec, shape=shape: {"out": shape})
        with pytest.raises(ValueError, match=rf"mixer=short: .*my_mixer\.py: weights: {error}"):
            small("short")


@pytest.mark.parametrize("memory", ["fast", "balanced"])
def test_a_wrong_shape_or_name_is_one_error_that_names_the_file(memory, monkeypatch):
    ids, mixer = packed()[0], MIXERS["short"]
    fails = "(*_): raise ValueError('x')\n"
    code = f"def late{fails}def check{fails}def asks(): refuse((True, 'x'))"
    exec(compile(code, getfile(mixer), "exec"), of_file := {"refuse": refuse})
    (x := torch.ones(1, requires_grad=True)).register_hook(of_file["late"])
    late, *others = (of_file[name] for name in ("late", "check", "asks"))
    for call, told in ((late, True), (x.sum().backward, True), *((y, False) for y in others)):
        with pytest.raises(ValueError, match="x") as raised:
            call()
        assert ("my_mixer.py: line 1: late: V" if told else "None") in str(mistake(raised.value))
    for change in (lambda x: x[:, 1:], lambda x: x[..., :1], lambda x: (x, None)):
        monkeypatch.setattr(mixer, "forward", lambda self, x, batch, change=change: change(x))
        with pytest.raises(ValueError, match=r"mixer=short: .*my_mixer\.py: forward .*; give the"):
            small("short", memory=memory)(ids, ids)
    with monkeypatch.context() as unsaved:
        unsaved.setattr(mixer, "add_module", lambda x, *_: setattr(x, "kept", [torch.ones(1)]))
        with pytest.raises(ValueError, match=r"r\.py: inputs.weight, kept, .*: name each once in"):
            small("short")
    with pytest.raises(ValueError, match="mixer=half: step has no state"):
        register("half", type("Half", (Mixer,), {"step": late}))
    monkeypatch.setattr(mixer, "weights", lambda spec: {"forward": (4, spec.size)})
    with pytest.raises(ValueError, match=r"my_mixer\.py: weights: .*'forward'.*; rename the"):
        small("short")


def test_forward_saves_what_the_cost_says():
    layer, tokens = small("short").blocks[0].attention, 4096
    x = torch.randn(1, tokens, 48, requires_grad=True)
    others = {weight.untyped_storage().data_ptr() for weight in (x, *layer.parameters())}
    saved: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    batch = Batch(Mask.causal().bind(1, tokens, tokens, "cpu"), 1)
    assert len(batch.positions) == 1  # made before, for all layers
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        layer(*layer.project(x), batch)
    own = sum(saved[storage] for storage in saved.keys() - others)
    assert own == pytest.approx(tokens * layer.part.cost(4).saved, rel=0.02)


@pytest.mark.parametrize("recompute", ["none", "block"])
def test_the_planner_counts_what_the_cost_says(recompute, monkeypatch):
    block, model = small("short").config.blocks[0], small("short").config
    config = TrainConfig(model=model, memory=MemoryConfig("fast").filled("fast"))
    step = workload_of(config, "cuda", 64)
    through = step.pass_of(2, 64)._replace(recompute=recompute)
    found = []
    for cost in (Cost(), Cost(saved=100), Cost(backward=1000), Cost(flops=1e6)):
        monkeypatch.setattr(MIXERS["short"], "cost", lambda spec, e, cost=cost: cost)
        kept = sum(row.bytes for row in block_memory.kept(block, through))
        backward = block_memory.attention_backward(block, through)
        seconds = step_time.mixer_seconds(step, hardware.chip("NVIDIA H200"))
        found.append((kept, backward, seconds, block.attention.flops(9)))
    (kept, backward, seconds, flops), *others = found
    saved = kept + 12800 * (recompute == "none"), backward + 12800 * (recompute == "block")
    assert tuple(row[:2] for row in others) == (saved, (kept, backward + 128000), (kept, backward))
    assert [row[2] > seconds for row in others] == [True, False, True]
    assert [row[3] - flops for row in others] == [0, 0, 3e6]
