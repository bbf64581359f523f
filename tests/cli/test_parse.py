"""Every preset composes, a value means the same however it comes, every mistake names its key."""

import re
from pathlib import Path

import pytest
import yaml

from longctx import cli
from longctx.cli import commands
from longctx.cli.commands import checked_jobs
from longctx.cli.options import CompareOptions, ExportOptions
from longctx.config import presets
from longctx.config.asked import workload_of
from longctx.config.data_config import DataConfig
from longctx.config.eval_config import GenerateConfig, ScoreConfig
from longctx.config.presets import Request
from longctx.config.train_config import TrainConfig
from longctx.runs import run_folder
from longctx.training.run import scheduled

PRESETS = sorted((path.parent.name, path.stem) for path in presets.CONFIGS.glob("*/*.yaml"))
MISTAKES = yaml.safe_load(Path(__file__).with_name("mistakes.yaml").read_text())


def compose(*words: str, gpu: bool = False) -> Request[TrainConfig]:
    return presets.with_model(cli.compose("train", words), gpu=gpu)


def needed(group: str, name: str) -> list[str]:
    """Return the keys without which a preset is refused."""
    init = ["init=somewhere"]
    by_group = {"rope": init, "objective": ["data=text", "data.path=x", *init]}
    by_preset = {"text": ["data.path=x"], "hub": ["data.path=x"], "abf": ["rope.theta=5000000"]}
    by_preset |= {"mix": ["data.mix.a.source=embedded"]}
    return by_group.get(group, []) + by_preset.get(name, [])


@pytest.mark.parametrize(("group", "name"), PRESETS)
def test_every_preset_composes(group, name):
    composed = compose(f"{group}={name}", *needed(group, name))
    assert isinstance(composed.config, TrainConfig)
    assert name == "auto" or composed.choices[group] == name
    if group in ("attention", "data"):
        words = ["checkpoint=runs/x", f"{group}={name}", *needed(group, name)]
        assert cli.compose("eval", words).choices[group] == name


def test_no_words_give_the_defaults_of_the_dataclass():
    config = cli.compose("train", []).config
    assert config.attention.options == {"kernel": "auto"}
    config.attention.options = {}
    assert config == TrainConfig()


@pytest.mark.parametrize("text", ["vt,cwe", "vt, cwe", "'vt',cwe", "[vt,cwe]"])
def test_a_list_needs_no_brackets_outside_train(text):
    request = cli.compose("eval", ["runs/a", "ruler=true", f"ruler.tasks={text}"])
    assert request.config.ruler.tasks == ["vt", "cwe"]


OUT = {CompareOptions: "x.html", ExportOptions: "x", GenerateConfig: "x.jsonl"}


@pytest.mark.parametrize(("schema", "file"), [*OUT.items(), (ScoreConfig, "x.jsonl")])
def test_the_home_that_a_shell_leaves_is_filled_in(schema, file, monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    config = cli.compose(schema, ["runs/a", f"out=~/{file}"]).config
    assert config.out == Path("/home/me", file)
    here = cli.compose(schema, ["runs/a", f"out=./~me/{file}"]).config
    assert here.out == Path.cwd() / "~me" / file
    assert DataConfig(path="./~me").paths() == [str(Path.cwd() / "~me")]


VALUES = yaml.safe_load(Path(__file__).with_name("values.yaml").read_text())


@pytest.mark.parametrize(
    ("word", "name", "value"), [*VALUES, ("betas=[0.9,0.99]", "betas", (0.9, 0.99))]
)
def test_a_word_gives_the_value_that_it_shows(word, name, value):
    found: object = cli.compose("train", [word]).config
    for part in name.split("."):
        found = getattr(found, part)
    assert found == value and type(found) is type(value)


def test_model_auto_follows_the_device_and_keeps_overrides():
    own = ["model.ffn=77", "model.rope_scaling.rope_type=linear", "model.rope_scaling.factor=2"]
    assert cli.compose("train", own).choices["model"] == "auto"
    on_cpu, on_gpu = compose(*own), compose(*own, gpu=True)
    assert (on_cpu.choices["model"], on_gpu.choices["model"]) == ("tiny", "124m")
    assert on_cpu.config.model.ffn == on_gpu.config.model.ffn == 77
    assert on_gpu.config.model.rope_scaling == {"rope_type": "linear", "factor": 2}
    assert on_gpu.config.model.channels == 768
    assert compose("model=350m", gpu=True).choices["model"] == "350m"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        *((word, f"^{re.escape(word)}") for word in MISTAKES["words"].split()),
        *(
            (words, re.escape(words.split()[-1].partition("=")[0]))
            for words in MISTAKES["words together"].splitlines()
        ),
        *((words, re.escape(message)) for words, message in MISTAKES["remedies"].items()),
    ],
)
def test_a_mistake_names_the_key_or_the_remedy(words, message):
    with pytest.raises(ValueError, match=message) as caught:
        compose(*words.split())
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("argv", "policies"),
    [
        ([], ["fast", "balanced"]),
        (["memory.mlp_tile=64"], ["balanced"]),
        (["memory.offload=0.5"], ["balanced"]),
        (["memory.recompute=none"], ["fast"]),
        (["memory=balanced", "memory.offload=0"], ["balanced"]),
    ],
)
def test_memory_auto_offers_the_policies_that_fit(argv, policies):
    config = compose(*argv).config
    assert config.memory.policies() == policies
    workload = workload_of(config, "cpu", 64)
    assert workload.memory == config.memory.filled(policies[0])


