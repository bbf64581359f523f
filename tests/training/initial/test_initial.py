"""Runs that begin with a Hugging Face folder, a model of the Hub or another run."""

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import tokenizers
import torch
import yaml
from transformers import LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

import eval as evaluate
import longctx
import train
from longctx.config.asked import workload_of
from longctx.config.train_config import TrainConfig
from longctx.data.chat import Template
from longctx.runs import metrics_file, run_folder
from longctx.spec.model_config import LoraConfig
from longctx.training.learning_rate import default_learning_rate
from longctx.training.objectives.preferences import DpoKeys
from longctx.training.run import scheduled
from tests.data.chat_templates import INST, SPACE, write, write_tokenizer
from tests.training.sample_run import check_equal_weights, check_resumes_exactly, steps
from tests.written import to_hub_cache

TALK = [{"role": "user", "content": "the row?"}, {"role": "assistant", "content": "a text"}]


def test_a_run_needs_the_folder_of_init_only_once(start, tuned, folder, tmp_path, capsys):
    settings = json.loads((folder / "config.json").read_text()) | {"attention_dropout": 0.1}
    (folder / "config.json").write_text(json.dumps(settings))
    assert train.main(start(max_steps=4, checkpoint_every=2, runs=tmp_path / "straight")) == 0
    straight = tmp_path / "straight" / "Small-1.5-flash-64-text-001"
    theirs = LlamaForCausalLM.from_pretrained(folder)
    source = f"{folder}, without its attention_dropout=0.1"
    line = f"model      weights of {source}, {theirs.num_parameters():,} parameters\n"
    assert line in capsys.readouterr().out
    first = metrics_file.read(straight)[0]
    assert first["step"] == 0
    config = yaml.safe_load((straight / "config.yaml").read_text())
    assert (config["init"], config["data"]["tokenizer"]) == (str(folder), str(folder))
    sizes = {"layers": 2, "channels": 32, "ffn": 48, "vocab_size": 320, "context": 96}
    expected = {**sizes, "tied": False}
    assert {key: config["model"][key] for key in expected} == expected
    still, tokenizer = longctx.load(tuned("still", max_steps=1, lr=0.0), "cpu")
    tokens = torch.randint(320, (1, 50))
    torch.testing.assert_close(still(tokens), theirs(tokens).logits)
    assert tokenizer.vocab_size == 310
    shutil.rmtree(folder)
    check_resumes_exactly(straight)


@pytest.mark.parametrize("rank", [None, 2])
def test_a_run_begins_with_the_weights_of_another(trained, tuned, rank):
    first = trained("first", max_steps=2, lr=0.01)
    second = tuned("second", init=first, lora__rank=rank, max_steps=1)
    before, after = metrics_file.read(first)[-1], metrics_file.read(second)[0]
    assert after["step"] == 0
    assert after["val_loss"] == pytest.approx(before["val_loss"], rel=1e-6)
    saved = run_folder.read_config(second)
    assert saved["model.channels"] == 32 and saved["lr"] != 0.01
    tokenizers = [(run / "tokenizer.json").read_text() for run in (first, second)]
    assert tokenizers[0] == tokenizers[1]
    assert train.main([f"resume={second}", "max_steps=2"]) == 0


def test_what_the_weights_leave_open_can_be_said(tuned):
    run = tuned(memory="balanced", memory__loss_chunk=50, model__vocab_size=384)
    config = run_folder.read_config(run)
    assert longctx.load(run, "cpu")[0].config.vocab_size == 384
    assert (config["memory.recompute"], config["memory.loss_chunk"]) == ("block", 50)


@pytest.mark.parametrize(
    ("seq_len", "rope", "warns"), [(96, "keep", False), (192, "keep", True), (192, None, False)]
)
def test_positions_beyond_the_trained_ones_warn(tuned, capsys, seq_len, rope, warns):
    tuned(seq_len=seq_len, max_steps=1, rope=rope)
    assert ("2.0 times the 96 tokens" in (said := capsys.readouterr().out)) == warns
    assert ("rope=auto" in said) == warns


