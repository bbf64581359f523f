"""The package stays small and readable: each figure has a limit, tightened when it gets better."""

import pytest

from tests.readability import figures, sources

LIMITS = {
    "files": 230,
    "lines": 36700,
    "files under 80 lines": 62,
    "heavy sentences": 9.9,
    "where": 8.7,
    "docstrings without a verb": 12.4,
    "try": 4.9,
    "raise": 16.2,
    "long functions without comments": 33,
}
FLOORS = {"letters of an identifier": 5.7, "comment lines": 1.0}
TEST_LINES = 28000


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
