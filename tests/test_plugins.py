"""Plugins: files of the user's own register names, and never run because a run recorded them."""

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from longctx import cli, plugins
from longctx.attention import description, registry
from longctx.config.doors import OPTIMIZERS
from longctx.data import sources
from longctx.runs import run_folder

PLUGIN = '''
from longctx.attention import register
from longctx.attention.naive import Naive
from longctx.data import sources


class Mine(Naive):
    """naive by another name."""


register("mine", Mine())


@sources.register("poems")
class Poems(sources.Source):
    def open(self, config, without):
        def read():
            for number in range(40):
                yield sources.Document(f"poem {number}", f"Line {number} of a poem. " * 30)

        return sources.Corpus("poems", [sources.Shard("poems", read)], 40)
'''
RUN = [
    *("data=poems", "data.vocab_size=300", "seq_len=64", "max_steps=2", "val_rows=4", "workers=0"),
    *("batch_size=1", "accumulate=2", "device=cpu", "wandb.mode=disabled", "model.layers=1"),
]


def forget() -> None:
    """Forget the names of the plugin, as a new process does not know them."""
    for names in (registry._backends, description.DESCRIPTIONS):
        names.pop("mine", None)
    if "poems" in sources.SOURCES:
        sources.SOURCES.remove("poems")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A current folder with my.py, whose names are forgotten after the test."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LONGCTX_CACHE", str(tmp_path / "cache"))
    (tmp_path / "my.py").write_text(PLUGIN)
    yield tmp_path
    forget()
    for name in [name for name in sys.modules if name.startswith("my_")]:
        del sys.modules[name]


@pytest.fixture
def a_run(here: Path) -> Path:
    assert cli.main(["train", "plugins=[my.py]", "attention=mine", "name=a", *RUN]) == 0
    return here / "runs" / "a"


def test_a_recorded_plugin_runs_only_if_it_is_named(a_run, refused, capsys):
    (a_run.parents[1] / "my.py").write_text("raise AssertionError('it ran')")
    shutil.copy(a_run / "config.yaml", a_run / "run.yaml")
    (a_run.parents[1] / "link.yaml").symlink_to(a_run / "config.yaml")
    for command in (
        ["train", f"resume={a_run}", "max_steps=3"],
        ["train", f"{a_run}/config.yaml", "max_steps=3"],
        ["train", f"{a_run}/run.yaml", "dry_run=true"],
        ["train", "link.yaml", "max_steps=3"],
        ["eval", f"checkpoint={a_run}", "device=cpu"],
        ["generate", f"{a_run}", "device=cpu"],
        ["export", f"{a_run}", "out"],
    ):
        refused(cli.main(command), f"plugins=[{a_run.parents[1]}/my.py]")


def test_a_run_records_resumes_and_is_evaluated_with_its_plugin(a_run, capsys):
    config = yaml.safe_load((a_run / "config.yaml").read_text())
    assert (config["attention"]["backend"], config["data"]["source"]) == ("mine", "poems")
    path, _, digest = config["plugins"][0].partition(plugins.HASH)
    assert (Path(path).name, len(digest)) == ("my.py", 64)
    with (a_run.parents[1] / "my.py").open("a") as file:
        file.write("# edited\n")
    forget()
    words = [f"resume={a_run}", "max_steps=3", "plugins=[my.py]"]
    # The hash of a backend's file is its part of the kernel lock
    assert cli.main(["train", *words]) == 2
    assert cli.main(["train", *words, "kernel.lock=record"]) == 0
    assert "my.py: changed since" in capsys.readouterr().err
    assert cli.main(["export", f"{a_run}", "out", "plugins=[my.py]"]) == 0
    words = [f"checkpoint={a_run}", "plugins=[my.py]", "attention=mine", "device=cpu"]
    assert cli.main(["eval", *words, "documents=1"]) == 0


def test_names_of_a_plugin_are_listed(here, refused, capsys):
    refused(cli.main(["train", "plugins=[my.py]", "attention=min"]), "did you mean mine?")
    assert cli.main(["train", "plugins=[my.py]", "--help"]) == 0
    text = capsys.readouterr().out
    assert "| mine |" in text and "poems" in text


@pytest.mark.parametrize("named", ["[my.py]", "my.py", "[{a: 1}]"])
def test_a_file_that_names_plugins_is_asked_for_them(named, here, refused):
    (here / "keys.yaml").write_text(f"plugins: {named}\ndata: embedded\n")
    refused(cli.main(["train", "keys.yaml", "dry_run=true"]), "keys.yaml: names plugins")
    assert cli.compose("train", ["keys.yaml", "plugins=[]"]).config.plugins == []


