"""Several devices: loss and gradients of one, the same documents, resumes on other numbers."""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
import torch

import eval as evaluate
import train
from longctx.cli import main
from longctx.config.layout_config import STRATEGIES
from longctx.parallel.mesh import Parallel
from longctx.runs import checkpoints, metrics_file, run_folder
from longctx.training import life_cycle
from longctx.training.module import StepParts
from tests.processes import ROOT, finished, run_on, train_together
from tests.training.sample_run import losses, steps

SHAPE: dict[str, Any] = {"seq_len": 63, "batch_size": 1, "max_steps": 4, "val_rows": 3}
LAYOUTS = Path(__file__).with_name("layouts.py")


def close(folder: Path, other: Path) -> None:
    """Checks that two runs logged the same losses and validations, but for rounding."""
    for row, expected in zip(metrics_file.read(folder), metrics_file.read(other), strict=True):
        same = [(x["step"], x["tokens_seen"], x.get("loss", 0.0)) for x in (row, expected)]
        assert same[0] == pytest.approx(same[1], rel=2e-6)
        figures = {key for key in expected if key.startswith("val_loss")}
        for key in figures:
            assert row[key] == pytest.approx(expected[key], rel=2e-5), key


@pytest.mark.slow
def test_two_devices_share_each_row_in_compiled_blocks(trained, overrides, tmp_path):
    """63 tokens and 3 heads cannot be shared evenly; ulysses: test_context_check.py."""
    shape = SHAPE | {"model.heads": 3, "model.kv_heads": 1, "model.head_dim": 16, "accumulate": 2}
    one = trained("one", **shape)
    shared = {"devices": 2, "context": 2, "context.method": "allgather", "compile": True}
    process = finished(ROOT / "train.py", overrides(name="two", **shape | shared), tmp_path)
    assert process.returncode == 0, process.stderr
    close(tmp_path / "runs" / "two", one)


@pytest.mark.slow
def test_a_sharded_run_resumes_on_any_devices(overrides, tmp_path, capsys):
    shape = SHAPE | {"checkpoint_every": 2, "keep_checkpoints": 5}
    runs = tmp_path / "runs"

    def begun(source: str, name: str) -> str:
        """Copy a run without its newest checkpoint; return the word that resumes the copy."""
        folder = shutil.copytree(runs / source, runs / name, symlinks=True)
        shutil.rmtree(run_folder.checkpoints(folder)[-1])
        (folder / "checkpoints" / "last.ckpt").unlink()
        return f"resume={folder}"

    assert train.main(overrides(name="one", accumulate=4, **shape)) == 0
    sharded = overrides(name="sharded", accumulate=2, devices=2, strategy="fsdp", **shape)
    train_together(2, [sharded, [begun("one", "on-2"), "devices=2", "strategy=fsdp"]])
    checkpoints.verify(run_folder.checkpoints(runs / "sharded")[0])
    assert train.main([begun("sharded", "on-1"), "devices=1", "strategy=auto"]) == 0
    train_together(4, [[begun("sharded", "on-4"), "devices=4", "context=2"]])
    for name in ("sharded", "on-1", "on-2", "on-4"):
        close(runs / name, runs / "one")

    capsys.readouterr()
    source = str(runs / "sharded")
    assert evaluate.main([f"checkpoint={source}", "device=cpu", "documents=2"]) == 0
    assert main(["export", source, str(tmp_path / "out")]) == 0
    assert (tmp_path / "out" / "config.json").is_file()


SLOW = [(1, 8, 1088), (2, 20, 2108), (4, 8, 3164)]


@pytest.mark.parametrize(
    ("ranks", "cases", "seed"),
    [(2, 3, 0), *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)],
)
def test_loss_and_gradients_are_those_of_one_device(ranks, cases, seed, tmp_path):
    """However sequences and weights are spread; every fourth case multiplies in FP8."""
    run_on(ranks, LAYOUTS, cases, seed, out := tmp_path / "out.json")
    results: dict[str, dict[str, Any]] = json.loads(out.read_text())
    assert len(results) == cases
    for result in results.values():
        for name, difference in result["differences"].items():
            assert difference < result["limit"], (name, result)


def test_a_weight_without_gradient_is_named_under_ddp():
    model, parallel = torch.nn.Linear(2, 3), SimpleNamespace(strategy=STRATEGIES["ddp"])
    model.weight.grad = torch.ones(3, 2)
    module, optimizer = SimpleNamespace(model=model), torch.optim.SGD(model.parameters(), 1.0)
    with pytest.raises(ValueError, match="strategy=ddp: bias has no gradient"):
        StepParts(module, module, optimizer, parallel).clip()


def test_documents_must_be_equal_on_all_ranks(two_steps, monkeypatch, refused):
    """Rank 1 answers with a fingerprint of its own."""
    gather = Parallel.all_gather_objects

    def gathered(self: Parallel, mine: Any) -> list[Any]:
        return [mine, f"{mine}0"] if isinstance(mine, str) else gather(self, mine)

    monkeypatch.setattr(Parallel, "all_gather_objects", gathered)
    rows = metrics_file.read(two_steps)
    refused(train.main([f"resume={two_steps}", "max_steps=3"]), "data=text: ranks 0 and 1 ")
    assert metrics_file.read(two_steps) == rows


def test_all_stages_train_on_the_same_documents(trained, corpus, tmp_path, monkeypatch):
    growing = shutil.copytree(corpus, tmp_path / "growing")
    keys = {"seq_len_schedule": "[[32,3]]", "data": "mix", "data.path": None}
    keys |= {"data.mix.a.path": growing}
    still = trained("still", **keys)
    resolve: Callable[..., Any] = life_cycle.resolve

    def resolve_before_growth(*arguments: Any) -> Any:
        run = resolve(*arguments)
        (growing / "new.txt").write_text("many words that rank 0 has not seen " * 20)
        return run

    monkeypatch.setattr(life_cycle, "resolve", resolve_before_growth)
    grown = trained("grown", **keys)
    assert losses(grown) == losses(still)
    assert [row["epoch"] for row in steps(grown)] == [row["epoch"] for row in steps(still)]


def test_a_push_to_the_hub_leaves_a_run_resumable(trained, tmp_path, monkeypatch):
    """Streams stand in for the two commits that the data set has, one after the other."""
    datasets = pytest.importorskip("datasets", reason="datasets is not installed")
    began, pushed = "a" * 40, "b" * 40
    commits = [began]
    streams: list[str] = []

    def stream(*_: Any, revision: str, **__: Any) -> Iterator[dict[str, str]]:
        streams.append(revision)
        return iter([{"text": f"{revision[0]} {n * n} of many words " * 9} for n in range(30)])

    def newest(*_: Any, **__: Any) -> SimpleNamespace:
        return SimpleNamespace(sha=commits[-1])

    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", newest)
    monkeypatch.setattr(datasets, "load_dataset", stream)
    keys = {"data": "mix", "data.path": None, "data.cache": tmp_path / "cache"}
    keys |= {"data.mix.far.path": "me/texts", "data.mix.far.source": "hub"}
    folder = trained(max_steps=2, **keys)
    assert run_folder.read_config(folder)["data.mix.far.revision"] == began
    commits.append(pushed)
    shutil.rmtree(tmp_path / "cache")  # as on another machine
    assert train.main([f"resume={folder}", "max_steps=3"]) == 0
    assert set(streams) == {began}
    trained("new", max_steps=1, **keys)
    assert streams[-1] == pushed
