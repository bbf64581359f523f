"""Trackers: `tracker=NAME`, which copies a run's records to wandb, TensorBoard, MLflow or Trackio.

A tracker is a function that follows a run, in a process of its own, and a call of `register`. It
imports its package there and writes the numbers of each record at their step. Servers and keys come
from the environment, as its package reads them.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from longctx import files
from longctx.config.doors import TRACKERS, TrackerTraits
from longctx.runs import wandb_copy
from longctx.runs.metrics import SAMPLE
from longctx.runs.run_folder import flat
from longctx.runs.tracking import Commands, follow

register = TRACKERS.register


def records(request: dict[str, Any], commands: Commands) -> Iterator[tuple[int, dict[str, float]]]:
    """Yield step and numbers of each record that this start of a run adds, until the run ends;
    then `request` has its "exit_code".
    """
    for record in islice(follow(request, commands), request["records_before"], None):
        step = record.pop("step")
        record.pop(SAMPLE, None)
        yield step, {key: math.nan if x is None else x for key, x in record.items()}


def copy_to_tensorboard(request: dict[str, Any], commands: Commands) -> None:
    """Write the records to event files in the run's folder."""
    from tensorboard.summary import Writer

    folder = Path(request["folder"]) / "tensorboard"
    # A resumed run computes some steps again; metrics.jsonl has each once
    files.remove(folder)
    writer = Writer(str(folder))
    for step, numbers in records(request | {"records_before": 0}, commands):
        for key, value in numbers.items():
            writer.add_scalar(key, value, step)
        writer.flush()
    writer.close()


def copy_to_mlflow(request: dict[str, Any], commands: Commands) -> None:
    """Write the records to a run of MLflow, which a resumed run continues."""
    import mlflow

    folder = Path(request["folder"])
    file = folder / "mlflow" / wandb_copy.RUN_ID
    if file.exists():
        mlflow.start_run(run_id=file.read_text())
    else:
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or request["config"]["project"]
        mlflow.set_experiment(name)
        run = mlflow.start_run(run_name=folder.name)
        mlflow.log_params(flat(request["metadata"]))
        file.parent.mkdir(exist_ok=True)
        file.write_text(run.info.run_id)
    for step, numbers in records(request, commands):
        mlflow.log_metrics(numbers, step=step)
    mlflow.end_run("FAILED" if request["exit_code"] else "FINISHED")


def copy_to_trackio(request: dict[str, Any], commands: Commands) -> None:
    """Write the records to a run of Trackio, which a resumed run continues."""
    import trackio

    trackio.init(
        project=request["config"]["project"],
        name=Path(request["folder"]).name,
        group=request["config"]["group"],
        config=flat(request["metadata"]),
        resume="allow",
        embed=False,
        # metrics.jsonl has the memory of GPU and process
        auto_log_gpu=False,
        auto_log_cpu=False,
    )
    for step, numbers in records(request, commands):
        trackio.log(numbers, step=step)
    trackio.finish()


def opening(text: str) -> Callable[[Any, Path], list[str]]:
    """Return the lines of `text`, with the run's {folder} and its {project}, for its start."""
    return lambda config, folder: text.format(folder=folder, project=config.project).splitlines()


late = "wandb sync {folder}/wandb/*run-*"
register("wandb", TrackerTraits(wandb_copy.copy, wandb_copy.opening, late, package="wandb"))
look = opening("look: tensorboard --logdir {folder.parent}")
register("tensorboard", TrackerTraits(copy_to_tensorboard, look, reads=(), package="tensorboard"))
look = opening("look: mlflow ui")
register("mlflow", TrackerTraits(copy_to_mlflow, look, reads=("project",), package="mlflow"))
look = opening("look: trackio show --project {project}")
register(
    "trackio", TrackerTraits(copy_to_trackio, look, reads=("project", "group"), package="trackio")
)
# metrics.jsonl alone
register("none", TrackerTraits(lambda *_: None, lambda *_: [], reads=()))
