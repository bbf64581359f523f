"""Benchmarks that start runs of their own, tiny and on a CPU: extension, optimizers, waits."""

import json
from pathlib import Path

import pytest

from benchmarks.extension import draw
from benchmarks.optimizers import shared_target, tokens_to
from benchmarks.waits import step_seconds
from benchmarks.words import main

TINY = ["model=tiny", "model.layers=1", "model.channels=32", "model.ffn=48", "seq_len=64"]
TINY += ["batch_size=2", "accumulate=1", "device=cpu", "compile=false", "workers=0"]
PNG = b"\x89PNG"


@pytest.fixture
def texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder of 30 documents; the cache is apart."""
    monkeypatch.setenv("LONGCTX_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "texts"
    folder.mkdir()
    for number in range(30):
        lines = (f"line {i * number} of {number} dull texts" for i in range(20 + 5 * number))
        (folder / f"{number}.txt").write_text("\n".join(lines))
    return folder


@pytest.mark.slow
def test_extension_writes_report_and_plot(texts, tmp_path):
    sizes = ["short=256", "long=512", "layers=1", "channels=64", "vocab=512", "tokens=1024"]
    own = ["steps=2", "tune_steps=1", "documents=40", "samples=1", "device=cpu"]
    out = tmp_path / "out"
    assert main(["extension", *sizes, *own, f"path={texts}", f"out={out}"]) == 0
    report = json.loads((out / "extension.json").read_text())
    assert list(report["models"]) == ["as pretrained", "YaRN, not trained", "YaRN, fine-tuned"]
    for model in report["models"].values():
        grid = model["recall"]["passkey"]
        assert (grid["lengths"], len(grid["depths"])) == ([256, 512], 11)
        assert model["by_position"][0]["first"] == 1
    assert report["options"]["long"] == 512
    assert (out / "extension.png").read_bytes().startswith(PNG)
    rope = json.loads((out / "long" / "config.json").read_text())["rope_parameters"]
    assert (rope["rope_type"], rope["factor"]) == ("yarn", 2.0)
    assert rope["original_max_position_embeddings"] == 256
    draw(report, tmp_path / "again.png")
    assert main(["extension", f"out={out}"]) == 2
    given = [f"init={out / 'short'}", "lora=2", "long=512", "tokens=1024", *own[1:]]
    again = tmp_path / "again"
    assert main(["extension", *given, f"path={texts}", f"out={again}"]) == 0
    report = json.loads((again / "extension.json").read_text())
    assert report["options"]["short"] == 256 and "pretraining" not in report["seconds"]
    assert (again / "long" / "model.safetensors").exists()


def test_tokens_to_a_loss_are_interpolated():
    losses = [(0, 6.0), (100, 4.0), (200, 3.0), (300, 3.5)]
    expected = {6.5: 0, 5.0: 50, 3.25: 175, 2.9: None}
    assert {loss: tokens_to(losses, loss) for loss in expected} == expected


def test_the_target_is_a_loss_that_each_reaches():
    ends = {("a", 1): 3.0, ("a", 2): 2.5, ("b", 1): 2.7, ("b", 2): None}
    rows = [
        {"optimizer": name, "lr": lr, "last_loss": loss, "validations": [(9, loss)] if loss else []}
        for (name, lr), loss in ends.items()
    ]
    assert shared_target(rows) == 2.7
    with pytest.raises(ValueError, match="optimizers=b"):
        shared_target([row for row in rows if row["optimizer"] == "a" or row["lr"] == 2])


@pytest.mark.slow
def test_optimizers_are_compared_once(texts, tmp_path):
    out = tmp_path / "out" / "optimizers.json"
    data = ["data=text", f"data.path={texts}", "data.vocab_size=300", "data.val_fraction=0.2"]
    own = ["rates=0.001", "steps=4", "val_every=2", f"out={out}", f"runs={tmp_path / 'r'}"]
    for note in (None, "was there already"):
        assert main(["optimizers", *own, *TINY, *data]) == 0
        result = json.loads(out.read_text())
        pairs = [(row["optimizer"], row["lr"]) for row in result["runs"]]
        assert pairs == [("adamw", 0.001), ("muon", 0.001)]
        for row in result["runs"]:
            assert row.get("note") == note
            assert [tokens for tokens, _ in row["validations"]] == [0, 256, 512]
        assert all(best["tokens_to_target"] <= 512 for best in result["best"].values())
        assert out.with_suffix(".png").read_bytes().startswith(PNG)


@pytest.mark.slow
def test_waits_of_real_runs_are_timed(texts, tmp_path, result_of):
    data = ["data=text", f"data.path={texts}", "data.vocab_size=300"]
    result = result_of("waits", *TINY, *data, "steps=6", "starts=1", f"folder={tmp_path}/f")
    for start in (result["cold"], *result["warm"]):
        assert 0 < start["first_line"] < start["step_1"]
    end = result["end"]
    assert 0 < end["checkpoint"] <= end["prompt"]
    assert end["bytes"] > 4 * 32 * 48  # more than one matrix
    assert list(result["disk"]) == ["1", "4"]
    assert not (tmp_path / "f").exists()


def test_waits_that_fail_write_nothing(tmp_path, refused):
    """A run that fails, and a folder with other things in it."""
    (tmp_path / "mine").write_text("x")
    own = [*TINY, "data=text", "data.path=nowhere.txt", f"out={tmp_path}/w"]
    for folder, message in ((tmp_path / "f", "nowhere.txt"), (tmp_path, "folder=")):
        refused(main(["waits", *own, f"folder={folder}"]), message)
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_a_step_after_a_save_is_timed_with_it():
    rows = [{"step": n, "seconds": n + 5.0 * (n > 3), "ms_per_step": 1000.0} for n in range(1, 6)]
    assert step_seconds([{"step": 0, "val_loss": 2.0}, *rows]) == {2: 1, 3: 1, 4: 6, 5: 1}
