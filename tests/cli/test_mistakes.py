"""A mistake is one line, a wrong key or a missing path before torch is imported."""

from pathlib import Path

import pytest

from longctx import cli
from longctx.cli import plan
from tests.processes import finished
from tests.training.sample_run import write_checkpoint

WITHOUT_TORCH = """
import sys
from longctx import cli
code = cli.main(sys.argv[1:])
slow = {"torch", "triton", "lightning", "datasets", "transformers", "numpy", "pyarrow"}
sys.exit(99 if slow & set(sys.modules) else code)
"""
NO_GPU = pytest.mark.no_gpu
# keys and values of other projects, which are answered with ours
OF_OTHERS = [
    ("train learning_rate=1e-3", "here it is lr"),
    ("train warmup_ratio=0.1", "here it is warmup_steps, a number of steps"),
    ("train lora.targets=[q_proj]", "lora.targets=q_proj: one of qkv, "),
    ("train device=gpu", "here it is cuda"),
    ("train checkpoint=runs/a", "here it is resume, or init"),
    ("train model=meta-llama/Llama-3.2-1B", "give init=meta-llama/Llama-3.2-1B"),
    ("plan seq_len=128k,256k", "several values; give one"),
    ("train --learning-rate=1e-3", "write lr=1e-3"),
    ("train attention.kernel=hopper", "attention.kernel is not a key"),
    ("train data=books/", "data=text data.path=books/"),
    ("generate runs/a max_tokens=4", "here it is max_new_tokens"),
]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A current folder with a finished run."""
    monkeypatch.chdir(tmp_path)
    run = tmp_path / "runs" / "done"
    (run / "checkpoints").mkdir(parents=True)
    (run / "config.yaml").write_text("max_steps: 7\nseq_len: 64\ndata: {source: text}\n")
    write_checkpoint(run, 7)
    (tmp_path / "mamba").mkdir()
    (tmp_path / "mamba" / "config.json").write_text('{"model_type": "mamba"}')
    return tmp_path


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["wacth"], "did you mean watch?"),
        (["watch", "runs/a", "runs/b"], "runs/b: one too many"),
        (["compare", "outt=x"], "did you mean out?"),
        (["export", "runs/a", "out", "shard_gb=null"], "shard_gb=null: not allowed; give a number"),
        (["export", "runs/a", "out", "dtype=bf16", "dtype=fp16"], "dtype=fp16: "),
        (
            ["export", "a", "o", "adapter=true", "dtype=bf16"],
            "dtype=bf16: does nothing with adapter",
        ),
        (["data", "--seq-len", "9"], "--seq-len: not an option"),
        (["resume"], "RUN is missing"),
        (["data", "-m", "seq_len=64,128"], "-m: only train sweeps"),
        (["train", "resume="], "resume="),
        (["train", "resume=runs/nothing"], "runs/nothing: no such folder"),
        (["train", "-m", "seq_len=64,abc"], "seq_len=abc"),
        (["data", "objective=dpo", "data.preferences=labels"], "objective=dpo sets it"),
        (["train", "-m", "name=x", "seq_len=64,128"], "name=x: each job"),
        (["train", "data=text", "data.path=nowhere.txt"], "data.path=nowhere.txt: no such file"),
        (["train", "data.tokenizer=no.json"], "data.tokenizer=no.json: no such file"),
        (["train", "warmup_steps=100", "max_steps=10"], "warmup_steps=100"),
        (["train", "name=done"], "name=done: runs/done exists already"),
        (["train", "runs/done"], "resume=runs/done"),
        (["train", "lora.rank=4"], "lora.rank=4: adds to trained weights"),
        (["train", "devices=2", "context.method=ulysses"], "context.method=ulysses: does nothing"),
        (["eval", "runs/done", "context.method=ulysses"], "context.method=ulysses: does nothing"),
        (["train", "tracker=mlflow"], "tracker=mlflow: not installed"),
        (["train", "strategy=ddp"], "strategy=ddp: several devices"),
        (["eval", "runs/done", "strategy=fsdp"], "strategy=fsdp: several devices"),
        (["train", "attention.options.kernel=hoper"], "kernel=hoper must be one of auto, portable"),
        (["eval", "runs/dnoe"], "did you mean runs/done?"),
        (["compare", "runs/done", "out=x.png"], "out=x.png: a file that ends in .html"),
        (["eval", "runs"], "checkpoint=runs: neither a run"),
        (["eval", "runs/done", "data=text", "data.path=no"], "data.path=no: no such"),
        *((words.split(), message) for words, message in OF_OTHERS),
    ],
)
def test_a_mistake_is_one_line_that_names_it(words, message, here, refused, monkeypatch):
    monkeypatch.setattr("longctx.cli.commands.libraries", lambda: pytest.fail("torch is imported"))
    before = sorted(here.rglob("*"))
    refused(cli.main(words), message)
    assert sorted(here.rglob("*")) == before


@NO_GPU
@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("train init=nowhere", "init=nowhere: no such file or folder"),
        ("train init=mamba transformers=never", "model_type=mamba is not covered"),
        ("train device=cuda", "finds no GPU here"),
        ("train attention=flex", "attention=flex cannot run"),
        ("train attention.options.kernel=hopper", "Hopper GPU"),
        ("train seq_len=max", "seq_len=max: finds what fits a GPU"),
        ("eval runs/done device=cuda", "finds no GPU"),
    ],
)
def test_a_mistake_for_this_machine_is_one_line(words, message, here, refused):
    before = sorted(here.rglob("*"))
    refused(cli.main(words.split()), message)
    assert sorted(here.rglob("*")) == before


def test_several_mistakes_have_a_line_each(here, capsys):
    for words in (["learning_rate=1", "n_layer=2"], ["lr=abc", "seq_len=0.5"], ["lr=99", "clip=0"]):
        assert cli.main(["train", *words]) == 2
        lines = capsys.readouterr().err.splitlines()
        assert [line.partition("error: ")[2][:3] for line in lines] == [word[:3] for word in words]


def test_no_large_library_is_imported_before(here):
    words = ["train", "device=cpu", "data=text", "data.path=nowhere.txt"]
    process = finished("-c", [WITHOUT_TORCH, *words], here)
    assert process.returncode == 2, process.stderr
    assert "nowhere.txt" in process.stderr


def test_a_plan_needs_no_plugins_of_its_init(here):
    saved = "plugins: ['mine.py@sha256:0']\nmodel: {layers: 2}\n"
    (here / "runs" / "done" / "config.yaml").write_text(saved)
    request = plan.with_init(cli.compose("train", ["init=runs/done"]))
    assert request.config.model.layers == 2
    (here / "runs" / "done" / "config.yaml").write_text("{}")
    with pytest.raises(ValueError, match=r"config\.yaml: no model\.layers"):
        plan.with_init(cli.compose("train", ["init=runs/done"]))


@pytest.mark.parametrize(
    ("words", "unread"),
    [
        ("", []),
        ("tracker=none wandb.project=p wandb.tags=[a]", ["wandb.project=p", "wandb.tags=[a]"]),
        ("tracker=[tensorboard,none] wandb.project=p", ["wandb.project=p"]),
    ],
)
def test_keys_that_no_tracker_reads_are_said(words, unread):
    assert cli.compose("train", words.split()).config.unread() == unread
