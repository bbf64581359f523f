"""What starts the processes of a run, and environments that contradict themselves."""

from dataclasses import replace

import pytest

from longctx import cli
from longctx.config.layout_config import ContextConfig
from longctx.parallel.launch import Launched, launched, number_here, without_launcher

CONFIG = cli.compose("train", []).config
TORCHRUN = {
    **{"TORCHELASTIC_RUN_ID": "none", "MASTER_ADDR": "node1", "MASTER_PORT": "29500"},
    **{"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"},
}
SRUN = {
    **{"SLURM_JOB_ID": "123456", "SLURM_NTASKS": "4", "SLURM_NNODES": "2"},
    **{"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_NUM_NODES": "2"},
    **{"SLURM_STEP_TASKS_PER_NODE": "2(x2)", "SLURM_STEP_NODELIST": "gpu[07-08]"},
    **{"SLURM_PROCID": "2", "SLURM_LOCALID": "0", "SLURM_NODEID": "1"},
}


def test_the_processes_are_those_that_a_launcher_has_started():
    own = launched(replace(CONFIG, devices=2), {})
    assert (own.by, own.ranks, own.local_ranks, own.rank) == ("train.py", 2, 2, 0)
    expected = Launched("torchrun", 4, 2, 3, 1, "node1", 29500)
    assert launched(CONFIG, TORCHRUN) == expected
    assert launched(replace(CONFIG, devices=4), TORCHRUN) == expected
    assert launched(CONFIG, SRUN) == Launched("srun", 4, 2, 2, 0, "gpu07", 18456)
    several = TORCHRUN | SRUN  # torchrun inside srun
    assert launched(CONFIG, several).by == "torchrun"
    assert number_here(TORCHRUN) == 3 and number_here(SRUN) == 2 and number_here({}) == 0


@pytest.mark.parametrize("alone", [{"RANK": "7"}, {"SLURM_PROCID": "7"}, TORCHRUN | {"RANK": "7"}])
def test_number_without_others_silences_nobody(alone):
    assert number_here(alone) == 0


def test_of_tasks_that_are_refused_one_speaks():
    uneven = SRUN | {"SLURM_STEP_NUM_TASKS": "3", "SLURM_STEP_TASKS_PER_NODE": "2,1"}
    assert [number_here(uneven | {"SLURM_PROCID": x}) for x in "012"] == [0, 1, 2]


def test_one_task_of_srun_starts_the_others_itself():
    shell = SRUN | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_NUM_NODES": "1", "SLURM_PROCID": "0"}
    assert launched(replace(CONFIG, devices=4), shell).by == "train.py"


def test_a_child_that_is_no_process_of_the_run_sees_no_launcher():
    assert launched(CONFIG, without_launcher(TORCHRUN | SRUN)).ranks == 1


def changed(environment: dict[str, str], **changes: str | None) -> dict[str, str]:
    """`environment` with `changes`; None takes a variable out."""
    merged = environment | changes
    return {name: value for name, value in merged.items() if value is not None}


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        (changed(TORCHRUN, WORLD_SIZE="5"), "WORLD_SIZE=5.*LOCAL_WORLD_SIZE=2"),
        (changed(TORCHRUN, MASTER_PORT=None), "MASTER_PORT: not set"),
        ({"WORLD_SIZE": "2", "RANK": "0"}, "LOCAL_RANK: not set"),
        ({"LOCAL_RANK": "0"}, "RANK: not set"),
        (changed(SRUN, SLURM_STEP_TASKS_PER_NODE="3,1"), "3,1 tasks on 2 nodes"),
        (changed(SRUN, SLURM_PROCID=None), "SLURM_PROCID: not set"),
        ({"OMPI_COMM_WORLD_SIZE": "4"}, "mpirun has started 4 processes"),
    ],
)
def test_what_contradicts_itself_is_refused(environment, message):
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        launched(CONFIG, environment)


def test_a_request_fits_what_the_launcher_has_started():
    for environment, by in ((TORCHRUN, "torchrun"), (SRUN, "srun")):
        with pytest.raises(ValueError, match=f"devices=2: {by} has started 4 processes"):
            launched(replace(CONFIG, devices=2), environment)
        with pytest.raises(ValueError, match="context=3: does not divide devices=4"):
            launched(replace(CONFIG, context=ContextConfig(degree=3)), environment)
