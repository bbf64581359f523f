"""Every fault that docs/reliability.md lists has the test that it names."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROWS = [
    line
    for line in (ROOT / "docs" / "reliability.md").read_text().splitlines()
    if line.startswith("| ") and not line.startswith("| fault |")
]


@pytest.mark.parametrize("row", ROWS, ids=[row.split("|")[1].strip() for row in ROWS])
def test_a_fault_has_the_test_that_shows_it(row: str) -> None:
    *_, named, end = row.split("|")
    match = re.fullmatch(r" `(tests/[\w/]+\.py)::(test_\w+)` ", named)
    assert match and not end, "the last column names a test"
    file, test = match.groups()
    assert re.search(rf"^def {test}\(", (ROOT / file).read_text(), re.MULTILINE), named
