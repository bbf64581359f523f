"""Trackers: `tracker=NAME`, which copies a run's rows to wandb, TensorBoard, MLflow or Trackio.

A tracker is a function that follows a run, in a process of its own, and a call of `register`. It
imports its package there and writes the numbers of each row at their step. Servers and keys come
from the environment, as its package reads them.
"""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from longctx.config.doors import TRACKERS, TrackerTraits
from longctx.runs import metrics_file, wandb_copy
from longctx.runs.metrics import SAMPLE
from longctx.runs.run_folder import flat
from longctx.runs.tracking import Commands

register = TRACKERS.register


class Rows:
    """The rows that this start of a run adds to metrics.jsonl, each as its step and its numbers.
    They end with the run, and then its exit code is known.
    """

    def __init__(self, request: dict[str, Any], commands: Commands) -> None:
        self.tail = metrics_file.Tail(Path(request["folder"]))
        self.before, self.commands = request["rows_before"], commands
        self.exit_code = 0

    def __iter__(self) -> Iterator[tuple[int, dict[str, float]]]:
        for command in self.commands:
            # Reading rows after the command sends all rows that came before the end
            for row in self.tail.rows():
                self.before -= 1
                if self.before < 0:
                    step = row.pop("step")
                    row.pop(SAMPLE, None)
                    yield step, {key: math.nan if x is None else x for key, x in row.items()}
            if "finish" in command:
                self.exit_code = command["finish"]
                return


def copy_to_tensorboard(request: dict[str, Any], commands: Commands) -> None:
    """Write the rows to event files in the run's folder."""
    from tensorboard.summary import Writer

    folder = Path(request["folder"]) / "tensorboard"
    # A resumed run computes some steps again; metrics.jsonl has each once
    shutil.rmtree(folder, ignore_errors=True)
    writer = Writer(str(folder))
    for step, numbers in Rows(request | {"rows_before": 0}, commands):
        for key, value in numbers.items():
            writer.add_scalar(key, value, step)
        writer.flush()
    writer.close()


def copy_to_mlflow(request: dict[str, Any], commands: Commands) -> None:
    """Write the rows to a run of MLflow, which a resumed run continues."""
    import mlflow

    folder = Path(request["folder"])
    file = folder / "mlflow" / wandb_copy.RUN_ID
    if file.exists():
        mlflow.start_run(run_id=file.read_text())
    else:
        mlflow.set_experiment(
            os.environ.get("MLFLOW_EXPERIMENT_NAME") or request["config"]["project"]
        )
        run = mlflow.start_run(run_name=folder.name)
        mlflow.log_params(flat(request["metadata"]))
        file.parent.mkdir(exist_ok=True)
        file.write_text(run.info.run_id)
    rows = Rows(request, commands)
    for step, numbers in rows:
        mlflow.log_metrics(numbers, step=step)
    mlflow.end_run("FAILED" if rows.exit_code else "FINISHED")


def copy_to_trackio(request: dict[str, Any], commands: Commands) -> None:
    """Write the rows to a run of Trackio, which a resumed run continues."""
    import trackio

    config, name = request["config"], Path(request["folder"]).name
    trackio.init(
        project=config["project"],
        name=name,
        group=config["group"],
        config=flat(request["metadata"]),
        resume="allow",
        embed=False,
        # metrics.jsonl has the memory of GPU and process
        auto_log_gpu=False,
        auto_log_cpu=False,
    )
    for step, numbers in Rows(request, commands):
        trackio.log(numbers, step=step)
    trackio.finish()


register(
    "wandb",
    TrackerTraits(
        wandb_copy.copy, "wandb", wandb_copy.opening, late="wandb sync {folder}/wandb/*run-*"
    ),
)
register(
    "tensorboard",
    TrackerTraits(
        copy_to_tensorboard,
        "tensorboard",
        lambda config, folder: [f"look: tensorboard --logdir {folder.parent}"],
        reads=(),
    ),
)
register(
    "mlflow",
    TrackerTraits(
        copy_to_mlflow,
        "mlflow",
        lambda config, folder: [
            f"experiment {os.environ.get('MLFLOW_EXPERIMENT_NAME') or config.project}",
            "look: mlflow ui",
        ],
        reads=("project",),
    ),
)
register(
    "trackio",
    TrackerTraits(
        copy_to_trackio,
        "trackio",
        lambda config, folder: [f"look: trackio show --project {config.project}"],
        reads=("project", "group"),
    ),
)
# metrics.jsonl alone
register("none", TrackerTraits(lambda *_: None, None, lambda *_: [], reads=()))
