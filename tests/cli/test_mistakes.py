"""A mistake is one line, a wrong key or a missing path before torch is imported."""

from pathlib import Path

import pytest
import yaml

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
MISTAKES = yaml.safe_load(Path(__file__).with_name("mistakes.yaml").read_text())


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


@pytest.mark.parametrize(("words", "message"), MISTAKES["before torch is imported"].items())
def test_a_mistake_is_one_line_that_names_it(words, message, here, refused, monkeypatch):
    monkeypatch.setattr("longctx.system.libraries", lambda: pytest.fail("torch is imported"))
    monkeypatch.setattr("os.posix_spawn", lambda *_: pytest.fail("a process is started"))
    before = sorted(here.rglob("*"))
    refused(cli.main(words.split()), message)
    assert sorted(here.rglob("*")) == before


@pytest.mark.no_gpu
@pytest.mark.parametrize(("words", "message"), MISTAKES["of a machine without a GPU"].items())
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
    process = finished("-c", [WITHOUT_TORCH, "train", "data=text", "data.path=nowhere.txt"], here)
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
