"""What is decided about a run, on machines of which only the description exists."""

import json
import re
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

import train
from longctx import cli, planner
from longctx.cli import parse
from longctx.config.asked import divisions, workload_of
from longctx.config.train_config import TrainConfig
from longctx.parallel.devices import able_backends
from longctx.planner import fitting
from longctx.planner.peak_memory import predict
from longctx.planner.plans import check_fits
from longctx.runs import run_folder
from longctx.spec import hardware
from longctx.spec.hardware import GIB, Machine
from longctx.spec.step import Workload
from longctx.training import resolve
from longctx.training.asked_step import step_of, with_steps_of_run
from longctx.training.dry_run import MULTIPLE, OUT_OF_MEMORY, DryRun, longest_of, longest_probed
from longctx.training.model_choice import choose_model
from longctx.training.pretrained import Choice
from longctx.training.run import Run, scheduled
from tests.planner.steps import FIGURES
from tests.written import write_config

H200 = Machine(1, hardware.chip("NVIDIA H200", 139.8 * GIB), 128 * GIB)
OLD = Machine(1, replace(hardware.chip("NVIDIA H200"), bf16=False, fp8=False), 128 * GIB)
L4 = Machine(1, hardware.chip("NVIDIA L4", 22 * GIB), 64 * GIB)
CPU = Machine(0, None, 16 * GIB)


def planned(
    config: TrainConfig, machine: Machine, lines: list[str] | None = None, tokens: int = 128
) -> Workload:
    """Return the step that is planned on a machine, with a tokenizer of so many tokens."""
    say = [].append if lines is None else lines.append
    device = "cpu" if machine.gpu is None else "cuda"
    able = able_backends(config, config.model, device)
    choice = Choice(config, device, config.model, config.data, able=able)
    step = step_of(choice, tokens, (), say)
    find_longest = partial(longest_of, config, machine, say)
    return planner.plan(step, machine, say, find_longest).step


def test_micro_batches_stay_on_another_gpu(tmp_path):
    request = cli.compose("train", ["model=124m", "model.vocab_size=50304"]).config
    begun = planned(request, H200)
    assert (begun.batch_size, begun.accumulate, begun.memory.policy) == (16, 1, "fast")
    write_config(tmp_path, scheduled(request, begun).settings())
    again = parse.from_file(tmp_path / "config.yaml", {"max_steps": 900}).config
    resumed = planned(again, L4)
    assert (resumed.batch_size, resumed.accumulate, resumed.memory) == (16, 1, begun.memory)
    for overrides in (["batch_size=2"], ["accumulate=2"]):
        config = cli.compose("train", ["model=124m", *overrides]).config
        asked = workload_of(config, "cuda", config.seq_len)
        work = planned(config, H200)
        assert (work.batch_size, work.accumulate) == (asked.batch_size, asked.accumulate)


# seq_len=max against a GPU that is made up

GPU, HOST = H200.gpu, H200.host_memory


def requested(*overrides: str) -> Callable[[int], Workload]:
    config = cli.compose("train", ["model=1b", "seq_len=max", *overrides]).config
    assert config.seq_len == "max"
    return lambda length: workload_of(replace(config, batch_size=1), "cuda", length)


class Card:
    """A GPU on which a run takes `factor` times what is predicted."""

    def __init__(self, factor: float) -> None:
        self.factor, self.probed = factor, list[int]()

    def __call__(self, work: Workload) -> DryRun:
        self.probed.append(work.seq_len)
        peak = self.factor * predict(work).peak
        if peak > GPU.usable:
            return DryRun([], failed=OUT_OF_MEMORY)
        return DryRun([1.0], memory={"memory_peak_gib": peak / GIB})


