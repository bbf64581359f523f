"""Runs that start from a Hugging Face folder: its weights, its tokenizer, and nothing of it needed
afterwards.
"""

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import huggingface_hub
import pytest
import torch
import yaml
from peft import PeftModel
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
)

import eval as evaluate
import train
from longctx import files
from longctx.cli import main as export
from longctx.config.model_config import LoraConfig
from longctx.config.train_config import TrainConfig
from longctx.data import tokenizer as bpe
from longctx.evaluation.subject import load_model
from longctx.planner.workload import workload_of
from longctx.runs import run_folder
from longctx.training.resolve import default_learning_rate, scheduled
from tests.training.sample_run import Overrides, check_equal_weights, newest, weights


@pytest.fixture
def folder(tmp_path: Path, corpus: Path) -> Path:
    """A model for 96 tokens, as transformers saves it."""
    place = tmp_path / "models" / "Small-1.5"
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    config = LlamaConfig(vocab_size=320, intermediate_size=48, max_position_embeddings=96, **sizes)
    LlamaForCausalLM(config).save_pretrained(place)
    bpe.train([file.read_text() for file in sorted(corpus.iterdir())], 310).save(
        place / "tokenizer.json"
    )
    return place


@pytest.fixture
def start(overrides: Overrides, folder: Path) -> Overrides:
    """The command line of a tiny run from `folder`."""
    left_out = {
        "model": None,
        "model__layers": None,
        "model__channels": None,
        "model__ffn": None,
        "data__vocab_size": None,
    }
    return lambda **changes: overrides(**(left_out | {"init": folder, "max_steps": 2} | changes))


