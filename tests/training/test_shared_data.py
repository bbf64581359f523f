"""All ranks and all stages of a run train on the same documents, though each rank opens its own."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest

import train
from longctx.runs import run_folder
from longctx.training import life_cycle
from tests.processes import finished
from tests.training.sample_run import Overrides, steps

SCRIPT = Path(__file__).with_name("growing_run.py")


@pytest.fixture
def growing(corpus: Path, tmp_path: Path) -> Path:
    """A copy of the corpus that a test may change."""
    return Path(shutil.copytree(corpus, tmp_path / "growing"))


@pytest.mark.parametrize(
    "layout",
    [{"context": 2}, pytest.param({"strategy": "fsdp"}, marks=pytest.mark.slow)],
    ids=["context", "fsdp"],
)
@pytest.mark.parametrize("new", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_documents_must_be_equal_on_all_ranks(
    layout: dict[str, Any], new: bool, overrides: Overrides, growing: Path, tmp_path: Path
) -> None:
    keys = overrides(name="r", data__path=growing, devices=2, **layout)
    folder, before = tmp_path / "runs" / "r", ""
    if not new:
        assert train.main(overrides(name="r", data__path=growing)) == 0
        before = (folder / "metrics.jsonl").read_text()
        devices = [f"{key}={value}" for key, value in layout.items()]
        keys = [f"resume={folder}", "max_steps=8", "devices=2", *devices]
    process = finished(SCRIPT, [str(growing / "new.txt"), *keys], tmp_path)
    assert process.returncode == 2, process.stderr
    [error] = [line for line in process.stderr.splitlines() if "error" in line.lower()]
    assert error.startswith("error: data=text: ranks do not have the same documents: ")
    assert "rank 0 has 60 " in error and "rank 1 has 61 " in error
    assert "Traceback" not in process.stderr
    if new:
        assert not folder.exists()
    else:
        assert (folder / "metrics.jsonl").read_text() == before
        assert [path.name for path in run_folder.checkpoints(folder)] == ["step-00000006.ckpt"]


@pytest.mark.parametrize("mixed", [False, True])
def test_all_stages_train_on_the_same_documents(
    mixed: bool,
    overrides: Overrides,
    growing: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shape: dict[str, Any] = {"seq_len_schedule": "[[32,3]]", "data__path": growing}
    if mixed:
        shape |= {"data": "mix", "data__path": None, "data__mix__a__path": growing}
    assert train.main(overrides(name="still", **shape)) == 0
    resolve: Callable[..., Any] = life_cycle.resolve

    def resolve_before_growth(*arguments: Any) -> Any:
        run = resolve(*arguments)
        (growing / "new.txt").write_text("many words that rank 0 has not seen " * 20)
        return run

    monkeypatch.setattr(life_cycle, "resolve", resolve_before_growth)
    assert train.main(overrides(name="grown", **shape)) == 0
    still, grown = (steps(tmp_path / "runs" / name) for name in ("still", "grown"))
    assert [row["loss"] for row in grown] == [row["loss"] for row in still]
    assert [row["epoch"] for row in grown] == [row["epoch"] for row in still]


@pytest.mark.parametrize("mixed", [False, True])
def test_a_push_to_the_hub_leaves_a_run_resumable(
    mixed: bool, overrides: Overrides, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    place = "data.mix.far" if mixed else "data"
    keys = {"data": "mix" if mixed else "hub", "data.path": None, f"{place}.path": "me/texts"}
    keys |= {f"{place}.source": "hub"} if mixed else {}
    cache = {"data__cache": tmp_path / "cache"}
    assert train.main(overrides(name="r", max_steps=2, **keys, **cache)) == 0
    folder = tmp_path / "runs" / "r"
    assert run_folder.read_config(folder)[f"{place}.revision"] == began
    commits.append(pushed)
    shutil.rmtree(tmp_path / "cache")  # as on another machine
    assert train.main([f"resume={folder}", "max_steps=3"]) == 0
    assert set(streams) == {began}
    assert train.main(overrides(name="new", max_steps=1, **keys, **cache)) == 0
    assert streams[-1] == pushed
