"""A run of random weights, and `longctx eval` or `score` called on it."""

import json
from pathlib import Path

import pytest

import train
from longctx import cli
from tests.eval_script.sample import TEXTS, Evaluate


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that trained an adapter on random weights for three steps."""
    base = tmp_path_factory.mktemp("base")
    (base / "docs").mkdir()
    for n, text in enumerate(TEXTS):
        (base / "docs" / f"{n:02d}.txt").write_text(text)
    words = ["data=text", f"data.path={base}/docs", f"data.cache={base}/cache", "seq_len=64"]
    words += ["data.val_fraction=0.3", "attention=naive", "batch_size=2"]
    words += ["accumulate=1", "workers=0", "device=cpu", "tracker=none", f"runs={base}/runs"]
    words += ["lr=1e-4", "compile=false"]
    model = ["model=tiny", "model.vocab_size=320", "model.layers=2", "model.channels=16"]
    model += ["model.heads=2", "model.kv_heads=1", "model.ffn=24", "data.vocab_size=300"]
    model += ["model.window=20", "model.window_layers=[0]"]
    assert train.main([*words, *model, "name=whole", "max_steps=1"]) == 0
    adapter = [f"init={base}/runs/whole", "lora.rank=2"]
    assert train.main([*words, *adapter, "name=a", "max_steps=3"]) == 0
    return base / "runs" / "a"


@pytest.fixture
def evaluate(run: Path, capsys: pytest.CaptureFixture[str]) -> Evaluate:
    """Evaluates `run`, or `checkpoint` in it, on the CPU: the JSON written and the text printed."""

    def call(*overrides: str, checkpoint: Path = run, command: str = "eval") -> tuple[dict, str]:
        assert cli.main([command, f"checkpoint={checkpoint}", "device=cpu", *overrides]) == 0
        output, progress = capsys.readouterr()
        path = Path("".join(output.split("\n")[-2:]).strip())
        assert path.parent == run / "eval"
        return json.loads(path.read_text()), progress + output

    return call
