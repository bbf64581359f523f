"""Configurations that are read from a file, and values that come from outside: what is refused, and
that nothing of the environment gets into them.
"""

from itertools import pairwise
from pathlib import Path

import pytest
import yaml

from longctx import cli
from longctx.planner.workload import workload_of
from longctx.runs import run_folder
from longctx.training.resolve import scheduled
from tests.cli.composed import compose, settings

CANARY = "c4n4ry"


@pytest.mark.parametrize("value", ["${oc.env:HOME}", "a ${oc.env:HOME}", "${seq_len}"])
def test_a_saved_interpolation_is_refused(tmp_path: Path, value: str) -> None:
    for content in (
        {"wandb": {"notes": value}},
        {"wandb": {"tags": [value]}},
        {"attention": {"options": {"kernel": value}}},
        {"wandb": value},
        value,
    ):
        (tmp_path / "config.yaml").write_text(yaml.safe_dump(content))
        with pytest.raises(ValueError, match=r"config\.yaml") as caught:
            cli.from_file("train", tmp_path / "config.yaml", [])
        assert str(Path.home()) not in str(caught.value).replace(str(tmp_path), "")


@pytest.mark.parametrize(
    "content",
    [
        "a: &a [x]\n" + "".join(f"{b}: &{b} [{f'*{a},' * 9}]\n" for a, b in pairwise("abcdefghi")),
        "a: " + "[" * 500_000,
        "".join(" " * n + f"a{n}:\n" for n in range(1000)),
        "a: b\n" * 500_000,
    ],
    ids=["aliases", "brackets", "indents", "size"],
)
def test_a_saved_bomb_is_refused_before_it_is_loaded(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.yaml").write_text(content)
    with pytest.raises(ValueError, match=r"config\.yaml: "):
        cli.from_file("train", tmp_path / "config.yaml", [])


def test_a_saved_configuration_reads_back_the_same(tmp_path: Path) -> None:
    saved = settings("lr=3e-5", "wandb.tags=[a,b]", "attention.options.kernel=flash")
    run_folder.write_config(tmp_path, saved)
    again = cli.from_file("train", tmp_path / "config.yaml", []).config
    assert scheduled(again, workload_of(again, "cpu", again.seq_len)).settings() == saved
    longer = cli.from_file("train", tmp_path / "config.yaml", ["max_tokens=40960000"]).config
    assert scheduled(longer, workload_of(longer, "cpu", longer.seq_len)).max_steps == 10000


def test_a_saved_value_gives_way_to_an_override_alone(tmp_path: Path) -> None:
    run_folder.write_config(tmp_path, settings("data.tokenizer=a", "max_steps=7"))
    again = cli.from_file("train", tmp_path / "config.yaml", ["max_steps=9"]).config
    assert (again.data.tokenizer, again.max_steps) == ("a", 9)
    again = cli.from_file("train", tmp_path / "config.yaml", ["max_tokens=null"]).config
    assert again.max_steps == 7


@pytest.mark.parametrize(
    "content",
    [
        *("[1, 2]", "seq_len: many", "lerning_rate: 3", "a: [", "\x00\x01", ""),
        *("memory: true", "model: 7", "model: [[64, 1]]", "model: {recompute: true}"),
    ],
)
def test_a_file_that_is_no_configuration(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.yaml").write_text(content)
    if content == "":
        cli.from_file("train", tmp_path / "config.yaml", [])
        return
    with pytest.raises(ValueError, match=r"config\.yaml"):
        cli.from_file("train", tmp_path / "config.yaml", [])


@pytest.mark.parametrize("key", ["wandb.notes", "attention.options.x", "attention.options"])
@pytest.mark.parametrize(
    "value",
    [
        r"$\{oc.env:CANARY}",
        r"'$\{oc.env:CANARY}'",
        r"\$\{oc.env:CANARY\}",
        r"$\\\{oc.env:CANARY}",
        r"{a: \$\{oc.env\:CANARY\}}",
        r"[\$\{oc.env\:CANARY\}]",
    ],
)
def test_no_spelling_of_an_override_brings_the_environment_in(
    key: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CANARY", CANARY)
    try:
        result = str(cli.compose("train", cli.read("train", [f"{key}={value}"]).overrides))
    except ValueError as error:
        result = str(error)
    assert CANARY not in result


def test_what_looks_like_an_interpolation_is_kept_as_it_is() -> None:
    assert compose(r"wandb.notes='$\{oc.env:HOME}'").config.wandb.notes == r"$\{oc.env:HOME}"
