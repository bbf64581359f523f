"""The Python that the documentation shows runs as it stands."""

import re

import pytest

from tests.processes import ROOT

BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(page: str) -> list[str]:
    return BLOCK.findall((ROOT / "docs" / page).read_text())


@pytest.mark.parametrize("code", blocks("python.md"))
def test_a_block_of_the_docs_runs(code: str) -> None:
    exec(compile(code, "docs/python.md", "exec"), {})
