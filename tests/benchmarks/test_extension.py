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
    own = ["context=1024", "seq_len=256", "steps=2", "lengths=[512,1024]", "depths=2", "samples=1"]
    words = ["extension", f"init={model}", f"path={texts}", f"out={out}", *own]
    words += ["device=cpu", "precision=fp32"]
    with monkeypatch.context() as stopped:
        stopped.setattr(extension, "train", lambda *_: sys.exit(130))
        with pytest.raises(SystemExit):
            main(words)
    assert (out / "result.json").exists()  # what was measured before training
    try:
        assert main(words) == 0
    finally:
        SOURCES.remove("needles")  # of examples/needles.py
        del sys.modules["examples.needles"]
    result = json.loads((out / "result.json").read_text())
    assert result["before"]["context"] == 512
    for when in ("before", "after"):
        assert result[when]["perplexity"][-1]["last"] == 1024
        assert all(row["perplexity"] > 1 for row in result[when]["perplexity"])
        assert result[when]["passkeys"]["accuracy"] == [[0, 0], [0, 0]]
    assert imread(out / "result.png").std() > 0.01
    assert f"longctx chat {out}/trained" in capsys.readouterr().out
    assert main([*words, "lr=0.1"]) == 2
