"""The kernels between the matmuls compile for GPUs that are not there, all in registers."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
@pytest.mark.parametrize("capability", [90, 80])
def test_nothing_spills(capability: int) -> None:
    script = Path(__file__).with_name("compile_elementwise.py")
    env = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    folders = [str(script.parents[2]), env.get("PYTHONPATH")]
    env["PYTHONPATH"] = os.pathsep.join(filter(None, folders))
    command = [sys.executable, script, str(capability)]
    compiler = subprocess.run(command, capture_output=True, text=True, env=env)
    assert compiler.returncode == 0, compiler.stderr[-2000:]
    spilled = json.loads(compiler.stdout)
    assert spilled
    assert set(spilled.values()) == {0}
