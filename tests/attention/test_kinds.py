"""attention={window: A, full: B}: each kind of layer has a backend of its own, in training, plans,
decoding, the kernel lock and every check.
"""

from dataclasses import replace

import pytest
import torch

from longctx import cli, plugins
from longctx.attention import Mask
from longctx.attention.description import AttentionConfig
from longctx.config.asked import workload_of
from longctx.config.eval_config import EvalConfig
from longctx.config.train_config import TrainConfig
from longctx.model import GPT
from longctx.model.decoder import Decoder
from longctx.parallel.devices import check_attention
from longctx.planner import peak_memory, plans, step_time
from longctx.spec.model_config import GPTConfig
from longctx.spec.step import Division
from longctx.training import kernel_lock
from tests.planner.steps import H200, workload

GIVEN = "attention={window: sdpa, full: flash}"
MIXED = AttentionConfig("flash", {"kernel": "auto"}, window="sdpa")
WINDOWS = ("model.window=8", "model.window_layers=[0,2]")


def small(attention) -> GPT:
    torch.manual_seed(0)
    config = GPTConfig(vocab_size=50, window=8, window_layers=[0, 2], init_std=0.2)
    return GPT(config, attention)


def test_a_file_and_the_command_line_give_the_same(tmp_path):
    (file := tmp_path / "mine.yaml").write_text("attention: {window: sdpa, full: flash}\n")
    for words in ([GIVEN], [str(file)], ["attention=flash", "attention.window=sdpa"]):
        assert cli.compose("train", [*words, *WINDOWS]).config.attention == MIXED
    assert len(cli.parse.jobs([f"{GIVEN},naive"])) == 2


def test_each_layer_has_its_backend_and_results_are_the_same():
    model, one = small(MIXED), small("naive")
    names = [block.attention.attend.name for block in model.blocks]
    assert names == ["sdpa", "flash", "sdpa", "flash"]
    tokens = torch.arange(46).reshape(2, 23)
    mask = Mask.documents(tokens // 9)
    for each in (model, one):
        each(tokens, tokens.roll(-1, 1), mask).backward()
    for (name, p), q in zip(model.named_parameters(), one.parameters(), strict=True):
        assert (p.grad - q.grad).abs().max() < 1e-4 * q.grad.abs().max(), name


def test_decoding_is_the_whole_forward():
    model = small(MIXED).eval()
    text = list(range(3, 20))
    decoder = Decoder(model, 1, 20)
    logits = [decoder.prefill([text[:10]])]
    logits += [decoder.step(torch.tensor([token])) for token in text[10:]]
    whole = model(torch.tensor([text]))[0, 9:]
    torch.testing.assert_close(torch.cat(logits), whole, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("windowed", "full", "says"),
    [
        ("auto", "flash", "attention=auto+flash: name two of flash, naive"),
        ("sdpa", "auto", "attention=sdpa+auto: name two of flash, naive"),
        ("flash", "nix", "attention=nix: one of auto"),
    ],
)
def test_unknown_backends_are_refused(windowed, full, says):
    with pytest.raises(ValueError, match=says.replace("+", r"\+")):
        cli.compose("train", [f"attention={{window: {windowed}, full: {full}}}", *WINDOWS])


def test_options_go_to_the_backends_that_have_them():
    both = AttentionConfig("flash", {"kernel": "portable"}, window="naive")
    both.validate()
    assert [x.options for x in both.each] == [{"kernel": "portable"}, {}]
    with pytest.raises(ValueError, match="kernel=cudnnx: one of auto, portable"):
        AttentionConfig("flash", {"kernel": "cudnnx"}, window="sdpa").validate()
    with pytest.raises(ValueError, match=r"score=none is not an option of naive\+flash"):
        AttentionConfig("flash", {"score": "none"}, window="naive").validate()


def test_a_backend_that_would_do_nothing_is_refused():
    with pytest.raises(ValueError, match=r"attention.window=sdpa: model.window=null"):
        check_attention(TrainConfig(attention=MIXED), GPTConfig(vocab_size=8), "cpu")


def test_each_backend_is_checked():
    model = GPTConfig(vocab_size=8, window=8, softcap=30.0)
    with pytest.raises(ValueError, match="softcap"):
        check_attention(EvalConfig(attention=MIXED), model, "cpu")
    check_attention(EvalConfig(attention=AttentionConfig("flash", window="naive")), model, "cpu")


def test_a_plan_is_between_those_of_its_backends():
    times, bytes_of, sizes = [], [], ("seq_len=8192", "memory=fast", "model.vocab_size=512")
    for given in ("attention=flash", "attention={window: flex, full: flash}", "attention=flex"):
        step = workload(given, "model.window=1024", "model.window_layers=[0,1,2]", *sizes)
        times.append(step_time.seconds(step, H200).parts["attention"])
        naive = workload(given.replace("flex", "naive"), *WINDOWS, *sizes)
        bytes_of.append(peak_memory.predict(naive).peak)
    assert times[0] < times[1] < times[2]
    assert bytes_of[0] < bytes_of[1] < bytes_of[2]


def test_devices_share_sequences_in_a_way_that_all_layers_can():
    both = tuple(Division("ddp", 2, method) for method in ("ulysses", "allgather"))
    for given, methods in (("flash", {"ulysses", "allgather"}), (GIVEN[10:], {"ulysses"})):
        step = workload(f"attention={given}", *WINDOWS, "devices=2", "seq_len=8192")
        able = plans.able_divisions(replace(step, divisions=both))
        assert {division.context_method for division in able} == methods


def test_the_words_of_a_plan_name_both(capsys):
    assert cli.main(["plan", GIVEN, *WINDOWS, "model=tiny", "gpu=H100", "seq_len=256"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("fits: sdpa+flash, ") and out.count("sdpa+flash") > 3


def test_the_lock_has_both_kernels():
    config = cli.compose("train", [GIVEN, *WINDOWS, "seq_len=64"]).config
    lock = kernel_lock.of_workload(workload_of(config, "cpu", 64, config.model))
    assert (lock["backend"], lock["windows"]["backend"]) == ("flash", "sdpa")
    assert lock["fingerprint"]["out"] and lock["windows"]["fingerprint"]["out"]


def test_a_model_of_another_backend_is_not_evaluated_with_one(tmp_path):
    run = {"attention": {"backend": "flash", "window": "double"}}
    with pytest.raises(ValueError, match=r"double\+flash, of a plugin: add .plugins=\[FILE.py\]"):
        plugins.attention_of(run, tmp_path)
    run["attention"]["window"] = "sdpa"
    assert plugins.attention_of(run, tmp_path).label == "sdpa+flash"


def test_training_and_evaluation_name_both(tmp_path, capsys):
    words = [GIVEN, *WINDOWS, "model=tiny", "seq_len=64", "max_steps=1", "batch_size=2"]
    words += ["accumulate=1", "data.documents=10", "data.vocab_size=300", "tracker=none"]
    assert cli.main(["train", *words, f"runs={tmp_path}", "name=mixed", "val_rows=2"]) == 0
    assert "attention  sdpa+flash, kernel=auto" in capsys.readouterr().out
    assert cli.main(["eval", str(tmp_path / "mixed")]) == 0
    assert [*(tmp_path / "mixed" / "eval").glob("*sdpa+flash.json")]
