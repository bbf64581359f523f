"""Small runs for tests: one without data or folder, and what a finished one left in its folder."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import train
from longctx import files
from longctx.config.asked import workload_of
from longctx.config.train_config import TrainConfig
from longctx.data.sequences import IGNORED, padding_ids
from longctx.runs import checkpoints, metrics_file, run_folder
from longctx.runs.checkpoint_write import Saving
from longctx.training.run import Run, scheduled
from tests.written import alone, write

Overrides = Callable[..., list[str]]  # the fixture `overrides` of conftest.py
FAULTY = Path(__file__).with_name("faulty_run.py")
Trained = Callable[..., Path]  # the fixture `trained`


def sample_run(config: TrainConfig, device: str = "cpu") -> Run:
    """`config` with its nulls filled in for `device`."""
    assert isinstance(config.seq_len, int)
    return scheduled(config, workload_of(config, device, config.seq_len))


@contextmanager
def on_all_ranks(out: Path) -> Iterator[dict[str, Any]]:
    """Join the script's process group; rank 0 writes the block's dictionary to `out`, as JSON."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    results: dict[str, Any] = {}
    yield results
    if dist.get_rank() == 0:
        out.write_text(json.dumps(results, indent=1))
    dist.barrier()
    dist.destroy_process_group()


def row(*lengths: int, padding: int = 0) -> dict[str, torch.Tensor]:
    """Return a packed sequence of documents with these lengths; their last tokens score nothing."""
    ids = [torch.full((n,), i) for i, n in enumerate(lengths)]
    doc_ids = torch.cat([*ids, len(lengths) + padding_ids(padding)])
    targets = torch.arange(len(doc_ids)) + 1
    for end in torch.tensor(lengths).cumsum(0).tolist():
        targets[end - 1] = IGNORED
    if padding:
        targets[-padding:] = IGNORED
    tokens = {"tokens": torch.arange(len(doc_ids)), "targets": targets}
    return {**tokens, "doc_ids": doc_ids, "padding": torch.tensor(padding)}


def steps(folder: Path) -> list[dict[str, Any]]:
    """The rows of metrics that hold a step's loss."""
    return [row for row in metrics_file.read(folder) if "loss" in row]


def validations(folder: Path) -> list[dict[str, Any]]:
    """The rows of metrics that hold a validation's loss."""
    return [row for row in metrics_file.read(folder) if "val_loss" in row]


def losses(folder: Path) -> list[float]:
    """The logged losses of a run's steps."""
    return [row["loss"] for row in steps(folder)]


def figures(folder: Path, *more: str) -> list[list[Any]]:
    """What a resumed run must repeat: of every step these figures, and those in `more`."""
    keys = ("step", "loss", "grad_norm", "lr", "tokens_seen", "epoch", *more)
    return [[row[key] for key in keys] for row in steps(folder)]


def newest(folder: Path) -> dict[str, Any]:
    """The newest checkpoint of a run, all of it in memory."""
    checkpoint = checkpoints.read(run_folder.checkpoints(folder)[-1])
    (optimizer,) = checkpoint["optimizer_states"]
    for tensors in (checkpoint["state_dict"], *optimizer["state"].values()):
        tensors |= {name: x[:].clone() if x.ndim else x for name, x in tensors.items()}
    return checkpoint


def replace_newest(content: dict[str, Any], folder: Path) -> None:
    """Write `content`, changed from what `newest` returns, as the newest checkpoint of a run."""
    path = run_folder.checkpoints(folder)[-1]
    plain = dict(content)
    weights, (optimizer,) = plain.pop("state_dict"), plain.pop("optimizer_states")
    tensors, scalars = dict(weights), dict[str, dict[str, float]]()
    for number, values in optimizer["state"].items():
        for key, x in values.items():
            if x.ndim:
                tensors[f"optimizer.{number}.{key}"] = x
            else:
                scalars.setdefault(str(number), {})[key] = float(x)
    files.remove(path)
    plain |= {"param_groups": optimizer["param_groups"], "optimizer_scalars": scalars}
    write(Saving(path, plain, {name: alone(x) for name, x in tensors.items()}))


def write_checkpoint(folder: Path, step: int) -> Path:
    """Write a whole checkpoint of a single tensor to the folder of a run; return its path."""
    path = run_folder.checkpoint_path(folder, step)
    write(Saving(path, {"steps_done": step}, {"x": alone(torch.zeros(3))}))
    return path


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """The weights in the newest checkpoint of a run."""
    state: dict[str, torch.Tensor] = newest(folder)["state_dict"]
    return state


def check_equal_weights(one: Path, other: Path) -> None:
    """Checks that two runs ended with the same weights, bit for bit."""
    torch.testing.assert_close(weights(one), weights(other), rtol=0, atol=0)


def check_resumes_exactly(folder: Path, *words: str, dropped: int = 1) -> None:
    """Check that a run without its newest checkpoints ends again as it had, bit for bit."""
    before, rows = newest(folder), figures(folder)
    for path in run_folder.checkpoints(folder)[-dropped:]:
        files.remove(path)
    assert train.main([f"resume={folder}", *words]) == 0
    assert figures(folder) == rows
    for part in ("state_dict", "optimizer_states"):
        torch.testing.assert_close(newest(folder)[part], before[part], rtol=0, atol=0)
