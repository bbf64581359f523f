"""Runs that start from a Hugging Face folder or from another run, and need nothing of it
afterwards.
"""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from transformers import LlamaForCausalLM

import eval as evaluate
import train
from longctx import files
from longctx.config.model_config import LoraConfig
from longctx.config.train_config import TrainConfig
from longctx.data.chat import Template
from longctx.evaluation.load import load_model
from longctx.planner.workload import workload_of
from longctx.runs import metrics_file, run_folder
from longctx.training.resolve import default_learning_rate, scheduled
from tests.training.sample_run import Overrides, check_equal_weights, weights


def test_a_run_needs_the_folder_of_init_only_once(
    start: Overrides, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train.main(start(max_steps=4, checkpoint_every=2, runs=tmp_path / "straight")) == 0
    straight = tmp_path / "straight" / "Small-1.5-flash-64-text-001"
    theirs = LlamaForCausalLM.from_pretrained(folder)
    line = f"model      weights of {folder}, {theirs.num_parameters():,} parameters\n"
    assert line in capsys.readouterr().out
    first = metrics_file.read(straight)[0]
    assert first["step"] == 0
    config = yaml.safe_load((straight / "config.yaml").read_text())
    assert (config["init"], config["data"]["tokenizer"]) == (str(folder), str(folder))
    sizes = {"layers": 2, "channels": 32, "ffn": 48, "vocab_size": 320, "context": 96}
    expected = {**sizes, "tied": False}
    assert {key: config["model"][key] for key in expected} == expected
    assert train.main(start(max_steps=1, lr=0.0, name="still")) == 0
    still, tokenizer, _ = load_model(tmp_path / "runs" / "still")
    tokens = torch.randint(320, (1, 50))
    torch.testing.assert_close(still(tokens), theirs(tokens).logits)
    assert tokenizer.vocab_size == 310

    assert train.main(start(max_steps=4, checkpoint_every=2, keep_checkpoints=9, name="cut")) == 0
    cut = tmp_path / "runs" / "cut"
    files.remove(cut / "checkpoints" / "step-00000004.ckpt")
    shutil.rmtree(folder)
    assert train.main([f"resume={cut}"]) == 0
    check_equal_weights(straight, cut)


@pytest.mark.parametrize("rank", [None, 2])
def test_a_run_begins_with_the_weights_of_another(
    overrides: Overrides, tmp_path: Path, rank: int | None
) -> None:
    runs = tmp_path / "runs"
    assert train.main(overrides(name="first", max_steps=2, lr=0.01)) == 0
    chosen = {"model": None, "model__layers": None, "model__channels": None, "model__ffn": None}
    chosen |= {"data__vocab_size": None, "lora__rank": rank, "max_steps": 1}
    assert train.main(overrides(init=runs / "first", name="second", **chosen)) == 0
    first, second = (metrics_file.read(runs / name) for name in ("first", "second"))
    before, after = first[-1], second[0]
    assert after["step"] == 0
    assert after["val_loss"] == pytest.approx(before["val_loss"], rel=1e-6)
    saved = run_folder.read_config(runs / "second")
    assert saved["model.channels"] == 32 and saved["lr"] != 0.01
    tokenizers = [(runs / name / "tokenizer.json").read_text() for name in ("first", "second")]
    assert tokenizers[0] == tokenizers[1]
    assert train.main([f"resume={runs / 'second'}", "max_steps=2"]) == 0


def test_what_the_weights_leave_open_can_be_said(start: Overrides, tmp_path: Path) -> None:
    changes = {"memory": "balanced", "memory__loss_chunk": 50, "model__vocab_size": 384}
    assert train.main(start(name="r", **changes)) == 0
    model, _, config = load_model(tmp_path / "runs" / "r")
    assert model.config.vocab_size == 384
    assert (config["memory"]["recompute"], config["memory"]["loss_chunk"]) == ("block", 50)


@pytest.mark.parametrize(
    ("seq_len", "rope", "warns"), [(96, "keep", False), (192, "keep", True), (192, "auto", False)]
)
def test_positions_beyond_the_trained_ones_warn(
    start: Overrides, capsys: pytest.CaptureFixture[str], seq_len: int, rope: str, warns: bool
) -> None:
    chosen = {} if rope == "keep" else {"rope": rope}
    assert train.main(start(name="r", seq_len=seq_len, max_steps=1, **chosen)) == 0
    assert ("2.0 times the 96 tokens" in (said := capsys.readouterr().out)) == warns
    assert ("rope=auto" in said) == warns


def test_conversations_by_the_folders_own_template(
    start: Overrides, folder: Path, tmp_path: Path
) -> None:
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    template = "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"
    template += "{% if add_generation_prompt %}[assistant]{% endif %}"
    named = [{"name": "default", "template": template}, {"name": "tools", "template": "x"}]
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": named}))
    talk = [
        {"role": "user", "content": "the row?"},
        {"role": "assistant", "content": "a long text"},
    ]
    (tmp_path / "talks.jsonl").write_text(
        "\n".join(json.dumps({"messages": talk * n}) for n in range(1, 12))
    )
    changes = {
        "data__path": tmp_path / "talks.jsonl",
        "data__chat": "true",
        "max_steps": 4,
        "checkpoint_every": 2,
    }
    assert train.main(start(name="r", keep_checkpoints=9, **changes)) == 0
    run = tmp_path / "runs" / "r"
    straight = weights(run)
    assert (run / "chat_template.jinja").read_text() == template
    files.remove(run_folder.checkpoints(run)[-1])
    (folder / "tokenizer_config.json").unlink()
    assert train.main([f"resume={run}"]) == 0
    torch.testing.assert_close(weights(run), straight, rtol=0, atol=0)


@pytest.mark.parametrize("with_weights", [True, False])
def test_conversations_by_the_template_of_another(
    start: Overrides, overrides: Overrides, folder: Path, tmp_path: Path, with_weights: bool
) -> None:
    """A base model and the tokenizer of a tuned one, whose template names tokens."""
    tuned, run = tmp_path / "tuned", tmp_path / "runs" / "r"
    tuned.mkdir()
    shutil.copy(folder / "tokenizer.json", tuned)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    special = dict.fromkeys(("bos_token", "pad_token"), settings["eos_token"])
    template = (
        "{{ bos_token }}{{ pad_token }}{% for m in messages %}[{{ m.role }}] "
        "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{{ eos_token }}"
        "{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}"
    )
    about = json.dumps(settings | special | {"chat_template": template})
    (tuned / "tokenizer_config.json").write_text(about)
    talk = [{"role": "user", "content": "the row?"}, {"role": "assistant", "content": "a text"}]
    (tmp_path / "talks.jsonl").write_text("\n".join([json.dumps({"messages": talk})] * 40))
    begun = (start if with_weights else overrides)(
        name="r",
        data="text",
        data__path=tmp_path / "talks.jsonl",
        data__chat="true",
        data__tokenizer=tuned,
        max_steps=2,
    )
    begun = [word for word in begun if not word.startswith("data.vocab_size")]
    assert train.main(begun) == 0
    assert Template(run).fingerprint == Template(tuned).fingerprint
    if with_weights:
        shutil.rmtree(tuned)
    assert train.main([f"resume={run}", "max_steps=4"]) == 0
    assert evaluate.main([f"checkpoint={run}"]) == 0


def test_rates_of_trained_weights_are_smaller() -> None:
    plain, tuned = TrainConfig(), TrainConfig(init="folder")
    assert default_learning_rate(plain, plain.model) == 0.5 / plain.model.channels
    assert default_learning_rate(tuned, plain.model) == 2e-5
    assert default_learning_rate(replace(tuned, lora=LoraConfig(rank=8)), plain.model) == 2e-4
    fixed = replace(tuned, lr=0.1)
    assert scheduled(fixed, workload_of(fixed, "cpu", 64)).lr == 0.1
