"""Evaluation of a Hugging Face folder, beside a run that starts from it."""

import json
from pathlib import Path

import pytest

import eval as evaluate
import train
from tests.training.sample_run import Overrides


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