def test_conversations_by_the_folders_own_template(tuned, folder, tmp_path):
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    named = [{"name": "default", "template": SPACE}, {"name": "tools", "template": "x"}]
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": named}))
    lines = (json.dumps({"messages": TALK * n}) for n in range(1, 12))
    (tmp_path / "talks.jsonl").write_text("\n".join(lines))
    every = {"max_steps": 4, "checkpoint_every": 2}
    run = tuned(data__path=tmp_path / "talks.jsonl", data__chat="true", **every)
    assert (run / "chat_template.jinja").read_text() == SPACE
    (folder / "tokenizer_config.json").unlink()
    check_resumes_exactly(run)


@pytest.mark.parametrize("with_weights", [True, False])
def test_conversations_by_the_template_of_another(start, overrides, folder, tmp_path, with_weights):
    """A base model and the tokenizer of a tuned one, whose template names tokens."""
    tuned, run = tmp_path / "tuned", tmp_path / "runs" / "r"
    tuned.mkdir()
    write_tokenizer(tuned)
    write(tuned, INST)
    lines = (json.dumps({"messages": TALK * n}) for n in range(1, 12))
    (tmp_path / "talks.jsonl").write_text("\n".join(lines))
    chat = {"data__path": tmp_path / "talks.jsonl", "data__chat": "true", "max_steps": 2}
    begin = start if with_weights else overrides
    chat |= {"data__tokenizer": tuned, "data__vocab_size": None}
    chat |= {"data__replace_tokenizer": "true"} if with_weights else {}
    assert train.main(begin(name="r", **chat)) == 0
    assert Template(run).fingerprint == Template(tuned).fingerprint
    if with_weights:
        shutil.rmtree(tuned)
    assert train.main([f"resume={run}", "max_steps=4"]) == 0
    assert evaluate.main([f"checkpoint={run}"]) == 0


def test_a_tokenizer_with_other_ids_is_refused(start, folder, tmp_path, refused):
    """The folder's own in another one, with a token more, is the same; its stop tokens stay."""
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 2]}))
    for name in ("own", "other"):
        (tmp_path / name).mkdir()
    write_tokenizer(tmp_path / "other")
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens(["<|new|>"])
    tokenizer.save(str(tmp_path / "own" / "tokenizer.json"))
    words = {"data__vocab_size": None, "max_steps": 1}
    given = start(data__tokenizer=tmp_path / "other", **words)
    refused(train.main(given), "data.replace_tokenizer=true")
    for name, more in (("own", {}), ("other", {"data__replace_tokenizer": "true"})):
        begin = start(name=name, data__tokenizer=tmp_path / name, **words, **more)
        assert train.main(begin) == 0
        run = tmp_path / "runs" / name
        assert (run / "generation_config.json").exists() == (name == "own")


def test_rates_of_trained_weights_are_smaller():
    plain, tuned = TrainConfig(), TrainConfig(init="folder")
    assert default_learning_rate(plain, plain.model) == 0.5 / plain.model.channels
    changes = {}, {"lora": LoraConfig(rank=8)}, {"objective": DpoKeys("dpo")}
    rates = [default_learning_rate(replace(tuned, **own), plain.model) for own in changes]
    assert rates == [2e-5, 2e-4, 1e-6]
    fixed = replace(tuned, lr=0.1)
    assert scheduled(fixed, workload_of(fixed, "cpu", 64)).lr == 0.1


def test_a_folder_is_scored_as_the_run_it_begins(folder, corpus, tuned, monkeypatch, refused):
    monkeypatch.chdir(folder.parent)
    before = sorted(folder.rglob("*"))
    documents = ["data=text", f"data.path={corpus}", "documents=5", "device=cpu"]
    assert evaluate.main([f"checkpoint={folder}", *documents]) == 0
    assert sorted(folder.rglob("*")) == before
    run = tuned("still", max_steps=1, lr=0.0)
    assert evaluate.main([f"checkpoint={run}", "seq_len=96", *documents]) == 0
    [file] = Path("evaluations").glob(f"{folder.name}-*/eval/*.json")
    result, of_run = (json.loads(x.read_text()) for x in (file, *(run / "eval").glob("*.json")))
    assert (result["context"], result["trained_seq_len"], len(result["documents"])) == (96, 96, 5)
    assert of_run["total"]["nats"] == pytest.approx(result["total"]["nats"], rel=1e-6)
    refused(evaluate.main([f"checkpoint={folder}", "device=cpu"]), "no documents of its own")


