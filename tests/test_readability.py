"""The package stays small and readable: each figure has a limit, tightened when it gets better."""

from pathlib import Path

import pytest

from tests.readability import figures, sources

LIMITS = {
    "files": 183,
    "lines": 41352,
    "files under 80 lines": 20,
    "heavy sentences": 0.6,
    "where": 0.4,
    "docstrings without a verb": 0.1,
    "try": 2.6,
    "raise": 9.8,
    "long functions without comments": 0,
}
FLOORS = {"letters of an identifier": 5.7, "comment lines": 2.5}
TEST_LINES = 23850


@pytest.fixture(scope="module")
def package() -> dict[str, float]:
    return figures(sources("longctx"))


@pytest.mark.parametrize("name", LIMITS)
def test_figure_stays_below(package, name):
    assert package[name] <= LIMITS[name]


@pytest.mark.parametrize("name", FLOORS)
def test_figure_stays_above(package, name):
    assert package[name] >= FLOORS[name]


def test_tests_stay_small():
    paths = Path(__file__).parent.rglob("*.py")
    assert sum(len(path.read_text().splitlines()) for path in paths) <= TEST_LINES
