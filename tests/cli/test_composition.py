"""Every preset composes, every mistake is one line that names the key, and composing needs no
torch.
"""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from longctx import cli
from longctx.cli import composition, early_checks, overrides
from longctx.cli.commands import checked_jobs
from longctx.cli.overrides import quoted
from longctx.config import presets
from longctx.config.train_config import TrainConfig
from longctx.planner.workload import workload_of
from longctx.runs import run_folder
from longctx.training.resolve import scheduled
from tests.cli.composed import compose

ROOT = Path(__file__).resolve().parents[2]
PRESETS = sorted((path.parent.name, path.stem) for path in cli.CONFIGS.glob("*/*.yaml"))


@pytest.mark.parametrize(("group", "name"), PRESETS)
def test_every_preset_composes(group: str, name: str) -> None:
    path = ["data.path=somewhere"] if name in ("text", "hub") else []
    path += ["data.mix.code.source=embedded"] if name == "mix" else []
    path += ["init=somewhere"] if group == "rope" else []
    path += ["rope.theta=5000000"] if name == "abf" else []
    composed = compose(f"{group}={name}", *path)
    assert isinstance(composed.config, TrainConfig)
    assert name == "auto" or composed.choices[group] == name


@pytest.mark.parametrize(
    ("group", "name"), [preset for preset in PRESETS if preset[0] in ("attention", "data")]
)
def test_every_preset_composes_for_evaluation(group: str, name: str) -> None:
    path = ["data.path=somewhere"] if name in ("text", "hub") else []
    path += ["data.mix.code.source=embedded"] if name == "mix" else []
    arguments = cli.read("eval", ["checkpoint=runs/x", f"{group}={name}", *path])
    assert cli.compose("eval", arguments.overrides).choices[group] == name


def test_no_overrides_give_the_defaults_of_the_dataclass() -> None:
    composed = compose().config
    fresh = TrainConfig()
    for key in ("seq_len", "lr", "clip", "min_lr", "seed", "runs", "wandb", "strategy"):
        assert getattr(composed, key) == getattr(fresh, key)
    assert composed.attention.backend == "flash"
    assert composed.data.source == "embedded"


@pytest.mark.parametrize(
    "text",
    ["it's", "a\\", "a\\'b\\\\", 'x="y", [1,2] {a: b} #', "two\nlines", "true", "12", "", " a "],
)
def test_a_literal_is_taken_as_it_is_typed(text: str) -> None:
    typed = f"sample_prompt={text}", "sample_every=1"
    assert compose(*typed).config.sample_prompt == text
    (argument,) = overrides.read("train", [typed[0]]).overrides
    assert composition.jobs("train", [argument, "lr=0.1,0.2"])[0][0] == argument