@pytest.mark.parametrize("factor", [1.0, 0.97, 1.02, 0.9, 1.05, 1.1])
def test_longest_length_is_confirmed_near_the_limit(factor):
    card, lines = Card(factor), list[str]()
    request = requested("memory=balanced")
    length = longest_probed(request, card, GPU, HOST, lines.append).seq_len
    limit = fitting.longest([request], GPU.usable / factor, HOST, MULTIPLE)
    assert limit is not None and length in card.probed
    assert len(lines) == len(card.probed) <= 3
    assert 0.9 * limit.seq_len <= length <= limit.seq_len
    if 0.97 <= factor <= 1.02:  # what the plan promises
        assert length >= 0.95 * limit.seq_len


@pytest.mark.parametrize(
    ("probe", "gib", "message"),
    [
        (Card(1.0), 2, "seq_len=max: no length fits"),
        (Card(100.0), 80, "no length fits"),
        (lambda work: DryRun([], failed="no driver"), 80, "the probe of .* failed: no driver"),
    ],
)
def test_no_fitting_length_is_an_error(probe, gib, message):
    with pytest.raises(ValueError, match=message):
        longest_probed(requested(), probe, replace(GPU, memory=gib * GIB), HOST, print)


def test_longest_rows_are_taken_as_they_were_probed(monkeypatch):
    config = replace(cli.compose("train", ["model=1b", "seq_len=max"]).config, batch_size=1)
    monkeypatch.setattr("longctx.training.dry_run.dry_run_in_child", lambda *_: DryRun([1.0]))
    lines: list[str] = []
    length = planned(config, H200, lines).seq_len
    assert length > 100_000 and any(f"{length:,}" in line for line in lines)
    with pytest.raises(ValueError, match="seq_len=max"):
        choose_model(cli.compose("train", ["seq_len=max"]), "cpu")


@pytest.mark.parametrize(
    ("overrides", "machine", "outcome"),
    [
        (["device=auto"], CPU, "cpu"),
        (["device=auto"], H200, "cuda"),
        (["device=cpu"], H200, "cpu"),
        (["device=cuda"], CPU, "device=cuda: torch finds no GPU"),
        (["precision=bf16"], OLD, "precision=bf16: NVIDIA H200 has no bf16"),
        (["precision=fp8"], H200, "cuda"),
        (["precision=fp8"], OLD, "precision=fp8: NVIDIA H200 has no FP8 matrix"),
        (["precision=fp8"], CPU, "precision=fp8: a CPU has no FP8 matrix"),
    ],
)
def test_device_is_what_there_is_or_a_mistake(overrides, machine, outcome):
    config = cli.compose("train", overrides).config
    with pytest.raises(ValueError, match=outcome) if ":" in outcome else nullcontext():
        assert machine.device_for(config.device, config.precision) == outcome


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["model.ffn=100"], "precision=fp8: mlp.gate_up is 200 × 128"),
        (["bf16_layers=[0,4]"], "bf16_layers=[0, 4]: layers from 0 to 3"),
        (["bf16_layers=[0,1,2,-1]"], "bf16_layers=[0, 1, 2, -1]: leaves no layer in FP8"),
        (["bf16_layers=[0,-1]"], None),
    ],
)
def test_fp8_is_refused_for_sizes_that_do_not_fit(overrides, message):
    config = cli.compose("train", ["model=tiny", "precision=fp8", *overrides]).config
    with pytest.raises(ValueError, match=re.escape(message)) if message else nullcontext():
        config.check_model(config.model)


@pytest.mark.parametrize(("words", "gpu", "backend"), FIGURES["auto"])
def test_attention_auto_is_the_fastest_exact_one(words, gpu, backend, monkeypatch):
    request = cli.compose("train", ["attention=auto", *words.split()])
    machine = CPU if gpu is None else replace(H200, gpu=hardware.chip(gpu, 79 * GIB))
    lines: list[str] = []
    monkeypatch.setattr("longctx.training.dry_run.dry_run_in_child", lambda *_: DryRun([1.0]))
    as_typed = cli.compose("train", [f"attention={backend}"]).config.attention
    assert planned(request.config, machine, lines, tokens=32768).attention == as_typed
    assert lines[0].startswith(f"attention=auto: {backend}, ")


