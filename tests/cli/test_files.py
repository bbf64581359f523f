"""Keys from a file: one of the user's own, or the config.yaml of a run that is resumed."""

from itertools import pairwise
from pathlib import Path

import pytest
import yaml

from longctx import cli
from longctx.cli import parse
from longctx.config.asked import workload_of
from longctx.config.fields import keys
from longctx.config.train_config import TrainConfig
from longctx.runs import run_folder
from longctx.training.run import Run, scheduled
from tests.written import write_config

SAVED = yaml.safe_load(Path(__file__).with_name("saved.yaml").read_text())


def config_of(*words: str) -> TrainConfig:
    config: TrainConfig = cli.compose("train", words).config
    return config


def saved_in(path: Path, *words: str) -> TrainConfig:
    """Return the configuration of a resumed run, changed by `words`."""
    return parse.from_file(path, parse.given_values(TrainConfig, words)).config


def run_of(config: TrainConfig) -> Run:
    """Return the run of `config` on a CPU."""
    return scheduled(config, workload_of(config, "cpu", config.seq_len))


def test_the_command_line_wins_over_a_file(tmp_path):
    file = tmp_path / "my.yaml"
    file.write_text(
        "model: 124m\nseq_len: 0512\nattention: sdpa\nmodel.window: 64\nlr: 0.002\n"
        "name: 'null'\nmax_steps: 60\nclip: 1e-3\nval_rows: 1e2\n"
        "data: {source: text, path: ['a b/c.txt', \"it's,[odd].md\"]}\n"
        "wandb: {tags: [x, 'y z', no, 1:30, 1:30.5], notes: 'a: b, {c} [d]'}\n"
    )
    config = config_of(str(file), "lr=0.004", "seed=3", "max_tokens=100000")
    assert (config.seq_len, config.lr, config.seed) == (512, 0.004, 3)
    assert (config.max_steps, config.max_tokens) == (None, 100_000)
    assert (config.name, config.clip, config.val_rows) == ("null", 0.001, 100)
    assert (config.model.channels, config.model.window) == (768, 64)
    assert config.attention.backend == "sdpa"
    assert config.data.path == ["a b/c.txt", "it's,[odd].md"]
    assert config.wandb.tags == ["x", "y z", "no", "1:30", "1:30.5"]
    assert config.wandb.notes == "a: b, {c} [d]"
    assert config_of("model=tiny", str(file)).model.channels == 128
    # A value of a group leaves the file's others as they are
    for words in (["data.packing=false", "model.tied=false"], ["data=text", "model=124m"]):
        config = config_of(str(file), *words)
        assert (config.data.path, config.model.channels) == (["a b/c.txt", "it's,[odd].md"], 768)
        assert config.model.window == 64


@pytest.mark.parametrize("words", SAVED)
def test_a_run_is_read_back_as_it_was(words, tmp_path):
    config = cli.compose("train", words).config
    write_config(tmp_path, run_folder.plain(config) | {"name": "there"})
    assert config_of(str(tmp_path / "config.yaml")) == config
    resumed = saved_in(tmp_path / "config.yaml")
    assert (resumed.name, resumed.data, resumed.model) == ("there", config.data, config.model)
    config.name = "there"
    assert config_of(str((tmp_path / "config.yaml").rename(tmp_path / "my.yaml"))) == config


def test_a_group_given_by_its_name_keeps_the_other_keys_of_the_file(tmp_path):
    file = tmp_path / "my.yaml"
    text = "devices: 4\n{}passkey: {{enabled: true, depths: [0.5]}}\n"
    for context in ("context: {degree: 4, method: allgather}\n", "context.method: allgather\n"):
        file.write_text(text.format(context))
        config = config_of(str(file), "context=2", "passkey=true")
        assert (config.context.degree, config.context.method) == (2, "allgather")
        assert config.passkey.depths == [0.5]
    file.write_text(text.format("context: 4\n"))
    config = config_of(str(file), "context=2", "passkey=false")
    found = (config.context.degree, config.passkey.enabled, config.passkey.depths)
    assert found == (2, False, None)
    file.write_text("memory: {offload: 0.1}\nmemory.offload: 0.2")
    with pytest.raises(ValueError, match=r"memory\.offload is given twice"):
        config_of(str(file))


