"""Starting weights that are refused, each in one line that leaves nothing behind."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

import train
from tests.training.sample_run import Overrides


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "tiny"}, "model=tiny: init="),
        ({"model__layers": 3}, "model.layers=3: init="),
        ({"model__context": 3}, "model.context=3: init="),
        ({"model__vocab_size": 300}, "model.vocab_size=300: "),
        (
            {"init": None, "lora__rank": 8},
            "lora.rank=8: adds to trained weights, and init= names none",
        ),
        ({"init": "nowhere"}, "init=nowhere: no such file or folder"),
        ({"init": ""}, "init="),
        ({"init": "."}, "config.json: no such file"),
        ({"data__tokenizer": "nowhere"}, "nowhere"),
        ({"data__vocab_size": 300}, "data.vocab_size=300: init="),
    ],
)
def test_a_mistake_is_one_line_and_leaves_nothing(
    start: Overrides,
    tmp_path: Path,
    refused: Callable[[int, str], str],
    changes: dict[str, object],
    message: str,
) -> None:
    refused(train.main(start(**changes)), message)
    assert not (tmp_path / "runs").exists()


def test_broken_weights_are_found_before_the_run(
    start: Overrides, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-9])
    assert train.main(start()) == 2
    assert "model.safetensors: not a whole safetensors file" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("kind", ["outside", "fifo", "zero", "loop"])
@pytest.mark.parametrize(
    "name",
    [
        *("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"),
        *("chat_template.jinja", "generation_config.json"),
    ],
)
def test_what_lies_outside_of_the_folder_is_not_read(
    start: Overrides,
    folder: Path,
    tmp_path: Path,
    refused: Callable[[int, str], str],
    name: str,
    kind: str,
) -> None:
    file = folder / name
    outside = tmp_path / f"private-{name}"
    outside.write_bytes(file.read_bytes() if file.is_file() else b"{}")
    file.unlink(missing_ok=True)
    if kind == "fifo":
        os.mkfifo(file)
    else:
        file.symlink_to({"outside": str(outside), "zero": "/dev/zero", "loop": name}[kind])
    refused(train.main(start(max_steps=1)), str(file))
    assert not (tmp_path / "runs").exists()


def test_a_resumed_run_keeps_what_it_began_with(
    start: Overrides, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "runs" / "r"
    assert train.main(start(name="r", seq_len=384, rope="yarn", max_steps=2)) == 0
    assert train.main([f"resume={run}", "init=elsewhere"]) == 2
    assert "init cannot change when" in capsys.readouterr().err
    text = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(text.replace("\n  type: yarn", "\n  type: linear"))
    assert train.main([f"resume={run}", "max_steps=3"]) == 2
    assert "rope.type=linear, but the run began with yarn" in capsys.readouterr().err
