"""Whole runs in this process: what they leave behind, and a loss that no piece changes."""

import gc
import itertools
import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import yaml
from torch.utils.data import DataLoader

import longctx
import train
from longctx import cli
from longctx.data import DataConfig, load
from longctx.runs import checkpoints, run_folder
from longctx.runs.metrics import BY_POSITION
from longctx.spec.hardware import Machine
from longctx.system import StopSignal
from longctx.training import resolve
from longctx.training.batches import Sequences, micro_batch, read_ahead
from longctx.training.loop import Stops
from longctx.training.module import TrainingModule
from tests.training.sample_run import losses, steps, validations, weights


def test_a_run_leaves_what_others_read(overrides, tmp_path, capsys):
    every = {"checkpoint_every": 4, "log_every": 3, "val_every": 5, "val_rows": 0}
    assert train.main(overrides(max_steps=12, keep_checkpoints=2, lr=0.01, **every)) == 0
    name = "tiny-flash-64-text-layers1-channels32-ffn48-lr0.01-001"
    folder = tmp_path / "runs" / name
    names = {path.name for path in folder.iterdir()}
    own = {"config.yaml", "metrics.jsonl", "kernel.lock.json", "checkpoints"}
    assert names == own | {"tokenizer.json", "tokenizer_config.json"}
    saved = sorted(path.name for path in (folder / "checkpoints").iterdir())
    assert saved == ["last.ckpt", "step-00000008.ckpt", "step-00000012.ckpt"]
    last = folder / "checkpoints" / "last.ckpt"
    assert last.resolve() == run_folder.checkpoints(folder)[-1].resolve()
    config = yaml.safe_load((folder / "config.yaml").read_text())
    assert (config["max_steps"], config["accumulate"]) == (12, 2)
    assert config["model"]["vocab_size"] == 320

    rows = steps(folder)
    assert [row["step"] for row in rows] == [1, 3, 5, 6, 9, 10, 12]
    keys = {"loss", "lr", "grad_norm", "tokens_per_second", "ms_per_step", "padding_share"}
    keys |= {"data_wait_ms", "epoch", "tokens_seen", "process_peak_gib", "seconds"}
    assert keys <= rows[0].keys() and "memory_predicted_gib" not in rows[0]  # of a GPU
    validated = validations(folder)
    assert [row["step"] for row in validated] == [0, 5, 10, 12]
    assert validated[-1]["val_perplexity"] < 0.7 * validated[0]["val_perplexity"]
    val = load(DataConfig(**config["data"]), 64).val
    batch = micro_batch([val[i] for i in range(len(val))])
    mean = longctx.load(folder, "cpu")[0](batch.tokens, batch.targets, batch.mask)
    assert validated[-1]["val_loss"] == pytest.approx(mean.item(), rel=1e-5)

    printed = capsys.readouterr()
    assert "\x1b" not in printed.out
    assert f"longctx eval {folder}" in printed.out
    assert "flash: " in printed.out
    assert "Tip" not in printed.err + printed.out

    model, tokenizer = longctx.load(folder, "cpu")
    assert checkpoints.read(last)["longctx"]["config"] == json.loads(json.dumps(config))
    assert model.config.layers == 1
    assert tokenizer.decode(tokenizer.encode("a long text")) == "a long text"
    again, _ = longctx.load(last, "cpu", attention="naive")
    tokens = torch.arange(12)[None]
    torch.testing.assert_close(model(tokens), again(tokens))


def test_the_logged_learning_rate_is_the_one_used(trained):
    run = trained(max_steps=1, lr=0.001, warmup_steps=1)
    [row] = steps(run)
    assert row["lr"] == pytest.approx(0.001)
    # Adam's first step is ±lr, undecayed
    moved = (weights(run)["model.norm.weight"] - 1).abs()
    torch.testing.assert_close(moved, torch.full_like(moved, row["lr"]), rtol=1e-3, atol=0)


@pytest.mark.parametrize(("precision", "rel"), [("fp32", 1e-5), ("bf16", 1e-2)])
def test_a_step_is_the_same_in_one_piece_or_in_many(trained, precision, rel):
    """Sequences of single documents have from a few targets to 63."""
    shape = {"max_steps": 5, "clip": 0.3, "precision": precision, "data__packing": False}
    one = trained("one", batch_size=4, accumulate=1, **shape)
    many = trained("many", batch_size=1, accumulate=4, **shape)
    assert len({row["padding_share"] for row in steps(one)}) > 2
    for row, expected in zip(steps(one), steps(many), strict=True):
        assert row["tokens_seen"] == expected["tokens_seen"]
        assert row["loss"] == pytest.approx(expected["loss"], rel=rel)
        assert row["grad_norm"] == pytest.approx(expected["grad_norm"], rel=10 * rel)
    if precision == "fp32":
        torch.testing.assert_close(weights(one), weights(many), rtol=1e-4, atol=1e-5)