def test_hub_model_is_cached_and_recorded_with_commit(
    start, folder, tmp_path, monkeypatch, refused
):
    commit = "c0ffee" + "0" * 34
    snapshot = to_hub_cache(folder, commit, monkeypatch)
    model = snapshot.parents[1]
    monkeypatch.chdir(tmp_path)

    (snapshot / "model.safetensors").rename(snapshot / "away")
    error = refused(train.main(start(init="me/small")), f"error: init=me/small@{commit}: ")
    assert "the cache has no model.safetensors" in error
    assert not (tmp_path / "runs").exists()
    (snapshot / "away").rename(snapshot / "model.safetensors")
    assert train.main(start(init="me/small", max_steps=1, lr=0.0)) == 0
    run = next((tmp_path / "runs").iterdir())
    assert run.name.startswith("small-flash-64-")
    assert yaml.safe_load((run / "config.yaml").read_text())["init"] == f"me/small@{commit}"
    tokens = torch.randint(320, (1, 50))
    theirs = LlamaForCausalLM.from_pretrained(snapshot)
    torch.testing.assert_close(longctx.load(run, "cpu")[0](tokens), theirs(tokens).logits)

    # the branch moves on, and a repetition does not
    (model / "refs" / "main").write_text("d" * 40)
    assert train.main([str(run / "config.yaml"), "name=again"]) == 0
    check_equal_weights(run, tmp_path / "runs" / "again")
    shutil.rmtree(model)
    assert train.main([f"resume={run}", "max_steps=2"]) == 0


def test_the_balance_of_experts_can_be_given(tuned, folder):
    sizes = json.loads((folder / "config.json").read_text())
    kept = ("vocab_size", "hidden_size", "num_hidden_layers", "intermediate_size")
    config = MixtralConfig(
        **{key: sizes[key] for key in kept},
        **{"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4},
    )
    MixtralForCausalLM(config).save_pretrained(folder)
    run = tuned(model__experts__balance=0.5)
    rows = steps(run)
    # Balanced it is the experts of a token, two
    assert all(1 < row["aux_loss"] < 8 and 1 <= row["expert_load"] <= 2 for row in rows)
    assert train.main([str(run / "config.yaml"), "name=again"]) == 0
    again = run.with_name("again")
    assert run_folder.read_config(again)["model.experts.balance"] == 0.5
    check_equal_weights(run, again)
    assert train.main([f"resume={run}", "max_steps=3"]) == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "tiny"}, "model=tiny: init="),
        ({"model__layers": 3}, "model.layers=3: init="),
        ({"model__context": 3}, "model.context=3: init="),
        ({"model__vocab_size": 300}, "model.vocab_size=300: "),
        ({"model__experts__balance": 0.1}, "model.experts.balance=0.1: the model has no experts"),
        ({"init": ""}, "init="),
        ({"init": "."}, "neither a run"),
        ({"data__vocab_size": 300}, "data.vocab_size=300: init="),
    ],
)
def test_a_mistake_is_one_line_and_leaves_nothing(start, tmp_path, refused, changes, message):
    refused(train.main(start(**changes)), message)
    assert not (tmp_path / "runs").exists()


def test_broken_weights_are_found_before_the_run(start, folder, tmp_path, refused):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-9])
    refused(train.main(start()), "model.safetensors: not a whole safetensors file")
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *(("config.json", kind) for kind in ("outside", "fifo", "zero", "loop")),
        *(("model.safetensors", "outside"), ("tokenizer.json", "fifo")),
        *(("tokenizer_config.json", "zero"), ("chat_template.jinja", "loop")),
        *(("generation_config.json", "outside"), ("model.safetensors", "fifo")),
    ],
)
def test_what_lies_outside_of_the_folder_is_not_read(start, folder, tmp_path, refused, name, kind):
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


def test_a_resumed_run_keeps_what_it_began_with(tuned, refused, capsys):
    run = tuned(seq_len=384, rope="yarn")
    capsys.readouterr()
    refused(train.main([f"resume={run}", "init=elsewhere"]), "init cannot change when")
    text = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(text.replace("\n  type: yarn", "\n  type: linear"))
    refused(train.main([f"resume={run}", "max_steps=3"]), "rope.type=linear, but the run began")
