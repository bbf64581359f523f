"""The demo: a model reads texts before and after training, also in two commands."""

import json
import sys

import pytest
from matplotlib.image import imread

from benchmarks import extension
from benchmarks.words import main
from longctx.config.data_config import SOURCES


@pytest.mark.slow
def test_a_model_reads_before_and_after(model, tmp_path, monkeypatch, capsys):
    texts, out = tmp_path / "texts", tmp_path / "out"
    texts.mkdir()
    for number in range(60):
        lines = (f"Paragraph {n} of {number} tells about {n * number}." for n in range(60))
        (texts / f"{number}.md").write_text("\n\n".join(lines))
    own = ["context=1024", "stages=[[256,2],[512,1]]", "lengths=[512,1024]", "depths=2"]
    words = ["extension", f"init={model}", f"path={texts}", f"out={out}", *own, "samples=1"]
    words += ["device=cpu", "precision=fp32"]
    with monkeypatch.context() as stopped:
        stopped.setattr(extension, "train", lambda *_: sys.exit(130))
        with pytest.raises(SystemExit):
            main(words)
    assert [*json.loads((out / "result.json").read_text())["readings"]] == ["before"]
    try:
        assert main(words) == 0
    finally:
        module = type(SOURCES["needles"]).__module__
        SOURCES.remove("needles")  # of examples/needles.py
        del sys.modules[module]
    readings = json.loads((out / "result.json").read_text())["readings"]
    assert [one["context"] for one in readings.values()] == [512, 1024, 1024]
    for reading in readings.values():
        assert reading["perplexity"][-1]["last"] == 1024
        assert all(row["perplexity"] > 1 for row in reading["perplexity"])
        assert reading["passkeys"]["accuracy"] == [[0, 0], [0, 0]]
    assert imread(out / "result.png").std() > 0.01
    assert f"longctx chat {out}/stage-2" in capsys.readouterr().out
    for wrong in ("lr=0.1", "seq_len=512"):
        assert main([*words, wrong]) == 2
    assert main(["extension", "stages=[[256]]"]) == 2