def test_a_run_finds_its_documents_from_every_folder(
    trained, corpus, tmp_path, monkeypatch, capsys
):
    (tmp_path / "empty.jsonl").write_text('{"text": ""}\n{"text": null}\n' * 3)
    monkeypatch.chdir(corpus.parent)
    trained(max_steps=2, data__path=f"[{corpus.name},{tmp_path / 'empty.jsonl'}]")
    assert "60 documents (6 without text left out)" in capsys.readouterr().out
    monkeypatch.chdir(tmp_path)
    assert train.main(["resume=runs/r", "max_steps=3"]) == 0


def test_loop_and_stock_trainer_give_the_same_losses(overrides, tmp_path):
    """The module trains under a stock lightning.Trainer as it does in our loop."""
    command = overrides(name="ours", max_steps=20, accumulate=1, clip=0.3, lr=0.01, val_every=100)
    assert train.main(command) == 0
    request = cli.compose("train", command)
    request = request._replace(config=replace(request.config, name="stock"))
    run = resolve.resolve(request, Machine(0, None, 2.0**40))
    assert run.data is not None
    sequences = Sequences(run, run.data)
    batches = read_ahead(run, sequences.dataset, sequences.order(0, 0), 0)
    micro = [batch for step in itertools.islice(batches, 20) for batch in step]

    class Losses(pl.Callback):
        def __init__(self) -> None:
            self.losses = list[float]()

        def on_train_batch_end(
            self, trainer: pl.Trainer, module: pl.LightningModule, outputs: Any, *_: Any
        ) -> None:
            self.losses.append(float(outputs["loss"]))

    recorder = Losses()
    parts = ("checkpointing", "progress_bar", "model_summary")
    without: dict[str, Any] = {f"enable_{part}": False for part in parts} | {"logger": False}
    trainer = pl.Trainer(accelerator="cpu", max_steps=20, callbacks=[recorder], **without)
    trainer.fit(TrainingModule(run), DataLoader(micro, batch_size=None))
    ours = losses(tmp_path / "runs" / "ours")
    assert recorder.losses == pytest.approx(ours, rel=1e-6)
    assert len(ours) == 20 and ours[-1] < ours[0]


def test_processes_agree_to_stop_within_seconds(monkeypatch):
    """Ranks agree after every step of 8 s."""
    clock, asked = itertools.count(step=8.0), []
    monkeypatch.setattr("longctx.training.loop.time.monotonic", lambda: next(clock))

    def agreed(mine: torch.Tensor) -> torch.Tensor:
        asked.append(mine.tolist())
        return mine

    parallel = SimpleNamespace(ranks=2, device="cpu", is_first=True, all_reduce_max=agreed)
    stops = Stops(parallel, StopSignal())  # type: ignore[arg-type]
    stops.begin()
    assert not any(stops.after(steps, waits_anyway=False) for steps in (1, 2, 3))
    assert asked == [[0.0, 8.0]] * 3


# A validation's loss by position, and its memory


def test_the_buckets_of_a_run_are_its_losses(trained):
    """A model that knows nothing yet loses ln(vocabulary) everywhere."""
    folder = trained(max_steps=1, lr=0.0, val_rows=0)
    before, after = validations(folder)
    buckets = {key: value for key, value in before.items() if key.startswith(BY_POSITION)}
    assert list(buckets) == [f"{BY_POSITION}/{2**b}" for b in range(6)]
    for value in buckets.values():
        assert value == pytest.approx(before["val_loss"], rel=0.02)
    assert {key: after[key] for key in buckets} == pytest.approx(buckets)


@pytest.mark.gpu
@pytest.mark.parametrize("length", [1024, 8192])
def test_memory_of_pass_keys_is_predicted(trained, length):
    keys = {"device": "cuda", "attention": "naive", "seq_len": 2048, "batch_size": 2}
    keys |= {"passkey": "true", "passkey.lengths": f"[{length}]", "passkey.samples": 3}
    keys |= {"data": "embedded", "data.path": None, "data.vocab_size": 4096, "val_rows": 4}
    keys |= {"model.channels": 256, "model.ffn": 768, "model.heads": 4, "kernel.lock": "off"}
    keys |= {"graphs": "false", "memory": "fast", "max_steps": 2}
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    last = steps(trained(**keys))[-1]
    assert last["memory_peak_gib"] == pytest.approx(last["memory_predicted_gib"], rel=0.1)
