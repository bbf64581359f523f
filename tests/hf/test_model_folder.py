"""Folders that transformers writes: what they compute here, refusals, and what comes back out."""

import json
import shutil
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig

from longctx.hf.export import export
from longctx.hf.model_folder import format_of, load_weights, pretrained, read_config
from longctx.model import GPT
from tests.hf.families.parity import OLD, SIZES, reference, write_tokenizer

Change = Callable[..., Path]
REFUSALS = yaml.safe_load(Path(__file__).with_name("refusals.yaml").read_text())


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    config = LlamaConfig(**deepcopy(SIZES), num_key_value_heads=2, head_dim=10)
    reference(config).save_pretrained(folder)
    write_tokenizer(folder)
    return folder


@pytest.fixture
def changed(llama: Path, tmp_path: Path) -> Change:
    """A copy of the folder whose config.json has other keys; None takes a key away."""

    def change(**keys: Any) -> Path:
        folder = tmp_path / "changed"
        shutil.copytree(llama, folder)
        config = json.loads((folder / "config.json").read_text()) | keys
        kept = {k: v for k, v in config.items() if v != "absent"}
        (folder / "config.json").write_text(json.dumps(kept))
        return folder

    return change


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_shards_hold_what_one_file_holds(llama, tmp_path, dtype):
    model = pretrained(llama, dtype=dtype)
    export(model, llama, tmp_path / "one")
    export(model, llama, tmp_path / "many", shard_bytes=40_000)
    index = json.loads((tmp_path / "many" / "model.safetensors.index.json").read_text())
    files = sorted(path.name for path in (tmp_path / "many").glob("model-*"))
    assert len(files) > 2
    assert files == sorted(set(index["weight_map"].values()))
    assert index["metadata"]["total_size"] == sum(x.nbytes for x in model.parameters())
    one, many = pretrained(tmp_path / "one"), pretrained(tmp_path / "many")
    assert one.embed.weight.dtype == many.embed.weight.dtype == dtype
    for a, b, c in zip(model.parameters(), one.parameters(), many.parameters(), strict=True):
        assert torch.equal(a, b)
        assert torch.equal(a, c)
    opened = AutoModelForCausalLM.from_pretrained(tmp_path / "many")
    assert torch.equal(opened.lm_head.weight, model.lm_head_weight)


OLDER = {"rope_parameters": "absent", "rope_theta": 5000.0, "rope_scaling": None}
OF_TOOLS = {"torch_dtype": "bfloat16", "unsloth_version": "2025.1", "use_cache": False}
OF_TOOLS |= {"pretraining_tp": 2, "attention_dropout": 0.1, "an_unknown_key": None}
OF_TOOLS |= {"_commit_hash": "5e1f", "_of_another_tool": {"x": 1}}


@pytest.mark.parametrize("keys", [OLDER, OF_TOOLS])
def test_keys_without_effect_and_of_older_files_are_read(changed, llama, keys):
    assert read_config(changed(**keys)) == read_config(llama)


def test_scaling_of_the_older_form_is_read_as_transformers_reads_it(changed):
    older = {"type": "yarn", "factor": 4.0}
    folder = changed(rope_parameters="absent", rope_theta=1000000.0, rope_scaling=older)
    opened = AutoModelForCausalLM.from_pretrained(folder).eval()
    assert read_config(folder).rope_scaling == {"rope_type": "yarn", "factor": 4.0, OLD: 64}
    tokens = torch.randint(301, (1, 150))
    expected = opened(tokens).logits
    assert (pretrained(folder)(tokens) - expected).abs().max() < 1e-4 * expected.abs().max()


@pytest.mark.parametrize(("rope", "message"), REFUSALS["ropes"])
@pytest.mark.parametrize("key", ["rope_parameters", "rope_scaling"])
def test_unsupported_ropes_are_refused_by_key(changed, key, rope, message):
    with pytest.raises(ValueError, match=rf"config\.json: {key}\.{message}") as caught:
        read_config(changed(**{key: rope}))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("keys", "message"), REFUSALS["keys"])
def test_unsupported_keys_are_refused_by_key_and_value(changed, keys, message):
    with pytest.raises(ValueError, match=message) as caught:
        read_config(changed(**keys))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("keys", "message"), REFUSALS["tensors"])
def test_every_tensor_is_accounted_for(changed, keys, message):
    with pytest.raises(ValueError, match=message) as caught:
        pretrained(changed(**keys))
    assert "\n" not in str(caught.value)


def test_old_buffers_and_a_copy_of_a_tied_head_are_accepted(tmp_path):
    config = LlamaConfig(**deepcopy(SIZES), num_key_value_heads=3, tie_word_embeddings=True)
    reference(config).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    save_file(tensors, tmp_path / "model.safetensors")
    assert pretrained(tmp_path).head is None


def test_a_larger_vocabulary_keeps_its_own_rows(llama):
    config = read_config(llama)
    config.vocab_size = 320
    model = GPT(config)
    before = model.embed.weight[301:].clone()
    load_weights(model, llama)
    small = pretrained(llama)
    assert torch.equal(model.embed.weight[:301], small.embed.weight)
    assert torch.equal(model.lm_head_weight[:301], small.lm_head_weight)
    assert torch.equal(model.embed.weight[301:], before)
    config.vocab_size = 300
    with pytest.raises(ValueError, match=r"model.vocab_size=300: .* has weights for 301 tokens"):
        format_of(config).check_weights(config, llama)


def test_a_pickle_is_not_read(llama, changed):
    folder = changed()
    (folder / "model.safetensors").unlink()
    torch.save({}, folder / "pytorch_model.bin")
    with pytest.raises(FileNotFoundError, match=r"model\.safetensors: no such file; pickles"):
        pretrained(folder)


@pytest.mark.parametrize(
    "name", ["../../x.safetensors", "/x.safetensors", "a/b.safetensors", "..", "x.bin", 3]
)
def test_an_index_names_only_safetensors_beside_it(changed, name):
    folder = changed()
    shutil.move(folder / "model.safetensors", folder.parent.parent / "x.safetensors")
    index = {"weight_map": {"model.norm.weight": name}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match="is not the name of a safetensors file beside it"):
        pretrained(folder)


def test_broken_and_missing_shards_are_refused(llama, tmp_path):
    folder = tmp_path / "many"
    export(pretrained(llama), llama, folder, shard_bytes=40_000)
    index = folder / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    last = max(content["weight_map"].values())
    intact = (folder / last).read_bytes()
    (folder / last).write_bytes(intact[:-4])
    with pytest.raises(ValueError, match="not a whole safetensors file"):
        pretrained(folder)
    (folder / last).unlink()
    with pytest.raises(FileNotFoundError, match=f"{last}: no such file"):
        pretrained(folder)
    first = min(content["weight_map"].values())
    (folder / last).write_bytes((folder / first).read_bytes())
    with pytest.raises(ValueError, match=f"{last}: .* is in {first}, too"):
        pretrained(folder)