def test_the_word_for_attention_auto_is_written_down(overrides, tmp_path):
    assert train.main(overrides(attention="auto", max_steps=2)) == 0
    (folder,) = (tmp_path / "runs").iterdir()
    assert folder.name.startswith("tiny-sdpa-64")
    assert run_folder.read_config(folder)["attention.backend"] == "sdpa"
    assert json.loads((folder / "kernel.lock.json").read_text())["backend"] == "sdpa"
    assert train.main([f"resume={folder}", "max_steps=3"]) == 0
    assert run_folder.read_config(folder)["attention.backend"] == "sdpa"
    with pytest.raises(ValueError, match="not an option of auto"):
        cli.compose("train", ["attention=auto", "attention.options.kernel=portable"])


EIGHT = replace(H200, gpus=8, host_memory=1536 * GIB)


def decided_on_eight(runs: Path, corpus: Path, *overrides: str) -> Run:
    """The run of a command line on eight GPUs, its folder made."""
    words = ["device=cuda", "devices=8", "data=text", f"data.path={corpus}", f"runs={runs}"]
    words += ["kernel.lock=off", "model=1b", "model.vocab_size=128256", *overrides]
    return resolve.resolve(cli.compose("train", words), EIGHT, say=lambda line: None)


def test_context_auto_is_decided_once_and_written_down(tmp_path, corpus):
    words = ["context.degree=auto", "seq_len=4194304", "memory=balanced", "batch_size=1"]
    run = decided_on_eight(tmp_path, corpus, *words)
    assert (run.workload.strategy, run.workload.context) == ("fsdp", 8)
    assert run.plan is not None and "context=8" in run.plan.note
    saved = run_folder.read_config(run.folder)
    assert saved["context.degree"] == 8
    assert saved["context.method"] == run.workload.context_method
    short = decided_on_eight(tmp_path, corpus, "context.degree=auto", "seq_len=4096")
    assert run_folder.read_config(short.folder)["context.degree"] == 1


def test_longest_rows_of_several_gpus_are_predicted(tmp_path, corpus):
    lines: list[str] = []
    lengths: list[int] = []
    for overrides in (["context.degree=8"], ["strategy.name=fsdp"], ["context.degree=auto"]):
        words = ["model=1b", "seq_len=max", "devices=8", *overrides]
        config = replace(cli.compose("train", words).config, batch_size=1)
        lengths.append(planned(config, EIGHT, lines).seq_len)
        assert any(f"{lengths[-1]:,}" in line and "not tried" in line for line in lines)
    assert lengths[2] == lengths[0] > 2 * lengths[1]
    run = decided_on_eight(tmp_path, corpus, "context.degree=auto", "seq_len=max")
    assert fitting.fits(run.workload, fitting.room(H200.gpu), EIGHT.host_memory)
    small = replace(EIGHT, gpu=hardware.chip("NVIDIA H200", 2 * GIB))
    with pytest.raises(ValueError, match="seq_len=max: no length is predicted to fit"):
        planned(config, small, lines)


def test_a_resumed_run_keeps_its_degree_unless_asked(tmp_path):
    begun = cli.compose("train", ["devices=8", "context.degree=4", "batch_size=1"]).config
    work = workload_of(begun, "cpu", 4096)
    write_config(tmp_path, scheduled(begun, work).settings())

    def layouts_of(*overrides: str) -> list[tuple[int, int]]:
        given = parse.given_values(TrainConfig, ["max_steps=900", *overrides])
        config = parse.from_file(tmp_path / "config.yaml", given).config
        config.resume = str(tmp_path)
        each = with_steps_of_run(divisions(config, config.model), config, given)
        return [(one.context, one.batch_size * one.accumulate) for one in each]

    assert layouts_of() == [(4, 1)]
    assert layouts_of("devices=4") == [(4, 2)]
    assert layouts_of("devices=4", "batch_size=2") == [(4, 2)]
    with pytest.raises(ValueError, match="devices=8 batch_size=2: a step of the run has 2"):
        layouts_of("batch_size=2")
    # Two rows are for one group of devices or for two
    every = layouts_of("context.degree=auto", "context.method=auto")
    assert set(every) == {(4, 1), (8, 2)}


