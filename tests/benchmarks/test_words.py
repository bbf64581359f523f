"""The benchmarks' command line: keys are checked, help is complete, most need a GPU."""

import dataclasses

import pytest

from benchmarks.attention import Options
from benchmarks.words import BENCHMARKS, main

# Command line → the part of the message that names the mistake.
MISTAKES = {
    "atention": "atention is not a benchmark",
    "plan": "longctx plan",
    "attention backends=flahs": "backends=flahs: ",
    "attention reference=cudnn": "reference=cudnn: ",
    "attention channels=100": "channels=100: ",
    "attention group=5": "group=5",
    "caps caps=7": "caps=7: ",
    "card attention=flash": "attention=flash: is set for each point",
    "devices gpus=0,x": "gpus=0,x: ",
    "devices cases=1b-64k-4 gpus=0": "4 GPUs",
    "devices devices=2": "devices=2: is set for each point",
    "memory model=8b": "model=8b: is set for each point; use models=",
    "peers peers=longctx,nanogtp": "peers=nanogtp: ",
    "peers nanogpt=/no/such/folder": "nanogpt=/no/such/folder: ",
    "peers seq_len=4096": "seq_len=4096: is set for each point; use lengths=",
    "peers accumulate=3": "accumulate=3: ",
    "peers model.window=1024": "model.window=1024: ",
    "tune head_sizes=96,128": "head_sizes=96,128",
}


@pytest.mark.parametrize("words", MISTAKES)
def test_a_mistake_is_one_line(words, refused):
    refused(main(words.split()), MISTAKES[words])


@pytest.mark.no_gpu
@pytest.mark.parametrize("name", ["attention", "caps", "context", "memory", "tune"])
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
