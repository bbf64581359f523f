"""Whole runs in this process: what they leave behind, what they say, and that a step's loss does
not depend on its pieces.
"""

import itertools
import json
import re
import resource
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import yaml
from torch.utils.data import DataLoader

import train
from longctx import cli
from longctx.config.request import Request
from longctx.data import Data, DataConfig, SampleStream, load
from longctx.evaluation.subject import load_model
from longctx.planner.hardware import Machine
from longctx.runs import checkpoints, run_folder
from longctx.training import resolve
from longctx.training.batches import micro_batch
from longctx.training.loop import step_batches
from longctx.training.module import TrainingModule
from longctx.training.parallel import Parallel
from longctx.training.schedule import Schedule

Words = Callable[..., list[str]]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    state: dict[str, torch.Tensor] = torch.load(
        run_folder.checkpoints(folder)[-1], weights_only=True
    )["state_dict"]
    return state


def steps(folder: Path) -> list[dict[str, Any]]:
    return [row for row in run_folder.read_metrics(folder) if "loss" in row]


def test_a_run_leaves_what_others_read(
    words: Words, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        train.main(
            words(
                max_steps=12,
                keep_checkpoints=2,
                checkpoint_every=4,
                log_every=3,
                val_every=5,
                lr=0.01,
            )
        )
        == 0
    )
    folder = (
        tmp_path
        / "runs"
        / "tiny-flash-64-text-layers1-channels32-ffn48-batchsize2-accumulate2-lr0.01-001"
    )
    names = {path.name for path in folder.iterdir()}
    own = {"config.yaml", "metrics.jsonl", "kernel.lock.json", "checkpoints"}
    assert names == own | {"tokenizer.json", "tokenizer_config.json"}
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == [
        "last.ckpt",
        "step-00000008.ckpt",
        "step-00000012.ckpt",
    ]
    assert (folder / "checkpoints" / "last.ckpt").resolve() == run_folder.checkpoints(folder)[
        -1
    ].resolve()
    config = yaml.safe_load((folder / "config.yaml").read_text())
    assert (config["max_steps"], config["accumulate"], config["model"]["vocab_size"]) == (
        12,
        2,
        320,
    )

    rows = steps(folder)
    assert [row["step"] for row in rows] == [1, 3, 5, 6, 9, 10, 12]
    keys = {
        "loss",
        "lr",
        "grad_norm",
        "tokens_per_second",
        "ms_per_step",
        "padding_share",
        "data_wait_ms",
        "epoch",
    }
    assert keys | {"tokens_seen", "process_peak_gib", "seconds"} <= rows[0].keys()
    validations = [row for row in run_folder.read_metrics(folder) if "val_loss" in row]
    assert [row["step"] for row in validations] == [0, 5, 10, 12]
    assert validations[-1]["val_perplexity"] < 0.7 * validations[0]["val_perplexity"]
    val = load(DataConfig(**config["data"]), 64).val
    whole = micro_batch([val[i] for i in range(len(val))])
    mean = load_model(folder)[0](whole.tokens, whole.targets, whole.mask)
    assert validations[-1]["val_loss"] == pytest.approx(mean.item(), rel=1e-5)

    printed = capsys.readouterr()
    assert "\x1b" not in printed.out
    assert f"python eval.py checkpoint={folder}" in printed.out
    assert "flash: " in printed.out
    assert "Tip" not in printed.err + printed.out

    model, tokenizer, saved = load_model(folder)
    assert saved == json.loads(json.dumps(config))
    assert model.config.layers == 1
    assert tokenizer.decode(tokenizer.encode("a long text")) == "a long text"
    again, _, _ = load_model(folder / "checkpoints" / "last.ckpt", attention="naive")
    tokens = torch.arange(12)[None]
    torch.testing.assert_close(model(tokens), again(tokens))