def test_a_sweep_is_every_combination_in_order():
    jobs = cli.jobs(["attention=naive,flash", "context=1,2", "betas=[0.9,0.95]", "runs='a,b'"])
    assert jobs == [
        [f"attention={name}", f"context={degree}", "betas=[0.9,0.95]", "runs='a,b'"]
        for name in ("naive", "flash")
        for degree in (1, 2)
    ]
    assert cli.jobs(["betas=[0.9,1],[0.9,2]"]) == [["betas=[0.9,1]"], ["betas=[0.9,2]"]]
    with pytest.raises(ValueError, match=r"lr=0\.1,: a value between commas is missing"):
        cli.jobs(["lr=0.1,"])


@pytest.mark.parametrize(
    "text",
    [
        *("it's", "a\\", "a\\'b\\\\", 'x="y", [1,2] {a: b} #', "two\nlines", "true", "12", ""),
        *(" a ", "'quoted', \"twice\"", "null"),
    ],
)
@pytest.mark.parametrize("name", ["plain", "lr=1", "'a, b'", "it's"])
def test_a_job_of_a_sweep_has_the_values_that_were_given(text, name, monkeypatch):
    monkeypatch.setattr(commands, "check_paths", lambda config: None)
    words = ["lr=0.001,0.002", "sample_every=5", f"sample_prompt={text}", f"init={name}"]
    for lr, job in zip((0.001, 0.002), checked_jobs(words), strict=True):
        config = cli.compose("train", job).config
        assert (config.lr, config.sample_prompt) == (lr, None if text == "null" else text)
        assert config.init == name.strip("'" * name.startswith("'"))


def test_a_sweep_pins_the_model_of_its_file(tmp_path, monkeypatch):
    def pin(config: TrainConfig) -> None:
        config.init = "me/small@commit"

    monkeypatch.setattr(commands, "check_paths", pin)
    (tmp_path / "my.yaml").write_text("init: me/small\n")
    for job in checked_jobs([str(tmp_path / "my.yaml"), "lr=0.001,0.002"]):
        assert cli.compose("train", job).config.init == "me/small@commit"


def test_what_depends_on_the_device_is_filled_in():
    config = compose("max_tokens=10000").config
    gpu, cpu = workload_of(config, "cuda", 16384), workload_of(config, "cpu", 4096)
    assert (gpu.batch_size, gpu.accumulate, gpu.precision, gpu.compile) == (1, 4, "bf16", True)
    assert (cpu.batch_size, cpu.accumulate, cpu.precision, cpu.compile) == (1, 1, "fp32", False)
    assert scheduled(config, cpu).max_steps == 3


def test_a_name_has_what_differs():
    words = ["seq_len=16384", "lr=0.003", "max_steps=5", "data.documents=9", "workers=0"]
    composed = compose(*words)
    assert run_folder.stem(composed.choices, 16384, composed.overrides) == "tiny-flash-16k-lr0.003"
    dull = {"batch_size": "4", "accumulate": "1", "memory.recompute": "block", "seed": "7"}
    assert run_folder.stem(composed.choices, 64, dull).endswith("-flash-64-seed7")
    own = {f"model.{key}": "1" for key in ("layers", "heads", "ffn", "channels")}
    assert run_folder.stem(composed.choices, 64, own) == "own-flash-64"
    strange = run_folder.stem(composed.choices, 100, {"seed": "a/../b c", "notes": "x" * 300})
    assert "/" not in strange and len(strange) <= 80
