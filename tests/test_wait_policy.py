"""OpenMP's threads spin briefly at barriers, unless the user has set how they wait."""

import pytest

from tests.processes import ROOT, finished


@pytest.fixture(autouse=True)
def nothing_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.delenv(name, raising=False)


def spins(code: str, **environment: str) -> str:
    """Return how long OpenMP's threads spin in a process that runs `code`, in its own words."""
    done = finished("-c", [code], ROOT, OMP_DISPLAY_ENV="verbose", **environment)
    assert done.returncode == 0, done.stderr
    _, found, rest = done.stderr.partition("GOMP_SPINCOUNT = '")
    if not found:
        pytest.skip("torch's OpenMP is not GNU's")
    return rest.partition("'")[0]


@pytest.mark.parametrize("module", ["eval", "longctx.model"])
def test_threads_of_openmp_spin_briefly(module):
    assert spins(f"import {module}, torch") == "1000"


def test_openmp_waits_as_the_user_has_set():
    assert spins("import longctx, torch", GOMP_SPINCOUNT="7") == "7"
    assert spins("import longctx, torch", OMP_WAIT_POLICY="ACTIVE") not in ("1000", "7")