def test_a_run_begins_with_the_weights_and_goes_on_without_the_folder(
    start: Overrides, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train.main(start(max_steps=4, checkpoint_every=2, runs=tmp_path / "straight")) == 0
    straight = tmp_path / "straight" / "Small-1.5-flash-64-text-001"
    theirs = LlamaForCausalLM.from_pretrained(folder)
    line = f"model      weights of {folder}, {theirs.num_parameters():,} parameters\n"
    assert line in capsys.readouterr().out
    first = run_folder.read_metrics(straight)[0]
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


def test_a_model_of_the_hub_is_read_from_its_cache_and_recorded_with_its_commit(
    start: Overrides,
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    commit = "c0ffee" + "0" * 34
    model = tmp_path / "hub" / "models--me--small"
    snapshot = model / "snapshots" / commit
    for place in (snapshot, model / "blobs", model / "refs"):
        place.mkdir(parents=True)
    (model / "refs" / "main").write_text(commit)
    for number, file in enumerate(sorted(folder.iterdir())):
        file.rename(model / "blobs" / str(number))
        (snapshot / file.name).symlink_to(f"../../blobs/{number}")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)

    (snapshot / "model.safetensors").rename(snapshot / "away")
    assert train.main(start(init="me/small")) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith(f"error: init=me/small@{commit}: the model has no model.safetensors")
    assert not (tmp_path / "runs").exists()
    (snapshot / "away").rename(snapshot / "model.safetensors")
    assert train.main(start(init="me/small", max_steps=1, lr=0.0)) == 0
    run = next((tmp_path / "runs").iterdir())
    assert run.name.startswith("small-flash-64-")
    assert yaml.safe_load((run / "config.yaml").read_text())["init"] == f"me/small@{commit}"
    tokens = torch.randint(320, (1, 50))
    theirs = LlamaForCausalLM.from_pretrained(snapshot)
    torch.testing.assert_close(load_model(run)[0](tokens), theirs(tokens).logits)

    # the branch moves on, and a repetition does not
    (model / "refs" / "main").write_text("d" * 40)
    assert train.main([str(run / "config.yaml"), "name=again"]) == 0
    check_equal_weights(run, tmp_path / "runs" / "again")
    shutil.rmtree(model)
    assert train.main([f"resume={run}", "max_steps=2"]) == 0


def test_a_stretched_run_opens_stretched_in_transformers(
    start: Overrides, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train.main(start(name="r", lr=0.01, seq_len=384, rope="auto", data__documents=20)) == 0
    assert "rope auto: yarn: 96 tokens × 4 = 384" in capsys.readouterr().out
    run, out = tmp_path / "runs" / "r", tmp_path / "out"
    assert export(["export", str(run), str(out)]) == 0
    model, _, config = load_model(run)
    assert config["model"]["rope_scaling"]["factor"] == 4.0
    theirs = AutoModelForCausalLM.from_pretrained(out).eval()
    assert theirs.config.rope_parameters["rope_type"] == "yarn"
    assert theirs.config.max_position_embeddings == 384
    tokens = torch.randint(320, (1, 300))
    expected = model(tokens)
    assert (theirs(tokens).logits - expected).abs().max() < 1e-4 * expected.abs().max()

    again = start(name="more", init=out, seq_len=768, rope="auto", data__documents=20)
    assert train.main(again) == 0
    assert "rope auto: yarn: 96 tokens × 8 = 768" in capsys.readouterr().out
    assert train.main(start(name="no", rope="yarn")) == 2
    assert "rope=yarn: the weights' 96 tokens hold seq_len=64 already" in capsys.readouterr().err


def test_what_was_trained_opens_in_transformers(
    start: Overrides, folder: Path, tmp_path: Path
) -> None:
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    (folder / "tokenizer_config.json").write_text(
        json.dumps(settings | {"chat_template": template})
    )
    (folder / "generation_config.json").write_text(
        json.dumps({"eos_token_id": [0, 5], "temperature": 0.5})
    )
    assert train.main(start(name="r", lr=0.01)) == 0
    run, out = tmp_path / "runs" / "r", tmp_path / "out"
    assert export(["export", str(run), str(out)]) == 0
    model, tokenizer, _ = load_model(run)
    theirs = AutoModelForCausalLM.from_pretrained(out).eval()
    tokens = torch.randint(320, (2, 90))
    expected = model(tokens)
    assert (theirs(tokens).logits - expected).abs().max() < 1e-5 * expected.abs().max()
    assert theirs.config.max_position_embeddings == 96
    text = "the row of a long text: Ada's 1234 names,\n\n  come again"
    opened = AutoTokenizer.from_pretrained(out)
    assert opened(text)["input_ids"] == tokenizer.encode(text)
    assert opened.chat_template == template
    assert opened.eos_token_id == tokenizer.eos_id == 0
    assert theirs.generation_config.eos_token_id == theirs.config.eos_token_id == [0, 5]

    assert train.main(start(name="again", init=out, max_steps=1, lr=0.0)) == 0
    torch.testing.assert_close(load_model(tmp_path / "runs" / "again")[0](tokens), expected)


def test_lora_from_start_to_export(
    start: Overrides, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tuned = {
        "lora__rank": 4,
        "lr": 0.05,
        "max_steps": 4,
        "checkpoint_every": 2,
        "keep_checkpoints": 9,
    }
    assert train.main(start(name="r", seq_len=192, rope="yarn", **tuned)) == 0
    assert "frozen; LoRA of rank 4 trains" in capsys.readouterr().out
    run, out = tmp_path / "runs" / "r", tmp_path / "out"
    saved = newest(run)
    theirs = LlamaForCausalLM.from_pretrained(folder)
    assert torch.equal(
        saved["state_dict"]["model.embed.weight"], theirs.get_input_embeddings().weight
    )
    assert len(saved["optimizer_states"][0]["state"]) == 2 * 4 * 2

    assert train.main(start(name="cut", seq_len=192, rope="yarn", **tuned)) == 0
    cut = tmp_path / "runs" / "cut"
    files.remove(cut / "checkpoints" / "step-00000004.ckpt")
    assert train.main([f"resume={cut}"]) == 0
    check_equal_weights(run, cut)

    model, _, _ = load_model(run)
    tokens = torch.randint(320, (1, 150))
    expected = model(tokens)
    assert export(["export", str(run), str(out)]) == 0
    opened = AutoModelForCausalLM.from_pretrained(out).eval()
    assert (opened(tokens).logits - expected).abs().max() < 1e-4 * expected.abs().max()
    assert (theirs(tokens).logits - expected).abs().max() > 1e-2 * expected.abs().max()
    assert export(["export", str(run), str(tmp_path / "adapter"), "adapter=true"]) == 0
    described = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert (described["r"], described["lora_alpha"], described["base_model_name_or_path"]) == (
        4,
        8.0,
        str(folder),
    )
    assert "its positions are stretched, which peft does not do" in capsys.readouterr().out
    base = AutoModelForCausalLM.from_pretrained(
        folder, config=AutoConfig.from_pretrained(tmp_path / "adapter")
    )
    adapted = PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    assert (adapted(tokens).logits - expected).abs().max() < 1e-4 * expected.abs().max()
    assert evaluate.main([f"checkpoint={tmp_path / 'adapter'}"]) == 2
    assert "an adapter, which lacks the weights it adds to" in capsys.readouterr().err
    assert export(["export", str(run), str(tmp_path / "no"), "adapter=maybe"]) == 2
    assert train.main(start(name="full", max_steps=1)) == 0
    assert (
        export(["export", str(tmp_path / "runs" / "full"), str(tmp_path / "no"), "adapter=true"])
        == 2
    )
    assert "was trained without lora.rank" in capsys.readouterr().err


def test_an_adapter_of_weights_that_kept_their_positions_is_all_that_is_written(
    start: Overrides, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train.main(start(name="r", seq_len=64, rope="auto", lora__rank=2, max_steps=1)) == 0
    assert (
        export(["export", str(tmp_path / "runs" / "r"), str(tmp_path / "adapter"), "adapter=true"])
        == 0
    )
    assert "positions are stretched" not in capsys.readouterr().out
    assert {file.name for file in (tmp_path / "adapter").iterdir()} == {
        "adapter_config.json",
        "adapter_model.safetensors",
    }


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


def test_rates_of_trained_weights_are_smaller() -> None:
    plain, tuned = TrainConfig(), TrainConfig(init="folder")
    assert default_learning_rate(plain, plain.model) == 0.5 / plain.model.channels
    assert default_learning_rate(tuned, plain.model) == 2e-5
    assert default_learning_rate(replace(tuned, lora=LoraConfig(rank=8)), plain.model) == 2e-4
    fixed = replace(tuned, lr=0.1)
    assert scheduled(fixed, workload_of(fixed, "cpu", 64)).lr == 0.1


def test_evaluation_of_a_folder(
    monkeypatch: pytest.MonkeyPatch,
    folder: Path,
    corpus: Path,
    start: Overrides,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    before = sorted(folder.rglob("*"))
    documents = ["data=text", f"data.path={corpus}", "documents=5", "device=cpu"]
    assert evaluate.main([f"checkpoint={folder}", *documents]) == 0
    assert sorted(folder.rglob("*")) == before
    [file] = Path("evaluations").glob(f"{folder.name}-*/eval/*.json")
    assert str(file) in capsys.readouterr().out
    assert file.name == "text-Small-1.5-96-48-flash.json"
    result = json.loads(file.read_text())
    assert (result["context"], result["trained_seq_len"], len(result["documents"])) == (96, 96, 5)
    assert result["total"]["perplexity"] == pytest.approx(320, rel=0.2)

    assert train.main(start(name="still", max_steps=1, lr=0.0)) == 0
    run = tmp_path / "runs" / "still"
    assert evaluate.main([f"checkpoint={run}", "seq_len=96", *documents]) == 0
    [of_run] = (run / "eval").glob("*.json")
    assert json.loads(of_run.read_text())["total"]["nats"] == pytest.approx(
        result["total"]["nats"], rel=1e-6
    )

    capsys.readouterr()
    assert evaluate.main([f"checkpoint={folder}", "device=cpu"]) == 2
    assert (
        "a Hugging Face folder has no documents of its own; add data=text"
        in capsys.readouterr().err
    )
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "mamba"}))
    assert evaluate.main([f"checkpoint={folder}", *documents]) == 2
    assert "model_type=mamba is not covered yet" in capsys.readouterr().err


def test_evaluation_of_a_folder_that_cannot_be_written(
    folder: Path,
    corpus: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    # Chmod does not keep root out
    monkeypatch.setattr(os, "access", lambda path, mode: mode != os.W_OK)
    assert (
        evaluate.main([f"checkpoint={folder}", "data=text", f"data.path={corpus}", "device=cpu"])
        == 2
    )
    assert "no permission to write the result into" in capsys.readouterr().err


def test_what_the_weights_leave_open_can_be_said(start: Overrides, tmp_path: Path) -> None:
    changes = {"memory": "balanced", "memory__loss_chunk": 50, "model__vocab_size": 384}
    assert train.main(start(name="r", **changes)) == 0
    model, _, config = load_model(tmp_path / "runs" / "r")
    assert model.config.vocab_size == 384
    assert (config["memory"]["recompute"], config["memory"]["loss_chunk"]) == ("block", 50)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "tiny"}, "model=tiny: init="),
        ({"model__layers": 3}, "model.layers=3: the weights of init="),
        ({"model__context": 3}, "model.context=3: the weights of init="),
        ({"model__vocab_size": 300}, "model.vocab_size=300: "),
        (
            {"init": None, "lora__rank": 8},
            "lora.rank=8: adds to trained weights, and init= names none",
        ),
        ({"init": "nowhere"}, "init=nowhere: no such file or folder"),
        ({"init": ""}, "init= names no folder"),
        ({"init": "."}, "config.json: no such file"),
        ({"data__tokenizer": "nowhere"}, "nowhere"),
        ({"data__vocab_size": 300}, "data.vocab_size=300: init="),
    ],
)
def test_a_mistake_is_one_line_and_leaves_nothing(
    start: Overrides,
    tmp_path: Path,
    refused: Callable[[int, str], str],
    changes: dict[str, object],
    message: str,
) -> None:
    refused(train.main(start(**changes)), message)
    assert not (tmp_path / "runs").exists()


