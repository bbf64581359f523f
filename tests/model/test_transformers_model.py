"""Models that transformers computes for us: packed documents with our attention give the loss and
the gradients of each document alone with transformers' own; what cannot be right is refused.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from longctx.attention import Mask
from longctx.config.memory_config import MemoryConfig
from longctx.config.model_config import LoraConfig
from longctx.model import huggingface, lora
from longctx.model.export import export
from longctx.model.gpt import build
from longctx.model.offload import HostBuffers
from longctx.model.transformers_model import TransformersModel, described, prove
from tests.model.families.parity import write_tokenizer
from tests.model.transformers_shapes import AGREE, FAST, LEAK, reference, settings_of

LENGTHS = (17, 5, 30)
KINDS = [pytest.param(x, marks=() if x in FAST else pytest.mark.slow) for x in AGREE]


def opened(folder: Path, memory: MemoryConfig | str = "fast", attention: str = "flash") -> Any:
    """The model in `folder`, computed by transformers."""
    config = huggingface.read_config(folder, "always")
    with torch.device("meta"):
        model = build(config, attention, memory)
    model.to_empty(device="cpu")
    huggingface.load_weights(model, folder)
    return model.train()


def documents() -> tuple[list[Tensor], Tensor, Tensor, Mask]:
    """Documents, and their tokens, targets and mask in one sequence."""
    generator = torch.Generator().manual_seed(1)
    each = [torch.randint(3, 301, (1, n), generator=generator) for n in LENGTHS]
    ends = torch.full((1, 1), -100)
    targets = torch.cat([torch.cat([x[:, 1:], ends], dim=1) for x in each], dim=1)
    numbers = torch.arange(len(each)).repeat_interleave(torch.tensor(LENGTHS))
    return each, torch.cat(each, dim=1), targets, Mask.documents(numbers[None])


def loss_alone(model: Any, each: list[Tensor]) -> Tensor:
    """The loss of every document alone, summed, by transformers itself."""
    total = torch.zeros(())
    for ids in each:
        logits = model(ids, use_cache=False).logits[0, :-1]
        total = total + F.cross_entropy(logits, ids[0, 1:], reduction="sum")
    return total


@pytest.mark.parametrize("memory", ["fast", "balanced"])
@pytest.mark.parametrize("kind", KINDS)
def test_packed_equals_each_document_alone(kind: str, memory: str, tmp_path: Path) -> None:
    theirs = reference(kind)
    theirs.save_pretrained(tmp_path)
    model = opened(tmp_path, memory)
    each, tokens, targets, mask = documents()
    loss, expected = model(tokens, targets, mask, reduction="sum"), loss_alone(theirs, each)
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=0)
    loss.backward()
    expected.backward()
    weights = dict(theirs.named_parameters())
    for name, weight in model.named_parameters():
        want = weights[model.name_of(name)].grad if model.name_of(name) in weights else None
        if weight.grad is not None and want is not None and want.norm() > 1e-4:
            assert (weight.grad - want).norm() < 2e-5 * want.norm(), name


@pytest.mark.parametrize("kind", ["gpt_oss", "gemma3_text"])
def test_offloaded_layers_change_no_gradient(kind: str, tmp_path: Path) -> None:
    reference(kind).save_pretrained(tmp_path)
    _, tokens, targets, mask = documents()
    gradients, on_host = [], []
    HostBuffers.free()
    for offload in (0.0, 0.5, 1.0):
        model = opened(tmp_path, MemoryConfig("balanced", offload=offload))
        both = [model(tokens, targets, mask, reduction="sum") for _ in range(2)]
        on_host.append(sum(x.in_use for x in HostBuffers._pool.values()))
        for loss in both:
            loss.backward()
        gradients.append([weight.grad for weight in model.parameters()])
    torch.testing.assert_close(gradients[1], gradients[0], rtol=0, atol=0)
    torch.testing.assert_close(gradients[2], gradients[0], rtol=0, atol=0)
    layers = len(model.blocks)
    assert on_host == [0, 4 * round(0.5 * layers), 4 * layers]  # input and output, of two forwards
    del both, loss
    assert not any(x.in_use for x in HostBuffers._pool.values())


@pytest.mark.parametrize("attention", ["naive"])
def test_any_backend_computes_it(attention: str, tmp_path: Path) -> None:
    theirs = reference("gemma3_text")
    theirs.save_pretrained(tmp_path)
    each, tokens, targets, mask = documents()
    loss = opened(tmp_path, attention=attention)(tokens, targets, mask, reduction="sum")
    torch.testing.assert_close(loss, loss_alone(theirs, each), rtol=1e-5, atol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_it_proves_itself(kind: str) -> None:
    prove(described(settings_of(kind)), "cpu", 256, packing=True)


@pytest.mark.parametrize("kind", LEAK)
def test_layers_that_leak_are_refused(kind: str) -> None:
    config = described(settings_of(kind))
    with pytest.raises(ValueError, match=rf"model_type={kind}: .*data\.packing=false"):
        prove(config, "cpu", 256, packing=True)
    prove(config, "cpu", 256, packing=False)


@pytest.mark.parametrize("kind", ["bloom", "phimoe", "mpt"])
def test_attention_of_another_kind_is_refused(kind: str) -> None:
    with pytest.raises(ValueError, match=f"model_type={kind}"):
        prove(described(settings_of(kind)), "cpu", 256, packing=False)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model_type": "none_such"}, "model_type=none_such"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "rope_type=dynamic"),
        ({"num_attention_heads": "four"}, "transformers cannot build it"),
    ],
)
def test_what_does_not_train_is_refused(
    changes: dict[str, Any], named: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(settings_of("cohere") | changes))
    with pytest.raises(ValueError, match=named) as caught:
        huggingface.read_config(tmp_path, "always")
    assert str(tmp_path / "config.json") in str(caught.value)


@pytest.mark.parametrize("kind", ["cohere2", "qwen3_moe", "gpt_oss"])
def test_an_export_is_the_model_again(kind: str, tmp_path: Path) -> None:
    theirs = reference(kind)
    theirs.save_pretrained(tmp_path / "in")
    write_tokenizer(tmp_path / "in")
    export(opened(tmp_path / "in"), tmp_path / "in", tmp_path / "out", 512)
    before, after = (load_file(tmp_path / x / "model.safetensors") for x in ("in", "out"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out", attn_implementation="eager")
    assert again.config.max_position_embeddings == 512
    ids = torch.arange(3, 60)[None]
    assert torch.equal(again.eval()(ids).logits, theirs(ids).logits)


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    theirs = reference("cohere")
    state = {name: x for name, x in theirs.state_dict().items() if "layers.1.mlp.up" not in name}
    theirs.save_pretrained(tmp_path, state_dict=state)
    with pytest.raises(ValueError, match=r"missing tensor model\.layers\.1\.mlp\.up_proj"):
        opened(tmp_path)


def test_lora_trains_and_merges(tmp_path: Path) -> None:
    reference("cohere2").save_pretrained(tmp_path)
    model = lora.add(opened(tmp_path), LoraConfig(rank=3))
    _, tokens, targets, mask = documents()
    model(tokens, targets, mask).backward()
    trained = [name for name, x in model.named_parameters() if x.grad is not None]
    assert trained and all(name.endswith(("lora_a", "lora_b")) for name in trained)
    added = sum(x.numel() for x in model.parameters() if x.requires_grad)
    assert added == LoraConfig(rank=3).parameters(model.config)
    with torch.no_grad():
        for layer in lora.layers(model):
            layer.lora_b.normal_()
        before = model(tokens, mask=mask)
        torch.testing.assert_close(lora.merge(model)(tokens, mask=mask), before)


@pytest.mark.parametrize("kind", ["apertus", "gemma4_text", "deepseek_v3"])
def test_new_weights_are_all_set(kind: str) -> None:
    with torch.device("meta"):
        model = build(described(settings_of(kind)))
    model.to_empty(device="cpu")
    for weight in model.parameters():
        weight.data.fill_(torch.nan)  # as memory may be that nothing has set
    model.init_weights()
    assert all(weight.isfinite().all() for weight in model.parameters())


def test_counts_are_those_of_transformers() -> None:
    theirs = reference("mixtral")
    config = described(settings_of("mixtral"))
    assert config.parameters() == theirs.num_parameters()
    idle = sum(x.numel() for x in theirs.parameters() if x.ndim == 3) // 2  # 2 experts of 4
    outside = theirs.get_input_embeddings().weight.numel()
    matrices = sum(x.numel() for x in theirs.parameters() if x.ndim > 1)
    assert config.matmul_parameters() == matrices - idle - outside
    assert isinstance(build(config), TransformersModel)
