"""The benchmarks' command line: keys and values checked, help complete, nothing measured without a
GPU.
"""

import dataclasses

import pytest

from benchmarks.attention import Options
from benchmarks.words import BENCHMARKS, main
from longctx import cli


def test_overrides_fill_the_options():
    options = cli.options(Options, ["lengths=512,1024", "head_sizes=64", "masks=full", "repeats=3"])
    assert options == dataclasses.replace(
        Options(), lengths=(512, 1024), head_sizes=(64,), masks=("full",), repeats=3
    )


# benchmark, its overrides → the beginning of the line that names the mistake
MISTAKES = {
    "attention length=4": "did you mean lengths?",
    "attention lengths=abc": "lengths=[abc]: must be a list of whole numbers",
    "attention lengths=0": "lengths=0: must be above 0",
    "attention lengths=": "lengths=: give at least one",
    "attention masks=diagonal": "masks=diagonal: choose from causal",
    "attention backends=flahs": "backends=flahs: choose from flash",
    "attention lengths": "lengths: not of the form key=value",
    "attention repeats=x": "repeats=x: must be a whole number",
    "attention reference=cudnn": "reference=cudnn: choose from flash, flash-deterministic",
    "attention channels=100": "channels=100: 1.5625 heads of size 64",
    "attention group=5": "32 heads of size 64 are no multiple of group=5",
    "context backends=flahs": "backends=flahs: choose from flash",
    "devices cases=2b": "cases=2b: choose from",
    "devices gpus=0,x": "gpus=0,x: of 0",
    "devices cases=1b-64k-4 gpus=0": "needs 4 GPUs",
    "devices devices=2": "devices=2: is set for each point",
    "extension short=2048 long=2048": "long=2048: a multiple of short=2048",
    "extension samples=0": "samples=0: must be above 0",
    "extension path=nowhere": "path=nowhere: no such file or folder",
    "extension device=tpu": "device=tpu",
    "memory model=8b": "model=8b: is set for each point; use models=",
    "optimizers optimizers=adam": "optimizers=adam: choose from adamw, muon",
    "optimizers lr=0.1": "lr=0.1: is set for each point; use rates=",
    "optimizers seq_len=abc": "seq_len=abc",
    "optimizers rates=0": "rates=0",
    "outgrown checkpoint=": "give a run",
    "outgrown checkpoint=nowhere": "nowhere",
    "peers minutes=x": "minutes=x: must be a number",
    "peers minutes=-1": "minutes=-1.0: must be above 0",
    "peers minutes=nan": "minutes=nan: must be above 0",
    "peers peers=longctx,nanogtp": "peers=nanogtp: one or several of longctx,",
    "peers nanogpt=/no/such/folder": "nanogpt=/no/such/folder: no model.py there",
    "peers checkpointing=yes": "checkpointing=yes: one of auto, always, never",
    "peers step_tokens=many": "step_tokens=many: a number of tokens",
    "peers seq_len=4096": "seq_len=4096: is set for each point; use lengths=",
    "peers accumulate=3": "accumulate=3: does not divide the 16 rows",
    "peers model.window=1024": "model.window=1024: peers compares whole causal attention",
    "peers modell=1b": "did you mean model",
    "step steps=0": "steps=0: must be above 0",
    "step backends=flahs": "backends=flahs: choose from flash",
    "step modell=tiny": "did you mean model",
    "step seq_len=64": "seq_len=64: is set for each point; use lengths=",
    "step attention=flash": "attention=flash: is set for each point; use backends=",
    "tune kernels=fast": "kernels=fast",
    "tune head_sizes=8": "head_sizes=8",
    "tune head_sizes=96,128": "head_sizes=96,128",
    "tune dtype=fp32": "dtype=fp32",
    "tune lengths=": "lengths=",
    "atention": "atention is not a benchmark",
    "plan": "longctx plan",
}


@pytest.mark.parametrize("words", MISTAKES)
def test_mistakes_are_one_line(words, refused, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    refused(main(words.split()), MISTAKES[words])
    assert not list(tmp_path.iterdir())


@pytest.mark.no_gpu
@pytest.mark.parametrize("name", ["attention", "context", "memory", "tune"])
def test_no_gpu_is_refused(name, refused):
    refused(main([name]), "no CUDA GPU")


def test_help_names_benchmarks_and_keys(capsys):
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in BENCHMARKS)
    assert main(["attention", "--help"]) == 0
    shown = capsys.readouterr().out
    assert all(f"{field.name}=" in shown for field in dataclasses.fields(Options))
    assert "peers" not in shown