@pytest.mark.parametrize(
    ("overrides", "machine", "remedy"),
    [
        (["model=tiny", "seq_len=262144", "attention=naive"], CPU, "attention=flash"),
        (["model=350m", "seq_len=262144"], CPU, r"seq_len=\d+ batch_size=1 memory=\w+"),
        (["model=1b", "seq_len=16384", "memory=fast"], L4, r"memory=balanced memory\.\w+=\w+"),
        (["batch_size=1024", "memory=balanced"], L4, r"batch_size=\d+ accumulate=\d+"),
    ],
)
def test_too_much_memory_is_refused_with_a_remedy(tmp_path, corpus, overrides, machine, remedy):
    words = [*overrides, f"runs={tmp_path / 'runs'}", f"data.path={corpus}", "data=text"]
    request = cli.compose("train", words)
    with pytest.raises(ValueError, match=rf"^seq_len=.* GiB of .*; try .*{remedy}") as error:
        resolve.resolve(request, machine)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("overrides", [["model=8b"], ["model=1b", "seq_len=262144"]])
@pytest.mark.parametrize("machine", [H200, CPU], ids=["H200", "CPU"])
def test_what_may_run_is_not_refused(overrides, machine):
    config = cli.compose("train", [*overrides, "model.vocab_size=50304"]).config
    assert isinstance(config.seq_len, int)
    device = "cpu" if machine is CPU else "cuda"
    work = workload_of(config, device, config.seq_len)
    needed = predict(fitting.smallest(work)).peak / 1.2  # by a fifth too much
    if machine.gpu is None:
        check_fits(work, replace(machine, host_memory=needed))
    else:
        gpu = hardware.chip(machine.gpu.name, needed)
        check_fits(work, replace(machine, gpu=gpu, host_memory=2048 * GIB))


@pytest.mark.usefixtures("finished_run")  # which has tokenized the documents, and printed it
def test_a_run_that_cannot_begin_leaves_no_folder(overrides, tmp_path, monkeypatch, refused):
    def refuse(path: Path, text: str) -> None:
        raise OSError(f"{path}: no room")

    monkeypatch.setattr(run_folder, "files", SimpleNamespace(write_text=refuse))
    refused(train.main(overrides()), "no room")
    assert not list((tmp_path / "runs").iterdir())


def test_a_schedule_is_refused_before_data_is_read(overrides, monkeypatch, refused):
    monkeypatch.setattr(resolve, "load", None)
    wrong = {"max_steps": None, "max_tokens": 2560, "warmup_steps": 99}
    refused(train.main(overrides(**wrong)), "warmup_steps=99: max_steps=10 would end below lr")


def test_a_dry_run_is_printed_and_leaves_no_folder(overrides, tmp_path, capsys):
    assert train.main(overrides(dry_run="true", name="planned")) == 0
    printed = capsys.readouterr().out
    assert f"{tmp_path / 'runs' / 'planned'}\n" in printed and "predicted  at least " in printed
    assert not (tmp_path / "runs").exists() and "a CPU moves nothing" not in printed
    (tmp_path / "runs" / "planned").mkdir(parents=True)
    assert train.main(overrides(dry_run="true", name="planned", memory__offload=0.5)) == 0
    assert "memory.offload=0.5, a CPU moves nothing to host memory\n" in capsys.readouterr().out


def test_a_dry_run_of_a_resume_changes_nothing(two_steps, capsys):
    folder = two_steps
    files = [path for path in folder.rglob("*") if path.is_file()]
    before = [path.stat().st_mtime_ns for path in files]
    capsys.readouterr()
    assert cli.main(["resume", str(folder), "max_steps=9", "dry_run=true"]) == 0
    assert "continued after step 2" in capsys.readouterr().out
    assert before == [path.stat().st_mtime_ns for path in files]