def test_broken_weights_are_found_before_the_run_begins(
    start: Overrides, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-9])
    assert train.main(start()) == 2
    assert "model.safetensors: not a whole safetensors file" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_a_resumed_run_keeps_what_it_began_with(
    start: Overrides, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "runs" / "r"
    assert train.main(start(name="r", seq_len=384, rope="yarn", max_steps=2)) == 0
    assert train.main([f"resume={run}", "init=elsewhere"]) == 2
    assert "init cannot change when" in capsys.readouterr().err
    text = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(text.replace("\n  type: yarn", "\n  type: linear"))
    assert train.main([f"resume={run}", "max_steps=3"]) == 2
    assert "rope.type=linear, where the run began with yarn" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["outside", "fifo", "zero", "loop"])
@pytest.mark.parametrize(
    "name",
    [
        *("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"),
        *("chat_template.jinja", "generation_config.json"),
    ],
)
def test_what_lies_outside_of_the_folder_is_not_read(
    start: Overrides,
    folder: Path,
    tmp_path: Path,
    refused: Callable[[int, str], str],
    name: str,
    kind: str,
) -> None:
    file = folder / name
    outside = tmp_path / f"private-{name}"
    outside.write_bytes(file.read_bytes() if file.is_file() else b"{}")
    file.unlink(missing_ok=True)
    if kind == "fifo":
        os.mkfifo(file)
    else:
        file.symlink_to({"outside": str(outside), "zero": "/dev/zero", "loop": name}[kind])
    refused(train.main(start(max_steps=1)), str(file))
    assert not (tmp_path / "runs").exists()


