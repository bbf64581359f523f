"""The package stays small and readable: each figure has a limit, tightened when it gets better."""

import pytest

from tests.readability import figures, sources

LIMITS = {
    "files": 208,
    "lines": 35300,
    "files under 80 lines": 43,
    "heavy sentences": 5.8,
    "where": 4.6,
    "docstrings without a verb": 5.5,
    "try": 4.1,
    "raise": 13.2,
    "long functions without comments": 11,
}
FLOORS = {"letters of an identifier": 5.7, "comment lines": 1.3}
TEST_LINES = 27000


@pytest.fixture(scope="module")
def package() -> dict[str, float]:
    return figures(sources("longctx"))


@pytest.mark.parametrize("name", LIMITS)
def test_figure_stays_below(package: dict[str, float], name: str) -> None:
    assert package[name] <= LIMITS[name]


@pytest.mark.parametrize("name", FLOORS)
def test_figure_stays_above(package: dict[str, float], name: str) -> None:
    assert package[name] >= FLOORS[name]


def test_tests_stay_small() -> None:
    assert sum(len(source.lines) for source in sources("tests")) <= TEST_LINES
