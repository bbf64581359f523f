"""A file of one's own: its keys are arguments, those of the command line stand."""

from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from longctx import cli
from longctx.cli import composition
from longctx.cli.own_file import with_file
from longctx.config.train_config import TrainConfig
from longctx.runs import run_folder


def config_of(*words: str) -> TrainConfig:
    config: TrainConfig = cli.compose("train", cli.read("train", with_file([*words])).overrides)[0]
    return config


def test_presets_nested_and_dotted_keys_and_the_command_line_over_them(tmp_path: Path) -> None:
    file = tmp_path / "my.yaml"
    file.write_text(
        "model: 124m\nseq_len: 512\nattention: sdpa\nmodel.window: 64\nlr: 0.002\n"
        "data: {source: text, path: ['a b/c.txt', \"it's,[odd].md\"]}\n"
        "wandb: {tags: [x, 'y z'], notes: 'a: b, {c} [d]'}\n"
    )
    config = config_of(str(file), "lr=0.004", "seed=3")
    assert (config.seq_len, config.lr, config.seed) == (512, 0.004, 3)
    assert (config.model.channels, config.model.window) == (768, 64)
    assert config.attention.backend == "sdpa"
    assert config.data.path == ["a b/c.txt", "it's,[odd].md"]
    assert (config.wandb.tags, config.wandb.notes) == (["x", "y z"], "a: b, {c} [d]")
    assert config_of("model=tiny", str(file)).model.channels == 128


@pytest.mark.parametrize(
    "words",
    [
        ["model=tiny"],
        ["model=1b", "model.layers=12", "attention=sdpa", "memory=long", "betas=[0.9,0.99]"],
        ["optimizer=muon", "data=text", "data.path=docs/", "data.vocab_size=300", "model=tiny"],
        ["model=tiny", "model.nope_layers=[1,2]", "passkey=true", "passkey.lengths=[256]"],
        ["model=tiny", "attention.options.kernel=portable", "rope=keep", "data=needles"],
        ["model=tiny", "data=hub", "data.path=a/b", "data.documents=null"],
        ["model=tiny", "data=hub", "data.path=a/b", "data.revision='12e4567'", "lr=1e-3"],
    ],
)
def test_the_configuration_of_a_run_is_such_a_file(words: list[str], tmp_path: Path) -> None:
    config = cli.compose("train", cli.read("train", words).overrides).config
    run_folder.write_config(tmp_path, run_folder.plain(config) | {"name": "there"})
    again = config_of(str(tmp_path / "config.yaml"))
    assert again == config


def test_a_group_given_by_its_name_keeps_the_other_keys_of_the_file(tmp_path: Path) -> None:
    file = tmp_path / "my.yaml"
    text = "devices: 4\n{}passkey: {{enabled: true, depths: [0.5]}}\n"
    for context in ("context: {degree: 4, method: allgather}\n", "context.method: allgather\n"):
        file.write_text(text.format(context))
        config = config_of(str(file), "context=2", "passkey=true")
        assert (config.context.degree, config.context.method) == (2, "allgather")
        assert config.passkey.depths == [0.5]
    file.write_text(text.format("context: 4\n"))
    config = config_of(str(file), "context=2", "passkey=false")
    assert (config.context.degree, config.passkey.enabled, config.passkey.depths) == (
        2,
        False,
        None,
    )


def test_values_that_look_like_others_stay_what_they_are(tmp_path: Path) -> None:
    file = tmp_path / "my.yaml"
    file.write_text("lr: 1e-3\nname: 'null'\nmax_steps: 60\nwandb: {notes: '1_000'}\n")
    config = config_of(str(file), "max_tokens=100000")
    assert (config.lr, config.name, config.wandb.notes) == (0.001, "null", "1_000")
    assert (config.max_steps, config.max_tokens) == (None, 100_000)


@pytest.mark.parametrize("text", ["a b", "it's", r"C:\dir\ x\\", "def f(x):\n    return '", "12"])
def test_a_text_is_the_same_from_a_file_as_from_the_configuration_of_a_run(
    text: str, tmp_path: Path
) -> None:
    for name in ("my.yaml", "config.yaml"):
        values = {"sample_every": 5, "sample_prompt": text, "wandb": {"notes": text}}
        (tmp_path / name).write_text(yaml.safe_dump(values))
        config = config_of(str(tmp_path / name))
        assert (config.sample_prompt, config.wandb.notes) == (text, text)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("seq_length: 5", "did you mean seq_len?"),
        ("seq_len: abc", "seq_len=abc: must be a whole number"),
        ("- a\n- b", "no configuration; it should hold key: value lines"),
        ("a: [", "cannot be read as YAML"),
        ("lr: 0.1\nmodel:\n  lr: 1\nlr: 0.2", "my.yaml: lr is given twice"),
        ("model: {layers: 1, heads: 2, layers: 3}", "my.yaml: layers is given twice"),
        (None, "no such file"),
        ("lr: ${oc.env:HOME}", "is not filled in here"),
    ],
)
def test_a_mistake_is_one_line(
    content: str | None, message: str, tmp_path: Path, refused: Callable[[int, str], str]
) -> None:
    file = tmp_path / "my.yaml"
    if content is not None:
        file.write_text(content)
    refused(cli.main(["train", str(file)]), message)


@pytest.mark.parametrize(
    "text", ["a: 2024-13-45", "lr: !!int x", "lr: !!int ''", "lr: !!bool x", "lr: !!set [1]"]
)
def test_a_value_that_is_not_of_its_type_names_the_file(text: str, tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(text)
    readers: list[Callable[[], object]] = [
        lambda: with_file([str(file)]),
        lambda: run_folder.read_config(tmp_path),
        lambda: composition.from_file("train", file, []),
    ]
    for read in readers:
        with pytest.raises(ValueError, match=r"config\.yaml: ") as error:
            read()
        assert "\n" not in str(error.value)
