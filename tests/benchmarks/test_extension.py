"""The demo: a model reads texts before and after, also in two commands; cases are compared."""

import json
import sys

import pytest

from benchmarks import extension
from benchmarks.words import main
from longctx import system
from longctx.config.data_config import SOURCES

SMALL = ["context=1024", "lengths=[512,1024]", "samples=1", "device=cpu", "precision=fp32"]
SMALL += ["stages=[[512,2],[512,1]]", "depths=2"]


@pytest.mark.slow
def test_a_model_reads_before_and_after(model, tmp_path, monkeypatch, capsys):
    texts, out = tmp_path / "texts.md", tmp_path / "out"
    texts.write_text("\n\n".join(f"Paragraph {n} tells about {n * n}." for n in range(4000)))
    words = ["extension", f"init={model}", f"path={texts}", f"out={out}", *SMALL]
    with monkeypatch.context() as stopped:
        stopped.setattr(extension, "train", lambda *_: sys.exit(130))
        with pytest.raises(SystemExit):
            main(words)
    assert [*json.loads((out / "result.json").read_text())["readings"]] == ["before"]
    with system.caught() as stop:  # no step waits for a signal after training
        assert main(words) == 0 and not stop.waits
    for source in ("needles", "docstrings"):  # of examples/
        del sys.modules[type(SOURCES[source]).__module__]
        SOURCES.remove(source)
    readings = json.loads((out / "result.json").read_text())["readings"]
    assert [reading["context"] for reading in readings.values()] == [512, 1024, 1024]
    for reading in readings.values():
        assert min(reading["prose"], *reading["perplexity"].values()) > 1
        assert [*reading["perplexity"]][-1] == "1024"
        assert reading["passkeys"]["accuracy"] == [[0, 0], [0, 0]]
    assert f"longctx chat {out}/stage-2" in capsys.readouterr().out
    assert main([*words, "lr=0.1"]) == 2


@pytest.mark.slow
def test_cases_are_compared_over_seeds(model, tmp_path, capsys):
    words = ["early=[512]", "seeds=[1,2]", "cases=[nope=nope=1,wrong=nope=0]", f"out={tmp_path}/x"]
    assert main(["extension", f"init={model}", *SMALL, "documents=60", *words]) == 0
    assert "wrong-1: error: nope=0" in capsys.readouterr().out
    readings = json.loads((tmp_path / "x/result.json").read_text())["readings"]
    lengths = [x["passkeys"]["lengths"] for of in readings.values() for x in of.values()]
    assert lengths == [[512, 1024]] * 3 + [[512], [512], [512, 1024]]
    assert (tmp_path / "x/result.png").stat().st_size > 10_000
    assert '"no_rope_layers": [\n  0\n ]' in (tmp_path / "x/nope-1/nope/config.json").read_text()
