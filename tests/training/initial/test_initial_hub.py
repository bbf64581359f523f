"""Runs that start from a model of the Hugging Face Hub: its cache, commits and links."""

import shutil
from pathlib import Path

import huggingface_hub
import pytest
import torch
import yaml
from transformers import LlamaForCausalLM

import train
from longctx.evaluation.load import load_model
from tests.training.sample_run import Overrides, check_equal_weights


def test_hub_model_is_cached_and_recorded_with_commit(
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


def test_cache_of_hugging_face_is_a_folder_of_links(
    start: Overrides, folder: Path, tmp_path: Path
) -> None:
    blobs, snapshot = tmp_path / "m" / "blobs", tmp_path / "m" / "snapshots" / "abc"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for file in folder.iterdir():
        shutil.copyfile(file, blobs / file.name)
        (snapshot / file.name).symlink_to(Path("../../blobs", file.name))
    assert train.main(start(init=snapshot, max_steps=1)) == 0