def test_model_auto_follows_the_device_and_keeps_overrides() -> None:
    on_cpu, on_gpu = compose("model.ffn=77"), compose("model.ffn=77", gpu=True)
    assert (on_cpu.choices["model"], on_gpu.choices["model"]) == ("tiny", "124m")
    assert on_cpu.config.model.ffn == on_gpu.config.model.ffn == 77
    assert on_gpu.config.model.channels == 768
    assert compose("model=350m", gpu=True).choices["model"] == "350m"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("seqlen=3", "did you mean seq_len?"),
        ("layers=3", "did you mean model.layers?"),
        ("+foo=1", "foo is not a key"),
        ("attention=flsh", "did you mean flash?"),
        ("attention=", "attention=: not one of"),
        ("seq_len=abc", "seq_len=abc: must be a whole number, or max"),
        ("seq_len=4.5", "seq_len=4.5: must be a whole number"),
        ("seq_len=null", "seq_len=null: not allowed; give a whole number"),
        ("min_lr=null", "min_lr=null: not allowed; give a number"),
        ("seq_len=true", "seq_len=true: must be a whole number, or max"),
        ("seq_len=0", "seq_len=0"),
        ("seq_len=1", "seq_len=1"),
        ("seq_len=-4096", "seq_len=-4096"),
        ("seq_len=99999999999999999999", "seq_len=99999999999999999999"),
        ("seq_len=[1", "seq_len=[1: cannot be read"),
        ("seq_len=1,2", "add -m"),
        ("seq_len", "key=value"),
        ("--cfg=job", "not an option"),
        ("lr=nan", "lr=nan"),
        ("lr=high", "lr=high: must be a number"),
        ("betas=3", "must be a list"),
        ("betas=[0.9,1.5]", "betas=[0.9, 1.5]"),
        ("tags=x", "did you mean wandb.tags?"),
        ("wandb={mode:online}", "wandb has keys of its own"),
        ("wandb.mode=sometimes", "wandb.mode=sometimes"),
        ("device=tpu", "device=tpu: one of auto, cpu, cuda"),
        ("compile=perhaps", "compile=perhaps"),
        ("clip=0", "clip=0"),
        ("clip=inf", "clip=inf: a norm above 0"),
        ("model.rope_scaling={rope_type:[1]}", "rope_type=[1] is not covered"),
        (f"model.rope_scaling={{rope_type:linear,factor:{10**400}}}", "must be a number above 0"),
        ("batch_size=0", "batch_size=0"),
        ("workers=-1", "workers=-1"),
        ("name=../up", "name='../up'"),
        ("name=a/b", "name='a/b'"),
        ("name=..", "name='..'"),
        ("name=" + "x" * 300, "up to 100 letters"),
        ("model.heads=3", "model.heads=3"),
        ("model.channels=130", "model.channels=130"),
        ("data.val_fraction=2", "data.val_fraction=2"),
        ("memory=short", "memory=short: not one of auto, balanced, fast, long"),
        ("memory.recompute=all", "memory.recompute=all: one of none, mlp, block"),
        ("memory.offload=2", "memory.offload=2.0: a number from 0 to 1"),
        ("memory.mlp_tile=-1", "memory.mlp_tile=-1: a number from 0"),
        ("memory.optimizer_state=disk", "memory.optimizer_state=disk: one of fp32, bf16, host"),
        ("optimizer=muno", "did you mean muon?"),
        ("optimizer.momentum=0.9", "optimizer.momentum=0.9: not a key of optimizer=adamw"),
        ("loss_chunk=0", "did you mean memory.loss_chunk?"),
        ("memory.loss_chunk=0", "memory.loss_chunk=0: a number from 1"),
        ("hydra.run.dir=/tmp/x", "Hydra cannot be changed"),
        ("+hydra/launcher=basic", "Hydra cannot be changed"),
        ("~hydra.job", "Hydra cannot be changed"),
        ("model._target_=os.system", "_target_"),
        ("~model", "key=value"),
        ("=3", "=3: not of the form key=value"),
        ("resume=", "resume= names no run"),
        ("rope=yarn", "rope=yarn: stretches trained weights, and init= names none"),
        ("passkey=yes", "passkey=yes: must be true or false"),
        ("deterministic=maybe", "deterministic=maybe: must be true or false"),
        ("name={a:1}", "name={a:1}: must be text"),
        ("passkey.samples=3", "passkey.samples=3: does nothing without passkey=true"),
        ("lora.scaling=3", "lora.scaling=3.0: does nothing without lora.rank"),
        ("passkey.depths=[2]", "passkey.depths=2.0: a number from 0 to 1"),
        ("passkey.lengths=[64]", "passkey.lengths=64: a number from 128 up"),
        ("passkey.lengths=[]", "passkey.lengths=[]: an empty list; give a value"),
        ("passkey.lengths=[256,256]", "passkey.lengths=[256, 256]: a value is there twice"),
        ("passkey.kinds=[thread]", "passkey.kinds=thread: one of passkey, needle"),
        ("passkey.samples=0", "passkey.samples=0: a number from 1"),
        ("data=mix", "data.mix is not set"),
        ("data.errors=replace", "data.errors=replace: "),
        ("lora.rank=0", "lora.rank=0: a number from 1 to 4,096"),
        ("lora.targets=[q]", "lora.targets=['q']: of qkv"),
        ("seq_len_schedule=[[1000,5]]", "growing lengths that divide seq_len=4096"),
        ("seq_len_schedule=[[2048,5],[1024,5]]", "growing lengths that divide seq_len=4096"),
        ("seq_len_schedule=[[2048]]", "pairs of row length and steps"),
        ("seq_len_schedule=[[2048,0]]", "pairs of row length and steps"),
        ("rope=yern", "did you mean yarn?"),
        ("rope.theta=5e6", "rope.theta goes with rope=abf"),
        ("rope.factor=2", "rope.factor=2.0: not used by rope=keep"),
        ("model.rope_scaling.rope_type=linear", "model.rope_scaling.factor is missing"),
        ("model.window_layers=[0]", "model.window_layers=[0]: give model.window too"),
        ("seed=${oc.env:HOME}", "seed=${oc.env:HOME}: ${...} is not filled in here"),
        (r"wandb.notes=$\{oc.env:HOME}", "wandb.notes"),
        (r"wandb.tags=[a,$\{oc.env:HOME}]", "wandb.tags"),
        (r"seed=$\{oc.env:HOME}", "seed"),
        (r"attention.options.kernel=$\{oc.env:HOME}", "attention.options.kernel"),
        (r"data.mix.a.path={b:$\{oc.env:HOME}}", "data.mix.a.path"),
        (
            "seq_len_schedule=[[128.5,2]]",
            "seq_len_schedule=[[128.5,2]]: must be a list of lists of whole numbers",
        ),
        ("attention.options=3", "attention.options=3: must be keys with values"),
        ("model.nope_layers=[4]", "model.nope_layers=[4]: layers from 0 to 3"),
    ],
)
def test_a_mistake_is_one_line_that_names_it(override: str, message: str) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        compose(override)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_data_overrides_without_effect_are_refused_except_in_a_saved_run() -> None:
    mix = ["data=mix", "data.mix.code.source=embedded"]
    for argv, message in (
        (
            ["data.tokenizer=a", "data.vocab_size=16384"],
            "data.vocab_size=16384: data.tokenizer=a has its own",
        ),
        ([*mix, "data.errors=strict"], "data.errors=strict: "),
        (
            [*mix, "data.mix.a.path=x", "data.mix.code.errors=replace"],
            "data.mix.code.errors=replace: ",
        ),
        (
            ["data.text_column=body"],
            "data.text_column=body: ",
        ),
        (
            ["data=text", "data.path=x", "data.chat=true", "data.text_column=body"],
            "data.text_column=body: ",
        ),
        ([*mix, "data.text_column=body"], "data.text_column=body: "),
        ([*mix, "data.length=500"], "data.length=500: "),
        (
            [*mix, "data.mix.code.split=test"],
            "data.mix.code.split=test: ",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            compose(*argv)
    for argv in (
        ["data.mix.a.source=needles", "data.length=500"],
        ["data.mix.a.path=x", "data.text_column=body"],
    ):
        compose(*mix, *argv)
    for argv in (
        [*mix, "data.mix.a.path=x"],
        ["data=text", "data.path=x"],
        ["data=needles", "data.path=x"],
    ):
        assert (
            compose(*argv, "data.errors=replace", "data.vocab_size=300").config.data.errors
            == "replace"
        )


def test_a_field_of_text_wants_files_of_rows(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("plain")
    argv = ("data=text", f"data.path={tmp_path}", "data.text_column=body")
    with pytest.raises(
        ValueError,
        match=r"data\.text_column=body: ",
    ):
        compose(*argv)
    (tmp_path / "b.jsonl.gz").write_bytes(b"")
    assert compose(*argv).config.data.text_column == "body"


def test_parts_of_memory_fit_together() -> None:
    with pytest.raises(
        ValueError, match=r"memory\.keep_every=2 needs memory\.recompute=block, not none"
    ):
        compose("memory=fast", "memory.keep_every=2")
    with pytest.raises(
        ValueError, match=r"memory\.mlp_tile=64 needs memory\.recompute=mlp or block, not none"
    ):
        compose("memory=fast", "memory.mlp_tile=64")
    with pytest.raises(
        ValueError, match=r"memory\.offload=0\.5 needs memory\.recompute=block, not mlp"
    ):
        compose("memory.recompute=mlp", "memory.offload=0.5")
    assert (
        compose("memory=long", "memory.offload=0.25").config.memory.filled("long").offload == 0.25
    )
    assert str(compose("memory=fast").config.memory) == "fast"
    text = str(compose("memory=balanced", "memory.loss_chunk=512").config.memory)
    assert text == "balanced, recompute=block, loss_chunk=512"


@pytest.mark.parametrize(
    ("argv", "policies"),
    [
        ([], ["fast", "balanced", "long"]),
        (["memory.mlp_tile=64"], ["balanced", "long"]),
        (["memory.offload=0.5"], ["balanced", "long"]),
        (["memory.recompute=none"], ["fast", "balanced"]),
        (["memory=long", "memory.offload=0"], ["long"]),
    ],
)
def test_memory_auto_offers_the_policies_that_fit_the_overrides(
    argv: list[str], policies: list[str]
) -> None:
    config = compose(*argv).config
    assert config.memory.policies() == policies
    work = workload_of(config, "cpu", 64)
    assert work.memory == config.memory.filled(policies[0])
    config.memory.validate()
    work.memory.validate()


def test_two_lengths_of_one_run_are_a_mistake() -> None:
    with pytest.raises(ValueError, match="give one"):
        compose("max_steps=5", "max_tokens=100")


def test_a_budget_without_spikes_that_are_skipped_is_refused() -> None:
    with pytest.raises(ValueError, match="spike_budget=9: does nothing without spike=skip"):
        compose("spike_budget=9")
    assert compose("spike_budget=9", "spike=skip").config.spike_budget == 9


@pytest.mark.parametrize(
    "words", [["context=2", "context.degree=4"], ["passkey=true", "passkey.enabled=false"]]
)
def test_a_key_given_twice_by_two_names_is_refused(words: list[str]) -> None:
    with pytest.raises(ValueError, match=f"{words[1]}: {words[0]} is given too"):
        cli.read("train", words)


def test_a_misspelt_key_in_a_preset_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(cli.CONFIGS, tmp_path / "configs")
    (tmp_path / "configs" / "model" / "odd.yaml").write_text("layrs: 3\n")
    for module in (overrides, composition, presets):
        monkeypatch.setattr(module, "CONFIGS", tmp_path / "configs")
    with pytest.raises(ValueError, match="layrs"):
        compose("model=odd")


def test_options_of_a_backend_may_have_any_name() -> None:
    assert compose("attention.options.kernel=flash").config.attention.options["kernel"] == "flash"


def test_seq_len_is_a_number_or_max() -> None:
    assert compose("seq_len=max").config.seq_len == "max"
    assert compose("seq_len=16384").config.seq_len == 16384


def test_model_auto_is_open_until_the_device_is_known() -> None:
    composed = cli.compose("train", ["model.ffn=77"])
    assert composed.choices["model"] == "auto"
    assert composed.config.model.ffn == 77


def test_a_job_of_a_sweep_has_the_values_that_were_given(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    prompts = ("sample_prompt=Hi there", "sample_prompt='quoted', \"twice\"", "sample_prompt=null")
    for prompt in prompts:
        given = ["lr=0.001,0.002", "sample_every=5", prompt, "data=needles", "device=cpu"]
        jobs = checked_jobs(cli.read("train", given).overrides)
        for lr, job in zip((0.001, 0.002), jobs, strict=True):
            config = cli.compose("train", cli.read("train", job).overrides).config
            wanted = None if prompt.endswith("null") else prompt.partition("=")[2]
            assert (config.lr, config.sample_prompt) == (lr, wanted)


@pytest.mark.parametrize("name", ["plain", "lr=1", "a, b", "it's"])
def test_a_job_of_a_sweep_begins_with_the_folder_that_was_given(
    tmp_path, monkeypatch, name
) -> None:
    monkeypatch.setattr(early_checks, "check_training", lambda config: None)
    given = ["lr=0.001,0.002", f"init={quoted(name)}"]
    for job in checked_jobs(cli.read("train", given).overrides):
        assert cli.compose("train", cli.read("train", job).overrides).config.init == name


def test_a_sweep_is_every_combination_in_order() -> None:
    jobs = cli.jobs("train", ["attention=naive,flash", "seq_len=64,128", "lr=0.1"])
    assert jobs == [
        ["attention=naive", "seq_len=64", "lr=0.1"],
        ["attention=naive", "seq_len=128", "lr=0.1"],
        ["attention=flash", "seq_len=64", "lr=0.1"],
        ["attention=flash", "seq_len=128", "lr=0.1"],
    ]
    assert cli.jobs("train", ["seed=range(1,4)"]) == [["seed=1"], ["seed=2"], ["seed=3"]]
    with pytest.raises(ValueError, match="interval"):
        cli.jobs("train", ["lr=interval(0,1)"])


def test_what_depends_on_the_device_is_filled_in() -> None:
    gpu = workload_of(compose("seq_len=16384", gpu=True).config, "cuda", 16384)
    assert (gpu.batch_size, gpu.accumulate, gpu.precision, gpu.compile) == (1, 4, "bf16", True)
    assert workload_of(compose(gpu=True).config, "cuda", 4096).tokens_per_step == 65536
    config = compose("max_tokens=10000").config
    cpu = workload_of(config, "cpu", 4096)
    assert (cpu.batch_size, cpu.accumulate, cpu.precision, cpu.compile) == (1, 1, "fp32", False)
    assert scheduled(config, cpu).max_steps == 3


def test_a_name_says_what_differs() -> None:
    composed = compose(
        "seq_len=16384",
        "lr=0.003",
        "max_steps=5",
        "wandb.mode=disabled",
        "data.documents=9",
        "workers=0",
    )
    assert run_folder.stem(composed.choices, 16384, composed.overrides) == "tiny-flash-16k-lr0.003"
    dull = {"batch_size": "4", "accumulate": "1", "memory.recompute": "mlp", "seed": "7"}
    assert run_folder.stem(composed.choices, 64, dull).endswith("-flash-64-seed7")
    assert run_folder.stem(composed.choices, 64, dull, {"batch_size"}).endswith("batchsize4-seed7")
    own = {f"model.{key}": "1" for key in ("layers", "heads", "ffn", "channels")}
    assert run_folder.stem(composed.choices, 64, own) == "own-flash-64"
    strange = run_folder.stem(composed.choices, 100, {"seed": "a/../b c", "notes": "x" * 300})
    assert "/" not in strange
    assert len(strange) <= 80


def test_composing_imports_no_torch() -> None:
    code = (
        "import sys; from longctx import cli; cli.help_text('train');"
        "assert 'hydra' not in sys.modules;"
        "cli.compose('train', []); torch = {'torch', 'lightning', 'datasets', 'wandb'};"
        "assert not torch & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_override_at_fault_is_named_exactly() -> None:
    with pytest.raises(ValueError, match=r"^min_lr=null: not allowed"):
        compose("lr=null", "min_lr=null")
