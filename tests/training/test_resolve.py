"""What is decided about a run, on machines of which only the description exists."""

from dataclasses import replace
from pathlib import Path

import pytest

from longctx import cli
from longctx.config.request import Request
from longctx.planner import fitting, hardware
from longctx.planner.hardware import GIB, Machine
from longctx.planner.workload import Workload, workload_of
from longctx.runs import run_folder
from longctx.training import resolve
from longctx.training.child import DryRun

H200 = Machine(1, hardware.chip("NVIDIA H200", 139.8 * GIB), True, 128 * GIB)
CPU = Machine(0, None, False, 16 * GIB)


def decided(config: object, gpu: hardware.Chip) -> Workload:
    """The step of `config` with memory and micro-batches decided as `resolve` does it."""
    work = workload_of(config, "cuda", config.seq_len)  # type: ignore[arg-type, attr-defined]
    merge = config.batch_size is None and config.accumulate is None  # type: ignore[attr-defined]
    if merge or config.memory.policy == "auto":  # type: ignore[attr-defined]
        work = fitting.decide(work, gpu, 128 * GIB, merge)
    return work


def test_a_resumed_run_keeps_its_micro_batches_on_another_gpu(tmp_path: Path) -> None:
    request = cli.compose("train", ["model=124m", "model.vocab_size=50304"]).config
    begun = decided(request, hardware.chip("NVIDIA H200", 139.8 * GIB))
    assert (begun.batch_size, begun.accumulate, begun.memory.policy) == (16, 1, "fast")
    run_folder.write_config(tmp_path, resolve.scheduled(request, begun).settings())
    again = cli.from_file("train", tmp_path / "config.yaml", ["max_steps=900"]).config
    resumed = decided(again, hardware.chip("NVIDIA L4", 22 * GIB))
    assert (resumed.batch_size, resumed.accumulate, resumed.memory) == (16, 1, begun.memory)
    for overrides in (["batch_size=2"], ["accumulate=2"]):
        config = cli.compose("train", ["model=124m", *overrides]).config
        requested = workload_of(config, "cuda", config.seq_len)
        work = decided(config, hardware.chip("NVIDIA H200", 139.8 * GIB))
        assert (work.batch_size, work.accumulate) == (requested.batch_size, requested.accumulate)


def test_longest_rows_are_taken_as_they_were_probed(monkeypatch: pytest.MonkeyPatch) -> None:
    config = replace(cli.compose("train", ["model=1b", "seq_len=max"]).config, batch_size=1)
    monkeypatch.setattr(
        "longctx.training.longest.dry_run_in_child",
        lambda run, *_: DryRun([1.0], memory={"memory_peak_gib": 0.0}),
    )
    lines: list[str] = []
    length = resolve.longest_rows(config, config.model, 128, H200, "cuda", lines.append)
    assert length > 100_000 and f"{length:,}" in lines[-1]
    with pytest.raises(ValueError, match="seq_len=max"):
        resolve.longest_rows(config, config.model, 128, CPU, "cpu", lines.append)


@pytest.mark.parametrize(
    ("overrides", "machine", "outcome"),
    [
        (["device=auto"], CPU, "cpu"),
        (["device=auto"], H200, "cuda"),
        (["device=cpu"], H200, "cpu"),
        (["device=cuda"], CPU, "device=cuda: torch finds no GPU"),
        (["precision=bf16"], replace(H200, bf16=False), "precision=bf16: NVIDIA H200 has no bf16"),
    ],
)
def test_device_is_what_there_is_or_a_mistake(
    overrides: list[str], machine: Machine, outcome: str
) -> None:
    config = cli.compose("train", overrides).config
    try:
        device = resolve.choose_device(config, machine)
    except ValueError as error:
        device = str(error)
    assert device.startswith(outcome)


def test_model_auto_is_the_preset_of_the_device_with_what_is_overridden() -> None:
    request = Request(*cli.compose("train", ["model=auto", "model.layers=3"]))
    for device, channels in (("cpu", 128), ("cuda", 768)):
        _, model, source = resolve.choose_model(request, device)
        assert (model.layers, model.channels) == (3, channels)
        assert source.endswith("(model=auto)")
