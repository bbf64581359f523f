"""Runs of a model that transformers computes: trained, resumed, evaluated, continued, exported."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

import eval as evaluate
import train
from benchmarks.shapes import reference
from longctx.cli import main as longctx
from longctx.data import Tokenizer
from longctx.data import tokenizer as bpe
from tests.processes import ROOT, finished, train_together
from tests.training.sample_run import check_resumes_exactly, losses, validations


@pytest.fixture
def folder(tmp_path: Path, corpus: Path) -> Path:
    """A model with a factor of its logits, and its tokenizer."""
    folder = tmp_path / "models" / "Cohere"
    reference("cohere").save_pretrained(folder)
    texts = [file.read_text() for file in sorted(corpus.iterdir())]
    bpe.train(texts, 301).save(folder / "tokenizer.json")
    return folder


def test_it_trains_and_continues_to_the_bit(tuned, folder, capsys):
    run = tuned(max_steps=4, checkpoint_every=2, memory="balanced")
    said = capsys.readouterr().out
    assert "computed by transformers" in said and "not measured" not in said
    shutil.rmtree(folder)
    check_resumes_exactly(run, "memory=fast")


def test_it_is_evaluated_samples_and_is_exported(tuned, tmp_path, capsys):
    """With LoRA, which is merged; plain weights: tests/hf/test_transformers_model.py."""
    run = tuned("r", lora__rank=2, sample_every=1)
    assert evaluate.main([f"checkpoint={run}", "documents=2", "device=cpu"]) == 0
    assert evaluate.main([f"checkpoint={run}", "compile=true", "device=cpu"]) == 2
    new = ["max_new_tokens=3", "temperature=0", "device=cpu"]
    assert longctx(["export", str(run), str(tmp_path / "out")]) == 0
    capsys.readouterr()
    assert longctx(["generate", str(run), "prompt=the row", *new]) == 0
    ours = capsys.readouterr().out
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out", attn_implementation="eager")
    tokenizer = Tokenizer.load(run)
    ids = torch.tensor([tokenizer.encode_prompt("the row")])
    theirs = again.eval().generate(ids, max_new_tokens=3, do_sample=False, eos_token_id=None)
    assert tokenizer.decode(theirs[0, ids.shape[1] :].tolist()).strip() in ours
    assert train.main([f"init={run}", "transformers=always"]) == 2
    second = tuned("second", init=run, max_steps=1)
    before, after = validations(run)[-1], validations(second)[0]
    assert after["val_loss"] == pytest.approx(before["val_loss"], rel=1e-5)


def test_positions_beyond_the_trained_ones_stay(tuned, folder, capsys):
    settings = json.loads((folder / "config.json").read_text()) | {"max_position_embeddings": 32}
    (folder / "config.json").write_text(json.dumps(settings))
    tuned(max_steps=1, rope="auto")
    said = capsys.readouterr().out
    assert "times the 32 tokens" in said and "rope=auto" not in said


@pytest.mark.slow
def test_two_processes_compute_the_same(tuned, start, tmp_path):
    layouts: dict[str, dict[str, object]] = {
        "fsdp": {"strategy": "fsdp", "memory": "balanced", "batch_size": 1},
        "allgather": {"context": 2, "context__method": "allgather"},
        "lora-ulysses": {"lora__rank": 2, "strategy": "fsdp", "context": 2},
    }
    train_together(2, [start(name=name, **keys) for name, keys in layouts.items()])
    alone = {rank: tuned(f"rank-{rank}", lora__rank=rank) for rank in (None, 2)}
    for name, keys in layouts.items():
        expected = losses(alone[keys.get("lora__rank")])
        assert losses(tmp_path / "runs" / name) == pytest.approx(expected, rel=1e-5), name


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"optimizer": "muon"}, "optimizer=muon"),
        ({"precision": "fp8"}, "precision=fp8"),
        ({"compile": True}, "compile=true"),
        ({"rope": "yarn", "seq_len": 512}, "rope=yarn"),
        ({"memory": "balanced", "memory__mlp_tile": 8}, "memory.mlp_tile"),
        ({"model__vocab_size": 512}, "model.vocab_size=512"),
        ({"transformers": "never"}, "model_type=cohere"),
        ({"transformers": "always", "init": None}, "transformers=always"),
    ],
)
def test_what_ours_alone_can_do_is_refused(start, changes, named, refused):
    refused(train.main(start(**changes)), named)


@pytest.mark.slow
def test_layers_that_leak_leave_no_folder(start, tmp_path, folder, capsys):
    leaking = tmp_path / "models" / "Leaking"
    reference("lfm3").save_pretrained(leaking)
    shutil.copy(folder / "tokenizer.json", leaking)
    assert train.main(start(init=leaking, runs=tmp_path / "none")) == 2
    assert "data.packing=false" in capsys.readouterr().err
    assert not (tmp_path / "none").exists()
    words = start(init=leaking, data__packing=False, name="alone")
    assert train.main(words) == 0
    assert evaluate.main([f"checkpoint={tmp_path / 'runs' / 'alone'}", "device=cpu"]) == 0
    words = [f"checkpoint={tmp_path / 'runs' / 'alone'}", "device=cpu", "devices=2", "context=2"]
    process = finished(ROOT / "eval.py", words, tmp_path)
    assert process.returncode == 2 and "one document" in process.stderr, process.stderr
