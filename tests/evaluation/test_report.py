"""Tables and JSON: the sums are there, nothing that is no number, no file by halves."""

import io
import json
import math
from pathlib import Path

import pytest
from rich.console import Console

from longctx.evaluation.perplexity import Perplexity, Score
from longctx.evaluation.report import table, write


def result(documents: int) -> Perplexity:
    scores = [Score(f"docs/[{n}].md", tokens=10 + n, n_bytes=40, nats=10.0 + 3 * n) for n in range(documents)]
    return Perplexity(64, 32, [*scores, Score("one token")], windows=5)


def printed(result: Perplexity) -> str:
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(table(result))
    return console.export_text()


def test_few_documents_are_all_shown() -> None:
    text = printed(result(5))
    assert all(f"docs/[{n}].md" in text for n in range(5))
    assert "all 6" in text
    assert f"{result(5).total.perplexity:.3f}" in text


def test_of_many_documents_the_longest_best_and_worst_are_shown() -> None:
    text = printed(result(40))
    assert "docs/[39].md" in text
    assert "docs/[0].md" in text
    assert "docs/[20].md" not in text


def test_json_has_every_document_and_null_for_what_is_no_number(tmp_path: Path) -> None:
    path = tmp_path / "eval" / "x.json"
    write(result(4), {"checkpoint": "runs/a"}, path)
    content = json.loads(path.read_text(), parse_constant=pytest.fail)
    assert content["checkpoint"] == "runs/a"
    assert content["context"] == 64
    assert content["windows"] == 5
    assert [x["tokens"] for x in content["documents"]] == [10, 11, 12, 13, 0]
    assert content["documents"][-1]["perplexity"] is None
    assert content["total"]["perplexity"] == pytest.approx(math.exp(58 / 46))
    assert [p.name for p in path.parent.iterdir()] == ["x.json"]


def test_nothing_is_left_where_writing_fails(tmp_path: Path) -> None:
    with pytest.raises(TypeError):
        write(result(1), {"what": object()}, tmp_path / "x.json")
    assert list(tmp_path.iterdir()) == []


def test_an_overflowing_perplexity_is_infinite_not_an_error() -> None:
    assert Score("x", tokens=1, n_bytes=1, nats=1e4).perplexity == math.inf
    assert math.isnan(Score("x", tokens=1, n_bytes=1, nats=math.nan).perplexity)
