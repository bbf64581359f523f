"""What was trained from a Hugging Face folder opens in transformers and peft."""

import json
import shutil

import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaForCausalLM,
    Qwen3_5TextConfig,
)

import eval as evaluate
import longctx
import train
from longctx.cli import main as export
from tests.training.sample_run import check_resumes_exactly, newest


def test_what_was_trained_opens_in_transformers(tuned, folder, tmp_path):
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    settings["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    generation = {"eos_token_id": [0, 5], "temperature": 0.5}
    (folder / "generation_config.json").write_text(json.dumps(generation))
    run, out = tuned(lr=0.01), tmp_path / "out"
    assert export(["export", str(run), str(out)]) == 0
    model, tokenizer = longctx.load(run, "cpu")
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

    again, _ = longctx.load(tuned("again", init=out, max_steps=1, lr=0.0), "cpu")
    torch.testing.assert_close(again(tokens), expected)


def test_layers_with_a_state_are_trained_and_open_in_transformers(tuned, folder, tmp_path):
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 320}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    sizes |= {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "full_attention_interval": 2}
    sizes |= {"linear_key_head_dim": 6, "linear_value_head_dim": 8, "max_position_embeddings": 96}
    config = Qwen3_5TextConfig(**sizes, partial_rotary_factor=0.5)
    theirs, out = AutoModelForCausalLM.from_config(config), tmp_path / "out"
    (folder / "config.json").unlink()
    theirs.save_pretrained(folder)
    run = tuned(lr=0.01)
    assert export(["export", str(run), str(out)]) == 0
    (model, _), tokens = longctx.load(run, "cpu"), torch.randint(320, (2, 90))
    exported, expected = AutoModelForCausalLM.from_pretrained(out)(tokens).logits, model(tokens)
    assert (exported - expected).norm() < 1e-5 * expected.norm()
    assert (theirs(tokens).logits - expected).norm() > 1e-3 * expected.norm()


def test_stretched_run_opens_stretched_in_transformers(start, tuned, tmp_path, refused, capsys):
    run, out = tuned(lr=0.01, seq_len=384, rope="auto", data__documents=20), tmp_path / "out"
    assert "rope auto: yarn: 96 tokens × 4 = 384" in capsys.readouterr().out
    assert export(["export", str(run), str(out)]) == 0
    model, _ = longctx.load(run, "cpu")
    assert model.config.rope_scaling["factor"] == 4.0
    theirs = AutoModelForCausalLM.from_pretrained(out).eval()
    assert theirs.config.rope_parameters["rope_type"] == "yarn"
    assert theirs.config.max_position_embeddings == 384
    tokens = torch.randint(320, (1, 300))
    expected = model(tokens)
    assert (theirs(tokens).logits - expected).abs().max() < 1e-4 * expected.abs().max()

    tuned("more", init=out, seq_len=768, rope="auto", data__documents=20)
    assert "rope auto: yarn: 96 tokens × 8 = 768" in capsys.readouterr().out
    refused(train.main(start(name="no", rope="yarn")), "rope=yarn: the weights' 96 tokens hold")


def test_lora_from_start_to_export(tuned, folder, tmp_path, capsys):
    keys = {"seq_len": 192, "rope": "yarn", "lora__rank": 4, "lora__rslora": "true", "lr": 0.05}
    keys |= {"max_steps": 4, "checkpoint_every": 2}
    run, out, adapter = tuned(**keys), tmp_path / "out", tmp_path / "adapter"
    assert "frozen; LoRA of rank 4 trains" in capsys.readouterr().out
    saved = newest(run)
    theirs = LlamaForCausalLM.from_pretrained(folder)
    embedding = theirs.get_input_embeddings().weight
    assert torch.equal(saved["state_dict"]["model.embed.weight"], embedding)
    assert len(saved["optimizer_states"][0]["state"]) == 2 * 4 * 2

    check_resumes_exactly(run)
    model, _ = longctx.load(run, "cpu")
    tokens = torch.randint(320, (1, 150))
    expected = model(tokens)
    assert export(["export", str(run), str(out)]) == 0
    opened = AutoModelForCausalLM.from_pretrained(out).eval()
    assert (opened(tokens).logits - expected).abs().max() < 1e-4 * expected.abs().max()
    assert (theirs(tokens).logits - expected).abs().max() > 1e-2 * expected.abs().max()
    assert export(["export", str(run), str(adapter), "adapter=true"]) == 0
    described = json.loads((adapter / "adapter_config.json").read_text())
    names = "r", "lora_alpha", "use_rslora", "base_model_name_or_path"
    assert [described[name] for name in names] == [4, 8.0, True, str(folder)]
    assert "its positions are stretched, which peft does not do" in capsys.readouterr().out
    settings = AutoConfig.from_pretrained(adapter)
    base = AutoModelForCausalLM.from_pretrained(folder, config=settings)
    adapted = PeftModel.from_pretrained(base, adapter).eval()
    assert (adapted(tokens).logits - expected).abs().max() < 1e-4 * expected.abs().max()
    assert evaluate.main([f"checkpoint={adapter}"]) == 2
    assert "an adapter, which lacks the weights it adds to" in capsys.readouterr().err
    full = tuned("full", max_steps=1)
    assert export(["export", str(full), str(tmp_path / "no"), "adapter=true"]) == 2
    assert "was trained without lora.rank" in capsys.readouterr().err


