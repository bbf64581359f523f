"""A run of random weights, and eval.py called on it."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch

import eval as evaluation
from longctx.attention.description import AttentionConfig
from longctx.config.train_config import TrainConfig
from longctx.data import DataConfig, load
from longctx.data.tokenizer import train
from longctx.model import GPT, GPTConfig, lora
from longctx.parallel import sharding
from longctx.runs import checkpoints, run_folder
from longctx.spec.model_config import LoraConfig
from tests.eval_script.sample import TEXTS, Evaluate
from tests.written import write


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of random weights, as training leaves it."""
    base = tmp_path_factory.mktemp("base")
    docs, folder = base / "docs", base / "runs" / "a"
    docs.mkdir()
    (folder / "checkpoints").mkdir(parents=True)
    for n, text in enumerate(TEXTS):
        (docs / f"{n:02d}.txt").write_text(text)
    tokenizer = train(TEXTS, 300)
    config = TrainConfig(
        seq_len=64,
        attention=AttentionConfig("naive"),
        model=GPTConfig(
            **{"vocab_size": 320, "layers": 2, "channels": 16, "heads": 2, "kv_heads": 1},
            **{"ffn": 24, "window": 20, "window_layers": [0]},
        ),
        lora=LoraConfig(rank=2),
        data=DataConfig(source="text", path=str(docs), val_fraction=0.3, cache=str(base / "cache")),
    )
    torch.manual_seed(0)
    model = lora.add(GPT(config.model), config.lora)
    for layer in lora.layers(model):
        torch.nn.init.normal_(layer.lora_b, std=0.02)
    weights = sharding.parts(torch.nn.ModuleDict({"model": model}))
    tokenizer.save(folder / "tokenizer.json")
    data = load(dataclasses.replace(config.data, tokenizer=str(folder)), config.seq_len)
    about = {"config": run_folder.plain(config), "data": data.fingerprint, "kernel_lock": None}
    state = {"random": checkpoints.random_state()}
    write(checkpoints.saving(run_folder.checkpoint_path(folder, 3), about, state, weights))
    run_folder.write_config(folder, config)
    return folder


@pytest.fixture
def evaluate(run: Path, capsys: pytest.CaptureFixture[str]) -> Evaluate:
    """Evaluates `run`, or `checkpoint` in it, on the CPU: the JSON written and the text printed."""

    def call(*overrides: str, checkpoint: Path = run) -> tuple[dict, str]:
        assert evaluation.main([f"checkpoint={checkpoint}", "device=cpu", *overrides]) == 0
        output = capsys.readouterr().out
        path = Path("".join(output.split("\n")[-2:]).strip())
        assert path.parent == run / "eval"
        return json.loads(path.read_text()), output

    return call
