"""The worked example, tiny and on a CPU: every command of it runs, and its result holds what the
plot of docs/long-context.md shows.
"""

import json
from pathlib import Path

import pytest

from benchmarks.extension import draw
from benchmarks.words import main


@pytest.mark.slow
def test_small_run_writes_report_and_plot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LONGCTX_CACHE", str(tmp_path / "cache"))
    texts = tmp_path / "texts"
    texts.mkdir()
    for n in range(30):
        (texts / f"{n}.txt").write_text(
            "\n".join(f"line {i * n} of {n} dull texts" for i in range(20 + 5 * n))
        )
    overrides = [
        "short=512",
        "long=1024",
        "layers=1",
        "channels=64",
        "vocab=512",
        "steps=2",
        "tune_steps=1",
        "tokens=1024",
    ]
    out = tmp_path / "out"
    assert (
        main(
            [
                "extension",
                *overrides,
                "documents=40",
                "samples=1",
                f"path={texts}",
                "device=cpu",
                f"out={out}",
            ]
        )
        == 0
    )
    report = json.loads((out / "extension.json").read_text())
    assert list(report["models"]) == ["as pretrained", "YaRN, not trained", "YaRN, fine-tuned"]
    for model in report["models"].values():
        grid = model["recall"]["passkey"]
        assert (grid["lengths"], len(grid["depths"])) == ([512, 1024], 11)
        assert model["by_position"][0]["first"] == 1
    assert report["options"]["long"] == 1024
    assert (out / "extension.png").read_bytes().startswith(b"\x89PNG")
    config = json.loads((out / "long" / "config.json").read_text())
    assert config["rope_parameters"] | {"rope_theta": 0} == {
        **{
            "rope_type": "yarn",
            "factor": 2.0,
            "original_max_position_embeddings": 512,
            "rope_theta": 0,
        }
    }
    draw(report, tmp_path / "again.png")
    assert main(["extension", f"out={out}"]) == 2