def test_a_step_is_as_long_as_the_learning_rate_it_logs(words: Words, tmp_path: Path) -> None:
    assert train.main(words(name="r", max_steps=1, lr=0.01, warmup_steps=10)) == 0
    [row] = steps(tmp_path / "runs" / "r")
    assert row["lr"] == pytest.approx(0.001)
    moved = (
        weights(tmp_path / "runs" / "r")["model.norm.weight"] - 1
    ).abs()  # Adam's first step is ±lr, undecayed
    torch.testing.assert_close(moved, torch.full_like(moved, row["lr"]), rtol=1e-3, atol=0)


class Uneven:
    """A data set's rows with 1 to 63 scored tokens each, the rest padding."""

    def __init__(self, data: Data) -> None:
        self.data = data
        self.train = [
            self._cut(data.train[i % len(data.train)], scored)
            for i, scored in enumerate([63, 1, 2, 40, 5] * 4)
        ]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.data, name)

    def order(self, *where: int) -> SampleStream:
        return SampleStream(len(self.train), *where)

    @staticmethod
    def _cut(row: dict[str, torch.Tensor], scored: int) -> dict[str, torch.Tensor]:
        place = torch.arange(len(row["tokens"]))
        targets = torch.where(place < scored, row["tokens"].roll(-1), -100)
        behind = place > scored
        return row | {"targets": targets, "doc_ids": behind.long(), "padding": behind.sum()}


@pytest.mark.parametrize(("precision", "rel"), [("fp32", 1e-5), ("bf16", 1e-2)])
def test_a_step_is_the_same_in_one_piece_or_in_many(
    words: Words, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, precision: str, rel: float
) -> None:
    monkeypatch.setattr(
        "longctx.training.resolve.load", lambda config, seq_len: Uneven(Data(config, seq_len))
    )
    shape = {"max_steps": 5, "clip": 0.3, "precision": precision}
    assert train.main(words(name="one", batch_size=4, accumulate=1, **shape)) == 0
    assert train.main(words(name="many", batch_size=1, accumulate=4, **shape)) == 0
    one, many = tmp_path / "runs" / "one", tmp_path / "runs" / "many"
    assert len({row["padding_share"] for row in steps(one)}) > 2
    for a, b in zip(steps(one), steps(many), strict=True):
        assert a["tokens_seen"] == b["tokens_seen"]
        assert a["loss"] == pytest.approx(b["loss"], rel=rel)
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=10 * rel)
    if precision == "fp32":
        torch.testing.assert_close(weights(one), weights(many), rtol=1e-4, atol=1e-5)


def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(words: Words, tmp_path: Path) -> None:
    assert train.main(words(name="whole", max_steps=9, log_every=2, checkpoint_every=5)) == 0
    whole = tmp_path / "runs" / "whole"
    assert train.main(words(name="parts", max_steps=9, log_every=2, checkpoint_every=5)) == 0
    parts = tmp_path / "runs" / "parts"
    run_folder.checkpoints(parts)[-1].unlink()
    assert train.main([f"resume={parts}"]) == 0
    kept = ("step", "loss", "grad_norm", "lr", "tokens_seen", "epoch", "padding_share")
    pick = [[{key: row[key] for key in kept} for row in steps(folder)] for folder in (whole, parts)]
    assert pick[0] == pick[1]
    torch.testing.assert_close(weights(whole), weights(parts), rtol=0, atol=0)


