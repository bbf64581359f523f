"""Recipes of examples/ have a header that tells how to run them, and train; notebooks run."""

import functools
import importlib
import os
import re
import shlex
import sys
import types
from pathlib import Path

import pytest
import torch
import yaml
from transformers import (
    AttentionInterface,
    AutoModelForCausalLM,
    LlamaConfig,
    Qwen3Config,
    Starcoder2Config,
)

from longctx import cli
from longctx.cli import parse
from longctx.config import presets
from longctx.config.train_config import TrainConfig
from longctx.runs import metrics_file, run_folder
from tests.hf.families.parity import write_tokenizer
from tests.processes import PYTHONPATH, ROOT, finished, train_together

EXAMPLES = ROOT / "examples"
RECIPES = sorted(EXAMPLES.glob("*.yaml"), key=lambda path: path.stem)
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
SIZES = {
    **{"vocab_size": 301, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64},
    **{"bos_token_id": None, "eos_token_id": 0, "pad_token_id": None},
}
# The model that takes the place of a recipe's own
MODELS = {
    "stretch-to-128k": functools.partial(Qwen3Config, head_dim=16),
    "conversations": LlamaConfig,
    "dpo": LlamaConfig,
    "transformers-model": functools.partial(Starcoder2Config, sliding_window=32),
}
SMALL = ["seq_len=128", "max_steps=2", "val_rows=2", "workers=0", "tracker=none", "device=cpu"]
SHAPE = ["model.layers=1", "model.channels=64", "model.heads=4", "model.kv_heads=2", "model.ffn=64"]
SHAPE += ["model.vocab_size=null", "data.vocab_size=300", "data.documents=40"]
OWN = {
    "conversations": ["seq_len=512"],
    "dpo": ["seq_len=1024"],
    "fp8-1b": ["precision=fp32"],
    # A shorter sequence may hold no answer, and then a step has no loss
    "stretch-to-128k": ["data.mix.facts.length=600", "data.documents=20", "seq_len=512"],
    "transformers-model": ["data.documents=40"],
    "two-gpus-256k": ["data.length=600"],
}


def header(recipe: Path) -> dict[str, str]:
    """Return the fields of a recipe's first lines, such as Command and Memory."""
    return dict(re.findall(r"^# ([A-Z][a-z]+): +(.*)$", recipe.read_text(), re.MULTILINE))


def jobs(recipe: Path, overrides: list[str]) -> list[list[str]]:
    """Return train.py's arguments in each run of a recipe; `overrides` replace its keys."""
    _, _, *words = shlex.split(header(recipe)["Command"])
    is_sweep = words[0] == "-m"
    mine = {word.partition("=")[0] for word in overrides}
    kept = [word for word in words[is_sweep:] if word.partition("=")[0] not in mine]
    return cli.jobs([*kept, *overrides]) if is_sweep else [[*kept, *overrides]]


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.stem)
def test_a_header_tells_command_and_cost(recipe, monkeypatch):
    monkeypatch.chdir(ROOT)
    keys = {"Command", "Hardware", "Minutes", "Memory", "Numbers", "Then"}
    assert header(recipe).keys() >= keys
    assert recipe.name in (EXAMPLES / "README.md").read_text()
    keys = run_folder.flat(yaml.safe_load(recipe.read_text()))
    written = {presets.GROUP_OF.get(x, x) for x in parse.full_keys(TrainConfig, keys).values()}
    for words in jobs(recipe, []):
        typed = {word.partition("=")[0] for word in words if "=" in word}
        request = cli.compose("train", words)
        assert request.overrides.keys() == written | typed
        assert all(Path(path).exists() for path in [request.config.data.path] if path)


def small_model(name: str, folder: Path) -> list[str]:
    """Return the arguments that put a small model in the place of the recipe's own."""
    if name not in MODELS:
        return SHAPE
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(MODELS[name](**SIZES)).save_pretrained(folder)
    write_tokenizer(folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return [f"init={folder}"]


@pytest.mark.slow  # half a minute for all, of which the two processes take half
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.stem)
def test_a_recipe_trains_two_steps(recipe, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("LONGCTX_CACHE", str(tmp_path / "cache"))
    own = OWN.get(recipe.stem, [])
    replaced = {word.partition("=")[0] for word in own}
    sizes = [word for word in SMALL if word.partition("=")[0] not in replaced] + own
    sizes += [f"runs={tmp_path / 'runs'}", *small_model(recipe.stem, tmp_path / "model")]
    for job in jobs(recipe, sizes):
        if recipe.stem.startswith("two-gpus"):
            train_together(2, [job])
        else:
            assert cli.main(["train", *job]) == 0
    runs = list((tmp_path / "runs").iterdir())
    assert len(runs) == len(jobs(recipe, sizes))
    for run in runs:
        assert any("loss" in row and row["step"] == 2 for row in metrics_file.read(run))


@pytest.mark.slow  # 5 and 11 seconds: a kernel each, and a run of 30 steps
@pytest.mark.no_gpu
@pytest.mark.parametrize("path", sorted((ROOT / "notebooks").glob("*.ipynb")), ids=lambda p: p.stem)
def test_a_notebook_runs(path, tmp_path):
    nbclient, nbformat = map(pytest.importorskip, ("nbclient", "nbformat"))
    notebook = nbformat.read(path, as_version=4)
    resources = {"metadata": {"path": str(tmp_path)}}
    client = nbclient.NotebookClient(notebook, timeout=100, resources=resources)
    cache = str(tmp_path / "cache")
    client.execute(env=os.environ | {"PYTHONPATH": PYTHONPATH, "LONGCTX_CACHE": cache})


@pytest.mark.slow  # imports transformers, and trains twice
def test_scripts_of_other_trainers_train(tmp_path):
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(LlamaConfig(**SIZES)).save_pretrained(tmp_path / "model")
    write_tokenizer(tmp_path / "model")
    text = tmp_path / "text.txt"
    text.write_text("".join(f"line {number} of a rose\n" for number in range(200)))
    scripts = [EXAMPLES / "trainers" / f"{name}.py" for name in ("hf_trainer", "trl_sft")]
    code = "import os, runpy\n"
    for script in scripts:
        code += f"os.makedirs({script.stem!r}); os.chdir({script.stem!r})\n"
        code += f"runpy.run_path({str(script)!r}, run_name='__main__'); os.chdir('..')\n"
    words = [code, str(tmp_path / "model"), str(text)]
    process = finished("-c", words, tmp_path, CUDA_VISIBLE_DEVICES="")
    assert process.returncode == 0, process.stderr
    for script in scripts:
        assert (tmp_path / script.stem / "trained" / "model.safetensors").is_file()


def test_the_plugin_of_axolotl_registers_the_attention(monkeypatch):
    """Axolotl is not installed: its class is replaced."""
    keys = yaml.safe_load((EXAMPLES / "trainers" / "axolotl.yaml").read_text())
    module, _, name = keys["plugins"][0].rpartition(".")
    base = types.ModuleType("axolotl.integrations.base")
    base.BasePlugin = object
    for package in ("axolotl", "axolotl.integrations"):
        monkeypatch.setitem(sys.modules, package, types.ModuleType(package))
    monkeypatch.setitem(sys.modules, base.__name__, base)
    monkeypatch.syspath_prepend(EXAMPLES / "trainers")
    assert hasattr(importlib.import_module(module), name)
    assert keys["attn_implementation"] in AttentionInterface._global_mapping
