"""Folders that are written: whole or not at all, and only if transformers has their class."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from longctx.cli import main
from longctx.data.tokenizer import train
from longctx.hf.export import export
from longctx.model import GPT, GPTConfig
from longctx.runs import checkpoints
from longctx.runs.checkpoint_write import Saving
from tests.training.sample_run import newest, replace_newest
from tests.written import WITHOUT_OPTIMIZER, alone, files_below, write

SMALL: dict[str, Any] = {
    **{"vocab_size": 300, "layers": 2, "channels": 24, "heads": 4, "kv_heads": 2, "ffn": 40}
}
CONFIG = {"seq_len": 48, "model": SMALL}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run's folder with one checkpoint of random weights."""
    folder = tmp_path / "runs" / "a"
    (folder / "checkpoints").mkdir(parents=True)
    train(["a rose is a rose"], 280).save(folder / "tokenizer.json")
    torch.manual_seed(0)
    weights = {f"model.{name}": x for name, x in GPT(GPTConfig(**SMALL)).state_dict().items()}
    save(weights, CONFIG, folder / "checkpoints" / "step-00000007.ckpt")
    return folder


def save(weights: dict[str, torch.Tensor], config: dict[str, Any], path: Path) -> None:
    """Write a checkpoint of `weights` alone."""
    tensors = {name: alone(x) for name, x in weights.items()}
    state = {"random": checkpoints.random_state(), "steps_done": 7}
    write(Saving(path, {"longctx": {"config": config}} | state | WITHOUT_OPTIMIZER, tensors))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"qkv_bias": True, "qk_norm": "head"}, r"no class of .*model\.qkv_bias=true"),
        ({"qk_norm": "head", "nope_layers": [1]}, "no class of"),
        ({"window": 8, "qkv_bias": True, "out_bias": True}, "no class of"),
        ({"channels": 26, "head_dim": 8}, "no class of"),
        ({"qkv_bias": True}, r"tokenizer\.json: does not normalize and split text as Qwen2 does"),
    ],
)
def test_model_without_a_class_in_transformers_is_refused(run, tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        export(GPT(GPTConfig(**SMALL | changes)), run, tmp_path / "out", context=48)
    assert [path.name for path in tmp_path.iterdir()] == ["runs"]


def test_an_export_that_fails_leaves_nothing(run, tmp_path):
    with files_below(20_000), pytest.raises(OSError, match="out: cannot be written"):
        export(GPT(GPTConfig(**SMALL)), run, tmp_path / "out", context=48)
    assert [path.name for path in tmp_path.iterdir()] == ["runs"]


def test_a_damaged_checkpoint_is_not_exported(run, tmp_path, refused):
    path = run / "checkpoints" / "step-00000007.ckpt"
    (file,) = path.glob("*.safetensors")
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    refused(main(["export", str(run), str(tmp_path / "out")]), f"{path}: damaged")
    assert not (tmp_path / "out").exists()


def test_the_command_writes_the_newest_checkpoint(run, tmp_path, capsys):
    (tmp_path / "out").mkdir()
    assert main(["export", str(run), str(tmp_path / "out"), "dtype=bf16"]) == 0
    assert "step-00000007.ckpt, bf16, for 48 tokens" in capsys.readouterr().out
    names = "config.json generation_config.json model.safetensors tokenizer.json"
    names += " tokenizer_config.json"
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == names.split()
    modes = {path.stat().st_mode for path in (tmp_path / "out").iterdir()}
    assert len(modes) == 1, "others may read the weights where they may read the rest"
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert theirs.dtype == torch.bfloat16
    torch.manual_seed(0)
    ours = GPT(GPTConfig(**SMALL))
    tokens = torch.randint(300, (1, 48))
    expected = ours.bfloat16().float()(tokens)
    torch.testing.assert_close(theirs.float()(tokens).logits, expected, rtol=0, atol=1e-5)
    assert theirs.config.max_position_embeddings == 48
    checkpoint = str(run / "checkpoints" / "step-00000007.ckpt")
    assert main(["export", checkpoint, str(tmp_path / "two"), "shard_gb=1e-5"]) == 0
    assert len(list((tmp_path / "two").glob("model-*.safetensors"))) > 2


@pytest.mark.parametrize(
    ("number", "dtype", "warns"),
    [(float("nan"), "fp32", True), (7e4, "fp16", True), (7e4, "bf16", False)],
)
def test_an_export_of_numbers_not_finite_warns(run, tmp_path, capsys, number, dtype, warns):
    content = newest(run)
    content["state_dict"]["model.blocks.1.mlp.gate_up.weight"][50, 3] = number
    replace_newest(content, run)
    assert main(["export", str(run), str(tmp_path / "out"), f"dtype={dtype}"]) == 0
    assert ("model.layers.1.mlp.up_proj.weight" in capsys.readouterr().err) == warns


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["export", "{run}"], "OUT is missing"),
        (["export", "{run}", "{run}"], "exists already, and is no empty folder"),
        (["export", "{run}", "out.gguf"], "out.gguf: an export is a folder"),
        (["export", "{new}", "{new}"], "no such file or folder"),
        (["export", "{run}/checkpoints", "{new}"], "neither a run"),
        (["export", "{run}/tokenizer.json", "{new}"], "neither a run"),
    ],
)
def test_a_mistake_is_one_line(run, tmp_path, refused, overrides, message):
    words = [override.format(run=run, new=tmp_path / "new") for override in overrides]
    refused(main(words), message)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("config", [CONFIG, {"model": {"rows": 3}}])
def test_weights_of_another_model_are_refused(config, run, refused):
    save({"model.x": torch.zeros(3)}, config, run / "checkpoints" / "step-00000007.ckpt")
    refused(main(["export", str(run), str(run / "out")]), "error: ")