def test_an_adapter_without_all_that_was_trained_is_refused(tuned, tmp_path, refused):
    again = tuned("again", init=tuned("whole", max_steps=1), lora__rank=2, max_steps=1)
    for run in (again, tuned("grown", model__vocab_size=384, lora__rank=2, max_steps=1)):
        code = export(["export", str(run), f"{tmp_path}/no", "adapter=true"])
        refused(code, "leave adapter out")


def test_two_stages_export_one_adapter_of_the_original(tuned, folder, tmp_path, capsys):
    LlamaForCausalLM.from_pretrained(folder).bfloat16().save_pretrained(folder)
    keys = {"lr": 0.05, "precision": "bf16"}
    first = tuned("first", lora__rank=2, lora__targets="[qkv]", **keys)
    second = tuned("second", init=first, lora__rank=3, lora__targets="[qkv,down]", **keys)
    out, adapter = tmp_path / "out", tmp_path / "adapter"
    assert export(["export", str(second), str(out)]) == 0
    assert export(["export", str(second), str(adapter), "adapter=true"]) == 0
    printed = capsys.readouterr()
    assert "warning" not in printed.err and "positions are stretched" not in printed.out
    names = {file.name for file in adapter.iterdir()}
    assert names == {"adapter_config.json", "adapter_model.safetensors"}
    described = json.loads((adapter / "adapter_config.json").read_text())
    assert (described["r"], described["lora_alpha"]) == (5, 5.0)
    assert described["base_model_name_or_path"] == str(folder)
    merged = load_file(out / "model.safetensors")
    assert {x.dtype for x in merged.values()} == {torch.bfloat16}
    base = AutoModelForCausalLM.from_pretrained(folder)
    adapted = PeftModel.from_pretrained(base, adapter).merge_and_unload().state_dict()
    before = load_file(folder / "model.safetensors")
    for name, x in merged.items():
        torch.testing.assert_close(x, adapted[name], rtol=2**-7, atol=2**-10)
        is_target = name.split(".")[-2] in ("q_proj", "k_proj", "v_proj", "down_proj")
        assert torch.equal(x, before[name]) != is_target
    model, _ = longctx.load(second, "cpu", "fp32")
    tokens = torch.randint(320, (1, 60))
    theirs = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    torch.testing.assert_close(theirs(tokens).logits, model(tokens), rtol=0.05, atol=0.05)


def test_lora_is_merged_into_what_was_trained(tuned, tmp_path):
    in_bf16 = {"lora__rank": 2, "lora__targets": "[qkv,down]", "lr": 0.05, "precision": "bf16"}
    run = tuned(**in_bf16, init=(init := tuned("first", lr=0.01)))
    shutil.rmtree(init)  # the run has a copy, rounded to its precision
    assert export(["export", str(run), str(tmp_path / "out")]) == 0
    after, before = load_file(tmp_path / "out" / "model.safetensors"), newest(run)["state_dict"]
    assert {x.dtype for x in after.values()} == {torch.float32}, "as the folder's"
    down = "layers.0.mlp.down_proj.weight"
    assert not torch.equal(after[f"model.{down}"], before["model.blocks.0.mlp.down.weight"])
    assert torch.equal(after["model.embed_tokens.weight"], before["model.embed.weight"].float())
    model, _ = longctx.load(run, "cpu", "fp32")
    tokens = torch.randint(320, (1, 60))
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    torch.testing.assert_close(theirs(tokens).logits, model(tokens), rtol=0.05, atol=0.05)