def test_the_cache_of_hugging_face_is_a_folder_of_links(
    start: Overrides, folder: Path, tmp_path: Path
) -> None:
    blobs, snapshot = tmp_path / "m" / "blobs", tmp_path / "m" / "snapshots" / "abc"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for file in folder.iterdir():
        shutil.copyfile(file, blobs / file.name)
        (snapshot / file.name).symlink_to(Path("../../blobs", file.name))
    assert train.main(start(init=snapshot, max_steps=1)) == 0


@pytest.mark.parametrize("rank", [None, 2])
def test_a_run_begins_with_the_weights_of_another(
    overrides: Overrides, tmp_path: Path, rank: int | None
) -> None:
    runs = tmp_path / "runs"
    assert train.main(overrides(name="first", max_steps=2, lr=0.01)) == 0
    chosen = {"model": None, "model__layers": None, "model__channels": None, "model__ffn": None}
    chosen |= {"data__vocab_size": None, "lora__rank": rank, "max_steps": 1}
    assert train.main(overrides(init=runs / "first", name="second", **chosen)) == 0
    first, second = (run_folder.read_metrics(runs / name) for name in ("first", "second"))
    before, after = first[-1], second[0]
    assert after["step"] == 0
    assert after["val_loss"] == pytest.approx(before["val_loss"], rel=1e-6)
    saved = run_folder.read_config(runs / "second")
    assert saved["model.channels"] == 32 and saved["lr"] != 0.01
    tokenizers = [(runs / name / "tokenizer.json").read_text() for name in ("first", "second")]
    assert tokenizers[0] == tokenizers[1]
    assert train.main([f"resume={runs / 'second'}", "max_steps=2"]) == 0
