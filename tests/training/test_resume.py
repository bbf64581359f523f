"""Resumed runs are the uninterrupted ones bit for bit, and what cannot be resumed is refused."""

import gc
import shutil

import pytest
import torch
import yaml

import longctx
import train
from longctx import files
from longctx.runs import metrics_file, run_folder
from longctx.training import life_cycle, resolve
from tests.training.sample_run import (
    check_resumes_exactly,
    figures,
    newest,
    steps,
    validations,
    weights,
    write_checkpoint,
)


@pytest.mark.parametrize(
    "changes",
    [
        {"max_steps": 9, "log_every": 2, "checkpoint_every": 5},
        {"checkpoint_every": 3, "memory__optimizer_state": "bf16"},
        {"checkpoint_every": 3, "optimizer": "muon", "memory__optimizer_state": "host"},
    ],
)
def test_a_resumed_run_is_equal_to_the_bit(changes, trained):
    folder = trained(**changes)
    padding = figures(folder, "padding_share")
    check_resumes_exactly(folder)
    assert figures(folder, "padding_share") == padding


def test_a_step_in_other_pieces_is_the_same_step(trained, refused):
    folder = trained(batch_size=2, accumulate=2, checkpoint_every=3)
    straight = weights(folder)
    files.remove(run_folder.checkpoints(folder)[-1])
    refused(train.main([f"resume={folder}", "batch_size=3"]), "batch_size=3")
    changes = ["batch_size=4", "memory=balanced", "memory.mlp_tile=32"]
    assert train.main([f"resume={folder}", *changes]) == 0
    saved = run_folder.read_config(folder)
    assert (saved["batch_size"], saved["accumulate"]) == (4, 1)
    memory = [saved[f"memory.{key}"] for key in ("policy", "recompute", "mlp_tile")]
    assert memory == ["balanced", "block", 32]
    torch.testing.assert_close(straight, weights(folder), rtol=0, atol=1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("stored", ["bf16", "host"])
def test_a_resume_takes_no_more_gpu_memory(stored, overrides, tmp_path):
    """A second run takes 32 MiB more; an fp32 copy of the moments would take 300."""
    changes = {
        **{"device": "cuda", "compile": "false", "graphs": "false", "max_steps": 2},
        **{"model__channels": 256, "model__vocab_size": 300_000, "data__val_fraction": 0},
        **{"memory": "fast", "memory__optimizer_state": stored},
    }
    folder, peaks = tmp_path / "runs" / "r", []
    for argv in (overrides(name="r", **changes), [f"resume={folder}", "max_steps=4"]):
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        assert train.main(argv) == 0
        peaks.append(torch.cuda.max_memory_allocated() / 2**20)
    assert peaks[1] <= peaks[0] + 64


def test_a_finished_run_goes_on_with_more_steps(two_steps, refused, capsys):
    refused(train.main([f"resume={two_steps}"]), "is done after step 2")
    text = (file := two_steps / "tokenizer.json").read_text()
    file.unlink()
    before = run_folder.read_config(two_steps)
    changes = ["max_steps=5", "lr_schedule=constant"]
    assert train.main([f"resume={two_steps}", *changes, "betas=[0.9,0.95]", "clip=1"]) == 0
    assert "max_steps or lr_schedule has changed" in capsys.readouterr().out  # the rate jumps
    assert [row["step"] for row in steps(two_steps)] == [1, 2, 3, 4, 5]
    assert file.read_text() == text
    after = run_folder.read_config(two_steps)
    changed = {key: x for key, x in after.items() if repr(x) != repr(before[key])}
    assert changed == {"max_steps": 5, "lr_schedule": "constant", "min_lr_ratio": None}


def test_a_run_that_still_trains_is_not_resumed(two_steps, refused, monkeypatch):
    """It may save another one until it lets go of its folder, so none is chosen before."""
    with run_folder.locked(two_steps), monkeypatch.context() as patched:
        patched.setattr(life_cycle, "resolve", lambda *_: pytest.fail("it chose one"))
        code = train.main([f"resume={two_steps}", "max_steps=3"])
    refused(code, f"{two_steps}: another process is training this run")
    assert train.main([f"resume={two_steps}", "max_steps=3"]) == 0


def test_a_mix_with_pass_keys_resumes_exactly(trained, corpus, capsys):
    changes = {
        **{"data": "mix", "data__path": None, "val_every": 2, "max_steps": 4},
        **{"data__mix__prose__path": corpus, "data__mix__prose__weight": 2},
        **{"data__mix__recall__path": corpus, "data__mix__recall__documents": 12},
        **{"passkey": "true", "passkey__lengths": "[600]", "passkey__samples": 1},
    }
    folder = trained(checkpoint_every=2, passkey__depths="[0,1]", **changes)
    assert "passkey at 600 0%" in capsys.readouterr().out
    assert [row["facts_found/passkey/600"] for row in validations(folder)] == [0, 0, 0]
    check_resumes_exactly(folder, "passkey=false")


def test_seq_len_schedule_resumes_exactly(trained, overrides, refused, capsys):
    changes = {"seq_len_schedule": "[[16,2],[32,2]]", "max_steps": 7, "val_every": 100}
    folder = trained(checkpoint_every=1, keep_checkpoints=9, **changes)
    assert "first 2 steps at 16, 2 steps at 32 tokens per sequence" in capsys.readouterr().out
    rows = steps(folder)
    assert rows[0]["tokens_seen"] / (1 - rows[0]["padding_share"]) == pytest.approx(64 * 2 * 2)
    epochs = [row["epoch"] for row in rows]
    assert epochs == sorted(epochs)
    for dropped in (2, 3, 6):  # in the last stage, at its start, in the first
        check_resumes_exactly(folder, dropped=dropped)
    capsys.readouterr()
    refused(train.main(overrides(**changes | {"max_steps": 4})), "takes all of max_steps=4; leave")


def test_resume_refuses_other_data_and_other_models(two_steps, refused, capsys, monkeypatch):
    folder = two_steps
    refused(train.main([f"resume='{folder}'", "max_steps=3", "seed=5"]), "seed cannot change")
    text = (folder / "config.yaml").read_text()
    for group, key, value, message in (
        ("data", "documents", 30, "the run began with; restore them, or train anew with init="),
        ("data", "vocab_size", 500, "no longer those that the run began with"),
        ("model", "window", 7, "model.window=7, but the run began with None"),
        (None, "weight_decay", 0.5, "weight_decay=0.5, but the run began with 0.1"),
    ):
        edited = yaml.safe_load(text)
        (edited[group] if group else edited)[key] = value
        (folder / "config.yaml").write_text(yaml.safe_dump(edited))
        assert train.main([f"resume={folder}", "max_steps=3"]) == 2
        assert message in capsys.readouterr().err
    (folder / "config.yaml").write_text("{}")
    monkeypatch.setattr(resolve, "open_tokenizer", None)  # of the default documents
    refused(train.main([f"resume={folder}", "max_steps=3"]), "config.yaml: no devices, batch_size")


def test_a_damaged_newest_checkpoint_is_set_aside(trained, capsys):
    folder = trained(max_steps=3, checkpoint_every=1, keep_checkpoints=9)
    straight, rows = weights(folder), figures(folder)
    whole, flipped, cut = run_folder.checkpoints(folder)
    (file,) = flipped.glob("*.safetensors")
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    index = cut / "checkpoint.json"
    index.write_bytes(index.read_bytes()[:1000])
    with pytest.raises(ValueError, match="not a whole checkpoint"):
        longctx.load(folder, "cpu")
    capsys.readouterr()
    assert train.main([f"resume={folder}"]) == 0
    lines = [line for line in capsys.readouterr().err.splitlines() if "set aside" in line]
    for line, path in zip(lines, (cut, flipped), strict=True):
        aside = path.with_name(f"{path.name}.damaged")
        assert line.startswith(f"{path}: ") and aside.is_dir()
        assert aside.name in line and f"continues from {whole}" in line
    assert figures(folder) == rows
    torch.testing.assert_close(weights(folder), straight, rtol=0, atol=0)


def test_no_checkpoint_goes_for_a_damaged_one(trained):
    """Foreign and renamed folders, and one that lost a file, older or newer than all others."""
    folder = trained(max_steps=2, checkpoint_every=1, keep_checkpoints=2)
    places, last = folder / "checkpoints", run_folder.checkpoints(folder)[-1]
    foreign = ["step-99999999.ckpt", "step-00000000.ckpt"]
    for name in foreign:
        (places / name).mkdir()
    renamed = ["step-00000009.ckpt", "step-2.ckpt", "step-00000003.ckpt"]
    for name in renamed:
        shutil.copytree(last, places / name)
    next(write_checkpoint(folder, 8).glob("*.safetensors")).unlink()
    assert train.main([f"resume={folder}", "max_steps=4"]) == 0
    left = {path.name for path in places.iterdir()}
    assert {*foreign, *renamed, "step-00000004.ckpt"} <= left
    assert (places / "last.ckpt").resolve().name == "step-00000004.ckpt"
    assert newest(folder)["steps_done"] == 4
    assert [row["step"] for row in steps(folder)] == [1, 2, 3, 4]


def test_no_intact_checkpoint_is_one_clear_line(trained, capsys):
    folder = trained(max_steps=2, checkpoint_every=1)
    paths = run_folder.checkpoints(folder)
    for path in paths:
        (file,) = path.glob("*.safetensors")
        file.write_bytes(file.read_bytes()[:-100])
    rows = metrics_file.read(folder)
    for left in (2, 1):
        capsys.readouterr()
        assert train.main([f"resume={folder}", "max_steps=3"]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert all(path.name in line for path in paths[:left])
        assert run_folder.checkpoints(folder) == paths[:left]
        assert metrics_file.read(folder) == rows
        files.remove(paths[-1])
