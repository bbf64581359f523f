"""A recipe of axolotl becomes one of ours, which runs; what has no meaning here is named."""

import json
from pathlib import Path

import pytest
import yaml
from transformers import AutoModelForCausalLM, LlamaConfig

from longctx import cli
from tests.hf.families.parity import write_tokenizer
from tests.test_examples import SIZES, TEMPLATE

AXOLOTL = Path(__file__).with_name("axolotl.yaml")


def test_a_recipe_of_axolotl_runs_as_ours(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LONGCTX_CACHE", str(tmp_path / "cache"))
    AutoModelForCausalLM.from_config(LlamaConfig(**SIZES)).save_pretrained(tmp_path / "model")
    write_tokenizer(tmp_path / "model")
    (tmp_path / "model" / "chat_template.jinja").write_text(TEMPLATE)
    answer = {"role": "assistant", "content": "c"}
    for n in range(40):
        chat = {"messages": [{"role": "user", "content": f"{n} b"}, answer] * 2}
        with Path("chats.jsonl").open("a") as file:
            file.write(json.dumps(chat) + "\n")
    capsys.readouterr()
    assert cli.main(["convert", str(AXOLOTL)]) == 0
    ours, unread = capsys.readouterr()
    names = [line.partition("=")[0] for line in unread.splitlines()]
    assert names == ["lora_dropout", "num_epochs", "tf32", "warmup_ratio", "special_tokens"]
    values = yaml.safe_load(ours)
    assert (values["lora.rank"], values["lora.scaling"], values["lr"]) == (4, 2.0, 0.0002)
    assert values["lora.targets"] == ["qkv", "out", "gate_up"]
    Path("ours.yaml").write_text(ours)
    config = cli.compose("train", ["ours.yaml"]).config
    found = config.seq_len, config.accumulate, config.data.chat, config.memory.recompute
    assert found == (256, 2, True, "block") and config.precision == "bf16"
    words = ["dry_run=true", "device=cpu", "precision=fp32"]
    assert cli.main(["train", "ours.yaml", *words]) == 0, capsys.readouterr().err


@pytest.mark.parametrize(
    ("theirs", "ours", "unread"),
    [
        ("{adapter: qlora, lora_r: 8}", {"lora.base": "nf4", "lora.rank": 8}, ""),
        ("{load_in_8bit: true}", {}, "load_in_8bit=true: here it is lora.base"),
        ("{datasets: [{path: owner/name, split: train}]}", {"data.split": "train"}, ""),
        ("{datasets: [{path: a.jsonl}, {path: b.jsonl}]}", {}, "datasets="),
        ("{rl: dpo, rl_beta: 0.2}", {"objective": "dpo", "objective.beta": 0.2}, ""),
        ("{rl: grpo}", {}, "rl=grpo"),
        ("{optimizer: lion_8bit}", {}, "optimizer=lion_8bit"),
        ("{eval_steps: 0.05, save_steps: 100}", {"checkpoint_every": 100}, "eval_steps: val_every"),
        ("{learning_rate: 99}", {}, "learning_rate: lr=99.0: a number from"),
        ("{datasets: [3], lora_alpha: a, lora_r: 8}", {"lora.rank": 8}, "lora_alpha=a: "),
        ("{lora_target_modules: 5}", {}, "lora_target_modules=5: "),
    ],
)
def test_a_key_is_carried_over_or_named(theirs, ours, unread, tmp_path, capsys):
    (tmp_path / "a.yml").write_text(theirs)
    assert cli.main(["convert", str(tmp_path / "a.yml")]) == 0
    written, error = capsys.readouterr()
    assert ours.items() <= (yaml.safe_load(written) or {}).items()
    assert (unread in error) if unread else error == ""
