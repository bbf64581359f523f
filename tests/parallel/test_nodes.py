"""The commands for several machines in docs/several-gpus.md, on two nodes of this machine."""

import os
import re
import shlex
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.processes import ROOT, free_ports
from tests.training.sample_run import steps
from tests.training.test_processes import SCRIPT, begin

PAGE = (ROOT / "docs" / "several-gpus.md").read_text()
BLOCKS = re.findall(r"^```sh\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
KEYS = "model=8b seq_len=262144 strategy=fsdp context=8"
# Two nodes of one task each: what the script's srun starts
SRUN = """#!/bin/bash
export SLURM_STEP_ID=0 SLURM_STEP_NUM_NODES=2 SLURM_STEP_NUM_TASKS=2
export SLURM_STEP_NODELIST=localhost,other SLURM_LOCALID=0
while [[ $1 == -* ]]; do shift; done
SLURM_PROCID=1 "$@" & SLURM_PROCID=0 "$@"
code=$?; wait; exit $code
"""


def check_trained(folder: Path) -> None:
    """Check that two ranks have trained both steps."""
    rows = steps(folder)
    assert [row["step"] for row in rows] == [1, 2]
    assert rows[0]["tokens_per_second"] == 2 * rows[0]["tokens_per_second_per_device"]


@pytest.fixture
def keys(overrides: Callable[..., list[str]]) -> str:
    """The keys of a tiny run in place of the docs'."""
    return shlex.join(overrides(name="r", max_steps=2, strategy="fsdp", context=2))


@pytest.mark.slow
def test_the_torchrun_lines_train_on_two_nodes(keys, tmp_path):
    (block,) = (block for block in BLOCKS if block.startswith("torchrun"))
    tiny = {"node0": "127.0.0.1", "29500": str(free_ports(1)[0]), KEYS: keys}
    tiny |= {"train.py": str(SCRIPT), "--nproc-per-node=8": "--nproc-per-node=1"}
    for told, own in tiny.items():
        assert told in block
        block = block.replace(told, own)
    commands = [shlex.split(line)[1:] for line in block.splitlines()]
    nodes = [begin(["-m", "torch.distributed.run", *words], tmp_path) for words in commands]
    for node in nodes:
        _, errors = node.communicate()
        assert node.returncode == 0, errors
    check_trained(tmp_path / "runs" / "r")


@pytest.mark.slow
def test_the_sbatch_script_trains_on_two_nodes(keys, tmp_path):
    (script,) = (block for block in BLOCKS if "#SBATCH" in block)
    assert KEYS in script and "name=long " in script
    script = script.replace(f"name=long {KEYS}", keys).replace("train.py", str(SCRIPT))
    srun = tmp_path / "srun"
    srun.write_text(SRUN)
    srun.chmod(0o755)
    path = f"{tmp_path}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    run_bash = "import os, sys; os.execvp('bash', ['bash', '-c', sys.argv[1]])"
    port = str(free_ports(1)[0])
    job = begin(["-c", run_bash, script], tmp_path, PATH=path, MASTER_PORT=port)
    _, errors = job.communicate()
    assert job.returncode == 0, errors
    check_trained(tmp_path / "runs" / "r")