ALIASES = "a: &a [x]\n" + "".join(f"{b}: &{b} [{f'*{a},' * 9}]\n" for a, b in pairwise("abcdefghi"))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("seq_length: 5", "did you mean seq_len?"),
        ("seq_len: abc", "seq_len=abc: must be a whole number"),
        ("seq_len: {a: 1}", "seq_len.a is not a key"),
        ("- a\n- b", "no configuration; it should hold key: value lines"),
        ("a: [", "cannot be read as YAML"),
        ("lr: 0.1\nmodel:\n  lr: 1\nlr: 0.2", "my.yaml: lr is given twice"),
        ("model: {layers: 1, heads: 2, layers: 3}", "my.yaml: layers is given twice"),
        ("memory: balanced\nmemory.policy: fast", "my.yaml: memory.policy: memory is given too"),
        *(("lr: ${oc.env:HOME}", "lr=${oc"), ("wandb: {tags: ['${oc.env:HOME}']}", "wandb.tags=")),
        *((x, "notes=") for x in ("wandb: {notes: 'a ${oc.env:HOME}'}", "wandb.notes: ${lr}")),
        *((x, "my.yaml") for x in ("", "null\n", "a: 2024-13-45", "\x00\x01", "${seq_len}")),
        *((x, "my.yaml") for x in (ALIASES, "a: " + "[" * 500_000, "a: b\n" * 500_000)),
        ("".join(" " * n + f"a{n}:\n" for n in range(1000)), "my.yaml"),
        *((f"lr: !!{x}", "my.yaml") for x in ("int x", "int ''", "bool x", "set [1]")),
        *(("memory: true", "memory"), ("model: 7", "model"), ("model: [[64, 1]]", "model")),
        *((f"name: {name}", "no .ckpt last") for name in ("../up", "r.ckpt")),
    ],
    ids=lambda text: text[:12],
)
def test_a_wrong_file_is_one_line(content, message, tmp_path, refused):
    """One of the user's own, or that of a run."""
    for name in ("my.yaml", "config.yaml"):
        (tmp_path / name).write_text(content)
    error = refused(cli.main(["train", str(tmp_path / "my.yaml")]), message)
    with pytest.raises(ValueError, match=r"config\.yaml") as caught:
        saved_in(tmp_path / "config.yaml")
    assert "\n" not in str(caught.value)
    assert str(Path.home()) not in f"{error}{caught.value}".replace(str(tmp_path), "")


def test_a_saved_run_changes_by_overrides_alone(tmp_path):
    words = ("lr=3e-5", "wandb.tags=[a,b]", "attention.options.kernel=portable", "max_steps=7")
    saved = run_of(config_of("model=tiny", *words, "data.tokenizer=a")).settings()
    write_config(tmp_path, saved)
    file = tmp_path / "config.yaml"
    assert run_of(saved_in(file)).settings() == saved
    assert run_of(saved_in(file, "max_tokens=40960000")).max_steps == 10000
    changed = saved_in(file, "max_steps=9", "strategy=fsdp")
    found = (changed.data.tokenizer, changed.max_steps, changed.strategy.name)
    assert found == ("a", 9, "fsdp")
    write_config(tmp_path, saved | {"memory": {"policy": "balanced", "offload": 0.5}})
    memory = saved_in(file, "memory=fast").memory
    assert (memory.policy, memory.offload) == ("fast", None)
    assert saved_in(file, "max_tokens=null").max_steps == 7
    with pytest.raises(ValueError, match=r"^max_steps=0"):
        saved_in(file, "max_steps=0")


@pytest.mark.parametrize(("text", "value"), [("1:30.5", None), ("90.5", 90.5), ("1.5e-3", 0.0015)])
def test_a_number_is_decimal(tmp_path, text, value):
    (tmp_path / "a.yaml").write_text(f"clip: {text}\n")
    if value is None:
        with pytest.raises(ValueError, match=r"clip=1:30\.5: must be a number"):
            config_of(str(tmp_path / "a.yaml"))
    else:
        assert config_of(str(tmp_path / "a.yaml")).clip == value
    declared = keys(TrainConfig)["attention.options"]
    assert parse.value_of(f"{{a: {text}}}", declared) == {"a": value or text}
