"""The notebooks run from the first cell to the last, on a CPU."""

import os

import pytest

from tests.processes import PYTHONPATH, ROOT

nbclient = pytest.importorskip("nbclient")
nbformat = pytest.importorskip("nbformat")


@pytest.mark.slow  # 5 and 11 seconds: a kernel each, and a run of 30 steps
@pytest.mark.no_gpu
@pytest.mark.parametrize("path", sorted((ROOT / "notebooks").glob("*.ipynb")), ids=lambda p: p.stem)
def test_a_notebook_runs(path, tmp_path):
    notebook = nbformat.read(path, as_version=4)
    resources = {"metadata": {"path": str(tmp_path)}}
    client = nbclient.NotebookClient(notebook, timeout=100, resources=resources)
    cache = str(tmp_path / "cache")
    client.execute(env=os.environ | {"PYTHONPATH": PYTHONPATH, "LONGCTX_CACHE": cache})