def test_a_finished_run_goes_on_with_more_steps(
    words: Words, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train.main(words(name="r", max_steps=3)) == 0
    folder = tmp_path / "runs" / "r"
    assert train.main([f"resume={folder}"]) == 2
    assert "has done its 3 steps" in capsys.readouterr().err
    assert train.main([f"resume={folder}", "max_steps=5"]) == 0
    assert [row["step"] for row in steps(folder)] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model.vocab_size": "128"}, "model.vocab_size=128"),
        *([] if torch.cuda.is_available() else [({"device": "cuda"}, "device=cuda")]),
        ({"attention.options.kernel": "odd"}, "attention.options.kernel"),
        ({"data.path": "EMPTY"}, "data.path"),
        (
            {"data.path": "SHORT"},
            "none of 5 documents has 2 tokens, so there is nothing to predict",
        ),
        ({"runs": "/proc/runs"}, "runs=/proc/runs"),
        ({"passkey": "true", "passkey.lengths": "[1000000]"}, "too few to fill 1,000,000"),
        (
            {"val_every": "1", "data.val_fraction": "0"},
            "val_every=1: no document is left to validate on",
        ),
    ],
)
def test_a_mistake_leaves_no_run_behind(
    words: Words,
    changes: dict[str, str],
    said: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "EMPTY").mkdir()
    (tmp_path / "SHORT").mkdir()
    for number in range(5):
        (tmp_path / "SHORT" / f"{number}.txt").write_text("")
    changes = {
        key: str(tmp_path / value) if value.isupper() else value for key, value in changes.items()
    }
    assert train.main(words(**changes)) == 2
    printed = capsys.readouterr().err.splitlines()
    assert printed[-1].startswith("error: ")
    assert said in printed[-1]
    assert not (tmp_path / "runs").exists()


def test_a_name_is_not_used_twice(words: Words, capsys: pytest.CaptureFixture[str]) -> None:
    assert train.main(words(name="mine", max_steps=1)) == 0
    assert train.main(words(name="mine", max_steps=1)) == 2
    assert "resume=" in capsys.readouterr().err


