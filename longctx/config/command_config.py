"""The options of the smaller commands, a dataclass for each. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from longctx.attention.description import DESCRIPTIONS
from longctx.config.data_config import DataConfig
from longctx.config.doors import OBJECTIVES
from longctx.config.fields import PLUGINS, Group, counted, group, key, positive

SIZES = (1, 2**24)  # of tokens and of a head
PRICE = "of an hour of one GPU, in any currency, to tell the cost; null: none"
PROMPT_FILES = (".txt", ".jsonl")


@dataclass
class DescribeConfig(Group):
    """Describe a data set: documents, tokens, lengths, packing.

    longctx data seq_len=16384
    longctx data data=text data.path=docs/
    longctx data examples/conversations.yaml
    """

    seq_len: int = key(4096, "tokens in a sequence", between=(2, 2**31 - 1), parse=counted())
    plugins: list[str] | None = key(None, PLUGINS)
    objective: str = key("cross_entropy", "that reads it, as train's", choices=OBJECTIVES)
    init: str | None = key(
        None, "whose tokenizer reads it, as train's: a run, a Hugging Face folder, OWNER/NAME"
    )
    data: DataConfig = group(DataConfig)

    def problems(self) -> Iterator[str]:
        """Yield a message for answers of another objective, and for a vocabulary beside init=."""
        vocab_size = self.data.vocab_size
        if self.init is not None and vocab_size != DataConfig().vocab_size:
            yield (
                f"data.vocab_size={vocab_size}: init={self.init} brings a tokenizer; leave one out"
            )
        own, given = OBJECTIVES[self.objective].data, self.data.preferences
        if own is not None and given not in (None, own):
            setting = f"objective={self.objective}"
            yield f"data.preferences={given}: {setting} sets it; leave it out"


@dataclass
class SampleConfig(Group):
    """A trained model, and how its text is chosen."""

    checkpoint: str = key(
        "",
        "a run (its newest checkpoint), one of its checkpoints, a Hugging Face folder, or a "
        "model of the Hub: OWNER/NAME, OWNER/NAME@REVISION",
        positional=True,
    )
    max_new_tokens: int = positive(200, "of each text; fewer if it ends", limit=2**31)
    temperature: float = key(
        0.8, "0: always the likeliest token; 1: by the model's probabilities", between=(0.0, 100.0)
    )
    top_k: int | None = positive(
        None,
        "choose among the k likeliest tokens; null: among all",
        limit=2**31,
        needs="temperature",
    )
    top_p: float | None = key(
        None,
        "choose among the likeliest that together have this probability; null: among all",
        above=0,
        between=(0, 1),
        needs="temperature",
    )
    seed: int = key(1, "of the choices", between=(0, 2**63 - 1))
    device: str = key(
        "auto", "auto: a GPU if there is one | cpu | cuda", choices=("auto", "cpu", "cuda")
    )
    precision: str = key(
        "auto", "auto: bf16 on a GPU, fp32 on a CPU | bf16 | fp32", choices=("auto", "bf16", "fp32")
    )
    decode: str = key(
        "auto",
        "kernel of single tokens: auto: triton on a GPU, torch on a CPU | triton | torch",
        choices=("auto", "triton", "torch"),
    )
    attention: str | None = key(
        None,
        "backend that computes the prompts; null: that of the run, or flash",
        choices=DESCRIPTIONS,
    )
    plugins: list[str] | None = key(None, PLUGINS)


@dataclass
class ChatConfig(SampleConfig):
    """Talk with a run or a model, by its chat template.

    longctx chat FOLDER
    longctx chat runs/NAME system='Answer in one sentence.' temperature=0
    """

    system: str | None = key(None, "message of the system, before yours", parse=str)


@dataclass
class GenerateConfig(SampleConfig):
    """Generate text from a run or a Hugging Face folder.

    longctx generate runs/NAME prompt='Once upon a time'
    longctx generate FOLDER prompt='Who are you?' chat=true temperature=0
    longctx generate OWNER/NAME@REVISION prompt='Once upon a time'
    longctx generate runs/NAME prompts=questions.jsonl out=answers.jsonl
    """

    prompt: str | None = key(
        None, "text to continue, as it is typed; null: what a document begins with", parse=str
    )
    prompts: str | None = key(
        None,
        "file instead: .txt, one prompt; .jsonl, a `prompt` on each line, or `messages` of a chat",
    )
    chat: bool = key(
        False, "the prompt is a message; the answer is asked for by the model's chat template"
    )
    batch_size: int = positive(8, "prompts at a time", limit=2**20)
    out: str | None = key(None, "write prompts and texts to this .jsonl too")

    def problems(self) -> Iterator[str]:
        """Yield a message for keys that contradict each other."""
        out, file = Path("out.jsonl" if self.out is None else self.out), Path(self.prompts or "")
        if self.chat and self.prompt is None and self.prompts is None:
            yield "chat=true: give the message, as in prompt='Who are you?'"
        if out.suffix != ".jsonl":
            yield f"out={out}: a file that ends in .jsonl"
        if not out.absolute().parent.is_dir():
            yield f"out={out}: the folder {out.parent} is not there"
        if self.out is not None and out.resolve() == file.resolve():
            yield f"out={out}: the answers would replace the prompts; give another file"
        if self.prompts is None:
            return
        if self.prompt is not None:
            yield f"prompts={file}: prompt= is given too; leave one of them out"
        if file.suffix not in PROMPT_FILES or not file.is_file():
            endings = " or ".join(PROMPT_FILES)
            yield f"prompts={file}: no such file; give one that ends in {endings}"


@dataclass
class PlanOptions:
    """Predict memory, time and the longest context that fits.

    longctx plan model=1b seq_len=262144
    longctx plan model=1b seq_len=262144 gpu=H200
    longctx plan init=OWNER/NAME lora.rank=16 seq_len=128k gpu=rtx4090
    longctx plan model=1b gpu=MINE gpu_tflops=100 gpu_bandwidth=900 gpu_memory=24
    longctx plan model=8b seq_len=262144 gpu=8xH100 max_tokens=1B price=2.5
    """

    gpu: str = key(
        "auto", "such as H100, rtx4090 or 2xH100 (devices=2); auto: the one here, else an H200"
    )
    gpu_tflops: float | None = key(
        None, "dense bf16 products of it, in 10^12 a second; null: by its name", between=(1e-3, 1e6)
    )
    gpu_bandwidth: float | None = key(
        None, "GB/s of its memory; null: by its name", between=(1e-3, 1e6)
    )
    gpu_memory: str | None = key(
        None, "GiB of it, such as 80, or 80GB of 10^9 bytes; null: the usual"
    )
    host_memory: str | None = key(
        None,
        "of the host, as gpu_memory; null: this machine's, or 128 GiB for each GPU if gpu= is not "
        "here",
    )
    gpus_per_machine: int = positive(8, "beyond them, GPUs reach each other by network", limit=4096)
    network: float = key(400.0, "Gbit/s from each GPU to other machines", between=(1.0, 1e5))
    price: float | None = key(None, PRICE, between=(1e-6, 1e6))


@dataclass
class CompareOptions(Group):
    """Compare runs: their keys, their results, their curves.

    longctx compare runs/*
    longctx compare runs/a runs/b out=page.html price=2.5 table=runs.csv
    """

    runs: list[Path] = key([], "folders of runs, such as runs/*", positional=True)
    out: Path = key(Path("compare.html"), "page with their curves, .html; needs no network")
    price: float | None = key(None, PRICE, between=(1e-6, 1e6))
    table: Path | None = key(None, "write a row for each run too: .csv or .json")

    def problems(self) -> Iterator[str]:
        """Yield a message for a page or a table of another format."""
        if self.out.suffix != ".html":
            yield f"out={self.out}: a file that ends in .html"
        if self.table is not None and self.table.suffix not in (".csv", ".json"):
            yield f"table={self.table}: a file that ends in .csv or .json"


@dataclass
class WatchOptions:
    """Follow a run that another process trains.

    longctx watch runs/NAME
    longctx watch runs/NAME price=2.5
    """

    run: Path = key(Path(), "the folder of one run, such as runs/NAME", positional=True)
    price: float | None = key(None, PRICE, between=(1e-6, 1e6))


@dataclass
class ResumeOptions:
    """Continue a stopped run, or train it for more steps.

    longctx resume runs/NAME
    longctx resume runs/NAME max_steps=2000
    """

    run: str = key("", "the folder of the run, such as runs/NAME", positional=True)


@dataclass
class DashboardOptions:
    """Make a workspace at wandb for the runs of a project.

    longctx dashboard project=longctx
    """

    project: str = key("", "the project at wandb, such as longctx", positional=True)
    entity: str | None = key(None, "team or user; null: your default")
    name: str = key("longctx", "name of the workspace")


@dataclass
class ExportOptions(Group):
    """Write a trained model as a Hugging Face folder.

    longctx export runs/NAME out/
    """

    run: str = key(
        "", "a run, of which the newest checkpoint is taken, or a checkpoint", positional=True
    )
    out: str = key("", "a new folder, or an empty one", positional=True)
    dtype: str | None = key(
        None,
        "of the weights, bf16 and fp16 have half the size; null: as they were trained, in fp32, or "
        "with LoRA as those of init",
        choices=("fp32", "bf16", "fp16"),
    )
    shard_gb: float = key(
        5.0, "largest size of one file of weights, in 10^9 bytes", between=(1e-9, 1e9)
    )
    adapter: bool = key(
        False,
        "of a run with LoRA: write its adapter alone, for peft; false: merge it into the weights",
    )
    plugins: list[str] | None = key(None, PLUGINS)

    def problems(self) -> Iterator[str]:
        """Yield a message for keys that an adapter has no use for."""
        for name, usual in {"dtype": None, "shard_gb": 5.0}.items():
            value = getattr(self, name)
            if self.adapter and value != usual:
                yield (f"{name}={value}: adapter=true writes one file, in fp32; leave {name} out")


@dataclass
class ShowOptions:
    """Show the kernels that attention=flash runs here, tested.

    longctx kernels show
    longctx kernels show head_size=128 dtype=bf16
    """

    kernel: str = key(
        "auto",
        "auto: what training takes | portable | ampere | hopper; a CPU has one of its own",
        choices=("auto", "portable", "ampere", "hopper"),
    )
    head_size: int = key(64, "size of a head", between=(16, 256))
    seq_len: int = key(4096, "tokens in a sequence", between=SIZES, parse=counted())
    dtype: str = key(
        "auto",
        "auto: bf16 on a GPU, fp32 on a CPU | bf16 | fp16 | fp32",
        choices=("auto", "bf16", "fp16", "fp32"),
    )
