"""The keys of the smaller commands, a dataclass for each. Torch-free.

A command is called with the values as arguments, so that it knows no command line.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from longctx.config.fields import PLUGINS, Group, key

PRICE = "of an hour of one GPU, in any currency, to tell the cost; null: none"
PRICES = (1e-6, 1e6)


@dataclass
class DataOptions(Group):
    """Describe a data set: documents, tokens, lengths, packing.

    longctx data seq_len=16384
    longctx data data=text data.path=docs/
    longctx data examples/conversations.yaml
    """


@dataclass
class CompareOptions(Group):
    """Compare runs: their keys, their results, their curves.

    longctx compare runs/*
    longctx compare runs/a runs/b out=page.html price=2.5 table=runs.csv
    """

    runs: list[Path] = key([], "folders of runs, such as runs/*", positional=True)
    out: Path = key(Path("compare.html"), "page of their curves; needs no network", suffix=".html")
    price: float | None = key(None, PRICE, between=PRICES)
    table: Path | None = key(None, "write a row for each run too: .csv", suffix=".csv")


@dataclass
class ConvertOptions(Group):
    """Print the recipe of axolotl or another project as ours.

    longctx convert axolotl.yaml > mine.yaml

    file: YAML of theirs; keys without one of ours are named on stderr
    """

    file: Path = key(Path(), positional=True)


@dataclass
class ResumeOptions(Group):
    """Continue a stopped run, or train it for more steps.

    longctx resume runs/NAME
    longctx resume runs/NAME max_steps=2000
    """

    run: str = key("", "the folder of the run, such as runs/NAME", positional=True)


@dataclass
class DashboardOptions(Group):
    """Make a workspace at wandb for the runs of a project.

    longctx dashboard project=longctx    # after pip install wandb-workspaces
    """

    project: str = key("", "the project at wandb, such as longctx", positional=True)
    entity: str | None = key(None, "team or user; null: your default")
    name: str = key("longctx", "name of the workspace")


@dataclass
class CheckOptions(Group):
    """Test a mixer, a score function or an attention backend.

    longctx check my_mixer.py
    """

    name: str = key("", "a plugin, a name, or a folder that transformers computes", positional=True)


@dataclass
class ExportOptions(Group):
    """Write a trained model as a Hugging Face folder.

    longctx export runs/NAME out/

    run: a run, of which the newest checkpoint is taken, or a checkpoint
    dtype: of the weights, bf16 and fp16 have half the size; null: as they were trained, in fp32, or
        with LoRA as those of init
    shard_gb: largest size of one file of weights, in 10^9 bytes
    adapter: of a run with LoRA: write its adapter alone, for peft; false: merge it into the weights
    """

    run: Path = key(Path(), positional=True)
    out: Path = key(Path(), "a new folder, or an empty one", positional=True)
    dtype: str | None = key(None, choices=("fp32", "bf16", "fp16"), needs="adapter=false")
    shard_gb: float = key(5.0, between=(1e-9, 1e9), needs="adapter=false")
    adapter: bool = key(False)
    plugins: list[str] | None = key(None, PLUGINS)
