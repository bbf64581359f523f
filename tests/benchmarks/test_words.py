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


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["atention"], "atention is not a benchmark"),
        (["plan"], "longctx plan"),
        (["attention", "length=4"], "did you mean lengths?"),
        (["attention", "lengths=abc"], "lengths=[abc]: must be a list of whole numbers"),
        (["attention", "lengths=0"], "lengths=0: a number above 0"),
        (["attention", "lengths="], "lengths=null: not allowed"),
        (["attention", "masks=diagonal"], "masks=diagonal: choose from causal"),
        (["attention", "backends=flahs"], "backends=flahs: choose from flash"),
        (["attention", "lengths"], "lengths: not of the form key=value"),
        (["attention", "repeats=x"], "repeats=x: must be a whole number"),
        (["peers", "minutes=x"], "minutes=x: must be a number"),
        (["step", "steps=0"], "steps=0: a number above 0"),
        (["peers", "minutes=-1"], "minutes=-1.0: a number above 0"),
        (["peers", "minutes=nan"], "minutes=nan: a number above 0"),
        (["step", "backends=flahs"], "backends=flahs: choose from flash"),
        (["context", "backends=flahs"], "backends=flahs: choose from flash"),
    ],
)
def test_mistakes_are_one_line(argv, message, refused):
    refused(main(argv), message)


@pytest.mark.no_gpu
def test_no_gpu_is_refused(capsys):
    assert main(["attention"]) == 2
    assert "no CUDA GPU" in capsys.readouterr().err


def test_help_names_every_benchmark_and_of_one_every_key(capsys):
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in BENCHMARKS)
    assert main(["attention", "--help"]) == 0
    shown = capsys.readouterr().out
    assert all(f"{field.name}=" in shown for field in dataclasses.fields(Options))
    assert "peers" not in shown
