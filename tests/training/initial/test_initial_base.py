"""Runs with LoRA on a packed base: trained, resumed to the bit, merged, exported."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, LlamaForCausalLM

import longctx
from longctx import cli
from tests.processes import train_together
from tests.training.initial.conftest import saved_model
from tests.training.sample_run import check_resumes_exactly, validations, weights

TOKENS = torch.arange(60)[None] % 310
LORA = {"lora__rank": 2, "max_steps": 2, "lr": 0.05}


@pytest.fixture
def folder(tmp_path: Path, corpus: Path) -> Path:
    """A model whose matrices have a multiple of 64 columns, as transformers saves it in bf16."""
    return saved_model(tmp_path, corpus, torch.bfloat16, hidden_size=64, intermediate_size=128)


def validated(run: Path) -> list[float]:
    """Return the losses of a run's validations."""
    return [row["val_loss"] for row in validations(run)]


def test_a_run_learns_on_it_and_resumes_to_the_bit(tuned, monkeypatch):
    monkeypatch.setattr("lightning.fabric.strategies.SingleDeviceStrategy.module_to_device", None)
    wide = tuned("wide", **LORA)
    more = {"max_steps": 4, "checkpoint_every": 2, "memory__offload_weights": 1}
    straight = tuned("straight", lora__base="nf4", memory="balanced", **LORA | more)
    theirs = tuned("theirs", lora__base="nf4", transformers="always", **LORA)
    assert validated(straight)[0] == pytest.approx(validated(wide)[0], rel=0.01)
    assert validated(straight)[0] == pytest.approx(validated(theirs)[0], rel=1e-3)
    assert validated(straight)[-1] < validated(straight)[0]
    saved = weights(straight)
    packs = [name for name, x in saved.items() if x.dtype == torch.uint8]
    assert len(packs) == 8 and all(name.startswith("model.blocks.") for name in packs)
    check_resumes_exactly(straight)


@pytest.mark.parametrize(("by", "packs"), [("never", 8), ("always", 14)])
def test_it_is_exported_as_it_was_trained(by, packs, tuned, folder, tmp_path, capsys):
    run, merged, adapter = tmp_path / "runs" / "r", tmp_path / "a", tmp_path / "b"
    tuned(lora__base="nf4", transformers=by, **LORA)
    assert sum(x.dtype == torch.uint8 for x in weights(run).values()) == packs
    assert cli.main(["export", str(run), str(merged)]) == 0
    assert cli.main(["export", str(run), str(adapter), "adapter=true"]) == 0
    assert "warning" not in capsys.readouterr().err
    base = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    original = {name: x.clone() for name, x in base.named_parameters()}
    opened = PeftModel.from_pretrained(base, adapter).merge_and_unload()
    for name, x in opened.named_parameters():
        assert torch.equal(x, original[name]) == ("proj" not in name)

    shutil.rmtree(folder)
    trained, _ = longctx.load(run, "cpu")
    theirs = AutoModelForCausalLM.from_pretrained(merged, dtype=torch.float32)
    torch.testing.assert_close(trained(TOKENS), theirs(TOKENS).logits, rtol=0.05, atol=0.02)


def test_experts_learn_on_it_and_resume_to_the_bit(tuned, corpus, tmp_path):
    sizes = {"hidden_size": 64, "intermediate_size": 64, "head_dim": 16, "num_local_experts": 4}
    of_init = {"kind": "gpt_oss", **sizes, "num_experts_per_tok": 2}
    folder = saved_model(tmp_path / "experts", corpus, torch.bfloat16, **of_init)
    steps = {"init": folder, "lora__rank": 8, "lr": 0.01, "max_steps": 4, "checkpoint_every": 2}
    steps |= {"memory": "balanced", "memory__offload_weights": 0.5}
    run, adapter = tuned("run", lora__base="nf4", **steps), tmp_path / "adapter"
    assert validated(run)[-1] < validated(run)[0]
    check_resumes_exactly(run)
    assert cli.main(["export", str(run), str(adapter), "adapter=true"]) == 0
    assert cli.main(["export", str(run), str(tmp_path / "merged")]) == 0
    trained, _ = longctx.load(run, "cpu", "fp32")

    def off(theirs: Any) -> float:
        want = trained(TOKENS)
        return float((theirs(TOKENS).logits - want).norm() / want.norm())

    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    before = off(base)
    # Its base is not packed
    assert off(PeftModel.from_pretrained(base, adapter)) < 0.2 < 0.5 < before
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    assert off(merged) < 0.01


def test_a_run_begins_with_one_that_has_it(tuned):
    first = tuned("first", lora__base="nf4", **LORA)
    second = tuned("second", init=first, max_steps=1)
    third = tuned("third", init=first, lora__base="nf4", **LORA)
    assert validated(second)[0] == pytest.approx(validated(first)[-1], rel=1e-5)
    assert validated(third)[0] == pytest.approx(validated(first)[-1], rel=0.02)


@pytest.mark.slow
def test_several_processes_train_the_same(tuned, start, tmp_path):
    steps = LORA | {"lora__base": "nf4", "batch_size": 1}
    one = weights(tuned("one", accumulate=2, **steps))
    strategies = ("ddp", "fsdp")
    train_together(2, [start(name=x, strategy=x, accumulate=1, **steps) for x in strategies])
    for strategy in strategies:
        two = weights(tmp_path / "runs" / strategy)
        for (name, x), y in zip(one.items(), two.values(), strict=True):
            if x.dtype == torch.uint8:
                assert torch.equal(x, y), (strategy, name)
            torch.testing.assert_close(x, y, rtol=1e-3, atol=1e-5)