def test_a_sweep_varies_names_of_plugins(here):
    (here / "keys.yaml").write_text("plugins: [my.py]\ndata: poems\n")
    words = ["keys.yaml", "plugins=[my.py]", "device=cpu"]
    jobs = cli.commands.checked_jobs([*words, "attention=mine,flash"])
    assert [job[-1] for job in jobs] == ["attention=mine", "attention=flash"]
    assert cli.compose("train", jobs[0]).config.data.source == "poems"


def test_plan_knows_a_backend_of_a_plugin(here, capsys):
    words = ["plugins=[my.py]", "attention=mine", "gpu=H200", "gpu_memory=139", "seq_len=4096"]
    assert cli.main(["plan", "model=124m", *words]) == 0
    assert "mine" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("bad.py", "x = 1\nif x\n", "plugins=bad.py: line 2: SyntaxError"),
        ("bad.py", "x = 1\n\nraise KeyError('a\\nb')\n", "plugins=bad.py: line 3: KeyError"),
        ("bad.py", "import nowhere.at.all\n", "plugins=bad.py: line 1: ModuleNotFoundError"),
        ("bad.py", "def f():\n    return 1 / 0\n\n\nf()\n", "line 2: ZeroDivisionError"),
        ("bad.py", "x = 1\nexit(x)\n", "line 2: SystemExit: 1"),
        ("bad.py", "x = 1\n\0\n", "plugins=bad.py: line 1: "),
        ("none.py", None, "plugins=none.py: no such file"),
        ("my.py", PLUGIN.replace('f"Line {number} of a poem. " * 30', "None"), "poem 0: its text"),
    ],
)
def test_a_bad_plugin_is_one_line_that_names_it(name, text, message, here, refused):
    if text is not None:
        (here / name).write_text(text)
    refused(cli.main(["train", f"plugins=[{name}]", *RUN]), message)


KEYS = """
from dataclasses import dataclass
from longctx.config.doors import OptimizerConfig
from longctx.config.fields import key
from longctx.training.optimizers import OptimizerTraits, register

@dataclass
class SawKeys(OptimizerConfig):
    teeth: int = key(3, "of the saw", between=(2, 9))

register("saw", OptimizerTraits(keys=SawKeys))
"""


def test_a_plugin_has_keys_of_its_own(here, refused, capsys):
    (here / "new.py").write_text(KEYS)
    named = ["plugins=[new.py]", "optimizer=saw"]
    try:
        assert cli.compose("train", [*named, "optimizer.teeth=4"]).config.optimizer.teeth == 4
        saved = run_folder.plain(cli.compose("train", named).config)["optimizer"]
        assert saved == {"name": "saw", "teeth": 3}
        assert "optimizer.teeth=3" in cli.commands.help_text(["train"])
        refused(cli.main(["train", *named, "optimizer.teeth=1"]), "optimizer.teeth=1: a number")
        refused(cli.main(["train", *named, "optimizer.momentum=1"]), "not a key of optimizer=saw")
        refused(cli.main(["train", "optimizer.teeth=4"]), "not a key of optimizer=adamw")
    finally:
        OPTIMIZERS.remove("saw")
    assert "optimizer.teeth" not in cli.commands.help_text(["train"])
    (here / "saw.yaml").write_text("{plugins: [new.py], optimizer.teeth: 3}")
    refused(cli.main(["train", "saw.yaml", "plugins=[]"]), "if a plugin has that, add 'plugins=[n")


def test_a_plugin_that_changes_under_a_start_is_refused(here):
    (recorded,) = plugins.load(["my.py"])
    assert plugins.load([recorded]) == [recorded]
    (here / "my.py").write_text("x = 2\n")
    with pytest.raises(ValueError, match=r"plugins=.*my\.py"):
        plugins.load([recorded])


def test_annotations_of_a_plugin_are_objects(here):
    (here / "my_own.py").write_text("def f(x: int): ...\n")
    plugins.load(["my_own.py"])
    (name,) = (name for name in sys.modules if name.startswith("my_own_"))
    assert sys.modules[name].f.__annotations__["x"] is int


def test_plugins_of_one_name_are_told_apart(here, capsys):
    for folder in ("a", "b"):
        (here / folder).mkdir()
        (here / folder / "my_own.py").write_text(f"x = '{folder}'\n")
    recorded = plugins.load(words := ["a/my_own.py", "b/my_own.py"])
    assert plugins.check_named(recorded, recorded, here) == "{}"  # nothing to add to a mistake
    assert capsys.readouterr().err == ""
    (here / "a" / "my_own.py").write_text("x = 'c'\n")
    plugins.check_named(recorded, plugins.load(words), here)
    assert capsys.readouterr().err.count("changed since") == 1