def test_resume_refuses_other_data_and_other_models(
    words: Words, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "runs" / "r"
    assert train.main(words(name="r", max_steps=2)) == 0
    assert train.main([f"resume='{folder}'", "max_steps=3", "seed=5"]) == 2
    assert "seed cannot change" in capsys.readouterr().err
    text = (folder / "config.yaml").read_text()
    for group, key, value, said in (
        ("data", "documents", 30, "no longer those that the run began with"),
        ("model", "window", 7, "model.window=7, where the run began with None"),
        (None, "weight_decay", 0.5, "weight_decay=0.5, where the run began with 0.1"),
    ):
        edited = yaml.safe_load(text)
        (edited[group] if group else edited)[key] = value
        (folder / "config.yaml").write_text(yaml.safe_dump(edited))
        assert train.main([f"resume={folder}", "max_steps=3"]) == 2
        assert said in capsys.readouterr().err


def test_a_loss_that_is_no_number_ends_the_run_with_advice(
    words: Words, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    wild = {"max_steps": 30, "lr": 10.0, "warmup_steps": 0, "clip": None}
    for name, std, advice in (
        ("loss", 1e30, "try a smaller lr"),
        ("val_loss", 1e18, "(model.init_std=1e+18)"),
    ):
        assert train.main(words(name=name, model__init_std=std, **wild)) == 1
        assert advice in capsys.readouterr().err
        lines = (tmp_path / "runs" / name / "metrics.jsonl").read_text().splitlines()
        assert json.loads(lines[-1], parse_constant=refuse)[name] is None


def test_weights_that_are_no_numbers_are_not_saved(
    words: Words,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(
        "longctx.training.learning_rate.learning_rate",
        lambda step, run: float("nan") if step else 0.1,
    )
    assert (
        train.main(words(name="r", max_steps=30, log_every=30, val_every=30, checkpoint_every=3))
        == 1
    )
    assert "gradient norm is nan at step 3" in capsys.readouterr().err
    assert not run_folder.checkpoints(tmp_path / "runs" / "r")


def test_a_run_finds_its_documents_from_every_folder(
    words: Words,
    corpus: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "empty.jsonl").write_text('{"text": ""}\n' * 3)
    monkeypatch.chdir(corpus.parent)
    said = words(
        name="r",
        max_steps=2,
        data__path=f"[{corpus.name},{tmp_path / 'empty.jsonl'}]",
        runs=tmp_path / "runs",
    )
    assert train.main(said) == 0
    assert "60 documents (3 empty left out)" in capsys.readouterr().out
    monkeypatch.chdir(tmp_path)
    assert train.main(["resume=runs/r", "max_steps=3"]) == 0


def test_running_out_of_memory_says_what_to_change(
    words: Words, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def explode(*args: object, **kwargs: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9.00 GiB")

    monkeypatch.setattr("longctx.training.optimizers.clip_gradients", explode)
    assert train.main(words(attention="naive")) == 1
    assert "attention=flash" in capsys.readouterr().err
    assert train.main(words(batch_size=4)) == 1
    assert "batch_size=2 accumulate=4" in capsys.readouterr().err


@pytest.mark.slow
def test_memory_that_a_machine_does_not_have_is_refused_and_not_a_kill(
    words: Words, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    used = int(re.findall(r"VmData:\s+(\d+) kB", Path("/proc/self/status").read_text())[0]) << 10
    monkeypatch.setattr(
        "longctx.training.out_of_memory.machine_memory", lambda: (used + (256 << 20)) // 9 * 10
    )
    before = resource.getrlimit(resource.RLIMIT_DATA)
    assert train.main(words(attention="naive", seq_len=2048, max_steps=1)) == 1
    said = capsys.readouterr().err
    assert "out of memory in step 1" in said
    assert "at seq_len=2048" in said
    assert "attention=flash" in said
    assert resource.getrlimit(resource.RLIMIT_DATA) == before
    assert train.main(words(attention="flash", seq_len=2048, max_steps=1)) == 0


@pytest.mark.slow
def test_a_sweep_survives_a_job_that_fails(
    words: Words, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert (
        train.main(
            ["-m", *words(max_steps=2, model__vocab_size="128,null", wandb__mode="disabled")]
        )
        == 1
    )
    printed = capfd.readouterr()
    assert "error: model.vocab_size=128" in printed.err
    *_, header, failed, done = printed.out.splitlines()
    assert header.split()[0] == "job"
    assert "mistake" in failed
    assert "well" in done
    assert len(list((tmp_path / "runs").iterdir())) == 1


def test_wandb_is_not_imported_when_disabled(words: Words) -> None:
    code = f"import sys, train; assert train.main({words(max_steps=1)!r}) == 0; "
    code += "assert 'wandb' not in sys.modules"
    root = Path(train.__file__).parent
    assert (
        subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True).returncode == 0
    )


@pytest.mark.parametrize("content", [b"", b"not a checkpoint", b"PK\x03\x04 torn"])
def test_a_foreign_checkpoint_is_one_clear_line(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x.ckpt").write_bytes(content)
    with pytest.raises(ValueError, match=r"x\.ckpt"):
        load_model(tmp_path / "x.ckpt")


def test_a_torn_checkpoint_is_named(tmp_path: Path) -> None:
    torch.save({"x": torch.zeros(10_000)}, tmp_path / "x.ckpt")
    (tmp_path / "x.ckpt").write_bytes((tmp_path / "x.ckpt").read_bytes()[:20_000])
    with pytest.raises(ValueError, match=r"x\.ckpt: not a checkpoint, or not a whole one"):
        load_model(tmp_path / "x.ckpt")


def test_a_checkpoint_of_another_program_or_with_code_in_it(tmp_path: Path) -> None:
    torch.save({"state_dict": {}}, tmp_path / "x.ckpt")
    with pytest.raises(ValueError, match="another program"):
        load_model(tmp_path / "x.ckpt")
    torch.save({"longctx": {"format": 1}, "call": print}, tmp_path / "x.ckpt")
    with pytest.raises(ValueError, match="cannot be read safely, it holds more than tensors"):
        load_model(tmp_path / "x.ckpt")
    torch.save({"longctx": {"format": 1}}, tmp_path / "x.ckpt")
    with pytest.raises(ValueError, match="written in format 1"):
        load_model(tmp_path / "x.ckpt")
    with pytest.raises(ValueError, match="no such file"):
        load_model(tmp_path / "nothing")
    with pytest.raises(ValueError, match="not the folder of a run"):
        load_model(tmp_path)


def test_a_checkpoint_that_lacks_a_part_is_one_clear_line(words: Words, tmp_path: Path) -> None:
    assert train.main(words(name="r", max_steps=1)) == 0
    path = run_folder.checkpoints(tmp_path / "runs" / "r")[-1]
    whole = torch.load(path, weights_only=True)
    for part in checkpoints.TO_RESUME:
        torch.save({key: value for key, value in whole.items() if key != part}, path)
        with pytest.raises(ValueError, match=f"not a whole checkpoint, it has no {part}"):
            checkpoints.read(path, checkpoints.TO_RESUME)
        assert train.main([f"resume={tmp_path / 'runs' / 'r'}", "max_steps=2"]) == 2
    torch.save({key: whole[key] for key in ("longctx", "state_dict")}, path)
    load_model(path)
    torch.save(whole | {"longctx": {"format": checkpoints.FORMAT}}, path)
    with pytest.raises(ValueError, match="it has no config, data"):
        load_model(path)
    torch.save(whole | {"state_dict": dict(list(whole["state_dict"].items())[1:])}, path)
    with pytest.raises(ValueError, match="its weights are not those of its model"):
        load_model(path)
    assert train.main([f"resume={tmp_path / 'runs' / 'r'}", "max_steps=2"]) == 2, (
        "resume says so too"
    )


def test_a_flipped_bit_stops_resume_and_evaluation(
    words: Words, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train.main(words(name="r", max_steps=2, checkpoint_every=1)) == 0
    older, newest = run_folder.checkpoints(tmp_path / "runs" / "r")
    content = bytearray(newest.read_bytes())
    content[len(content) // 2] ^= 1
    newest.write_bytes(content)
    assert train.main([f"resume={tmp_path / 'runs' / 'r'}", "max_steps=3"]) == 2
    assert (
        f"{newest}: damaged" in (said := capsys.readouterr().err) and f"go on from {older}" in said
    )
    with pytest.raises(ValueError, match="damaged"):
        load_model(tmp_path / "runs" / "r")
    newest.unlink()
    assert train.main([f"resume={tmp_path / 'runs' / 'r'}", "max_steps=3"]) == 0


def test_a_checkpoint_that_cannot_be_finished_leaves_the_last_one(tmp_path: Path) -> None:
    import resource

    target = tmp_path / "step-00000001.ckpt"
    checkpoints.save({"longctx": {}, "x": torch.zeros(10)}, target)
    before = target.read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        with pytest.raises(OSError, match="step-00000001"):
            checkpoints.save({"longctx": {}, "x": torch.zeros(1_000_000)}, target)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert target.read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == [target.name]


def test_a_mix_resumes_exactly_and_facts_are_asked_for_at_every_validation(
    words: Words, corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changes = {
        **{
            "data": "mix",
            "data__path": None,
            "data__mix__prose__path": corpus,
            "data__mix__prose__weight": 2,
        },
        **{"data__mix__recall__source": "needles", "data__mix__recall__path": corpus},
        **{"data__mix__recall__documents": 12, "data__mix__recall__length": 400, "val_every": 2},
        **{
            "passkey": "true",
            "passkey__lengths": "[600]",
            "passkey__samples": 1,
            "passkey__depths": "[0,1]",
        },
    }
    assert train.main(words(name="whole", max_steps=4, **changes)) == 0
    assert "passkey at 600 0%  needle at 600 0%" in capsys.readouterr().out
    whole = tmp_path / "runs" / "whole"
    found = [row for row in run_folder.read_metrics(whole) if "val_loss" in row]
    assert [row["facts_found/passkey/600"] for row in found] == [0, 0, 0]
    assert (
        train.main(
            words(name="cut", max_steps=4, checkpoint_every=2, keep_checkpoints=9, **changes)
        )
        == 0
    )
    cut = tmp_path / "runs" / "cut"
    (cut / "checkpoints" / "step-00000004.ckpt").unlink()
    assert train.main([f"resume={cut}", "passkey=false"]) == 0
    a, b = (
        torch.load(run_folder.checkpoints(x)[-1], weights_only=True)["state_dict"]
        for x in (whole, cut)
    )
    for name in a:
        assert torch.equal(a[name], b[name]), name


def test_shorter_rows_first_keep_the_tokens_of_a_step_and_resume_exactly(
    words: Words, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changes = {"seq_len_schedule": "[[16,2],[32,2]]", "max_steps": 7, "val_every": 100}
    assert train.main(words(name="whole", **changes)) == 0
    assert "2 steps with rows of 16, 2 steps with rows of 32 first" in capsys.readouterr().out
    whole = steps(tmp_path / "runs" / "whole")
    plain = words(name="plain", **{**changes, "seq_len_schedule": None})
    assert train.main(plain) == 0
    share = [row["tokens_seen"] / (1 - row["padding_share"]) for row in whole[:1]]
    assert share[0] == pytest.approx(64 * 2 * 2)
    epochs = [row["epoch"] for row in whole]
    assert epochs == sorted(epochs)
    for stop in (1, 3, 4, 5):
        cut = tmp_path / "runs" / f"cut{stop}"
        assert (
            train.main(words(name=cut.name, checkpoint_every=stop, keep_checkpoints=9, **changes))
            == 0
        )
        for path in run_folder.checkpoints(cut)[1:]:
            path.unlink()
        assert train.main([f"resume={cut}"]) == 0
        again = steps(cut)
        kept = ("step", "loss", "grad_norm", "lr", "tokens_seen", "epoch")
        assert [[row[key] for key in kept] for row in again] == [
            [row[key] for key in kept] for row in whole
        ]
        torch.testing.assert_close(
            weights(cut), weights(tmp_path / "runs" / "whole"), rtol=0, atol=0
        )
    capsys.readouterr()
    assert train.main(words(**{**changes, "max_steps": 4})) == 2
    assert "takes all 4 steps; leave some for seq_len" in capsys.readouterr().err


def test_loop_and_stock_trainer_give_the_same_losses(words: Words, tmp_path: Path) -> None:
    """The module trains under a stock lightning.Trainer as it does in our loop."""
    overrides = words(name="ours", max_steps=20, accumulate=1, clip=0.3, lr=0.01, val_every=100)
    assert train.main(overrides) == 0
    request = Request(*cli.compose("train", cli.read("train", overrides).overrides))
    request = request._replace(config=replace(request.config, name="stock"))
    run = resolve.resolve(request, Machine(0, None, False, 0.0))
    assert run.data is not None
    parallel = Parallel(run.config, "cpu", Machine(0, None, False, 0.0))
    batches = step_batches(run, Schedule(run, [run.data]), parallel)
    micro = [batch for step in itertools.islice(batches, 20) for batch in step.micro]

    class Losses(pl.Callback):
        def __init__(self) -> None:
            self.losses = list[float]()

        def on_train_batch_end(
            self, trainer: pl.Trainer, module: pl.LightningModule, outputs: Any, *_: Any
        ) -> None:
            self.losses.append(float(outputs["loss"]))

    seen = Losses()
    trainer = pl.Trainer(
        accelerator="cpu",
        max_steps=20,
        logger=False,
        callbacks=[seen],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(TrainingModule(run), DataLoader(micro, batch_size=None))
    ours = [row["loss"] for row in steps(tmp_path / "runs" / "ours")]
    assert seen.losses == pytest.approx(ours, rel=1e-6)
    assert len(ours) == 20 and ours[-1] < ours[0]
