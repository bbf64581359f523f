"""Tables, JSON and picture: sums are there, null for what is no number, no file by halves."""

import io
import json
import math
from pathlib import Path

import pytest
from rich.console import Console

from longctx.config.eval_config import EvalConfig
from longctx.evaluation.contexts import Contexts, Gain
from longctx.evaluation.perplexity import Perplexity, Score
from longctx.evaluation.plots import draw
from longctx.evaluation.positions import Positions
from longctx.evaluation.result_tables import table, tables
from longctx.evaluation.results import decisive, perplexity_content
from longctx.runs.evaluations import write
from longctx.tables import show


def result(documents: int) -> Perplexity:
    scores = [
        Score(f"docs/[{n}].md", tokens=10 + n, n_bytes=40, nats=10.0 + 3 * n)
        for n in range(documents)
    ]
    return Perplexity(64, 32, [*scores, Score("one token")], windows=5)


def printed(result: Perplexity) -> str:
    console = Console(width=120, record=True, file=io.StringIO())
    show(table(result), output=console)
    return console.export_text()


def test_table_shows_all_of_few_documents() -> None:
    text = printed(result(5))
    assert all(f"docs/[{n}].md" in text for n in range(5))
    assert "all 6" in text
    assert f"{result(5).total.perplexity:.3f}" in text


def test_table_shows_the_longest_best_and_worst_of_many_documents() -> None:
    text = printed(result(40))
    assert "docs/[39].md" in text
    assert "docs/[0].md" in text
    assert "docs/[20].md" not in text
    assert {"longest", "best", "worst"} <= {line.strip() for line in text.splitlines()}


def test_json_has_every_document_and_null_for_what_is_no_number(tmp_path: Path) -> None:
    path = tmp_path / "eval" / "x.json"
    write({"checkpoint": "runs/a", **perplexity_content(result(4), str)}, path)
    content = json.loads(path.read_text(), parse_constant=pytest.fail)
    assert content["checkpoint"] == "runs/a"
    assert content["context"] == 64
    assert content["windows"] == 5
    assert [x["tokens"] for x in content["documents"]] == [10, 11, 12, 13, 0]
    assert content["documents"][-1]["perplexity"] is None
    assert content["total"]["perplexity"] == pytest.approx(math.exp(58 / 46))
    assert [p.name for p in path.parent.iterdir()] == ["x.json"]


def test_json_leaves_nothing_where_writing_fails(tmp_path: Path) -> None:
    with pytest.raises(TypeError):
        write({"what": object()}, tmp_path / "x.json")
    assert list(tmp_path.iterdir()) == []


def test_perplexity_that_overflows_is_infinite() -> None:
    assert Score("x", tokens=1, n_bytes=1, nats=1e4).perplexity == math.inf
    assert math.isnan(Score("x", tokens=1, n_bytes=1, nats=math.nan).perplexity)


def full() -> Perplexity:
    """A result with positions, contexts and gains."""
    scores = result(9)
    scores.positions = Positions({0: [3.0, 4.0], 1: [2.0, 4.0, 9.0]})
    scores.contexts = Contexts([512, 1024], tokens=8, documents=1, nats=[16.0, 12.0])
    scores.contexts.gains = [Gain(0, 700, 5.0, 0.25, [65, 10, 66, 67], 2)]
    return scores


def test_positions_contexts_and_gains_are_shown_and_drawn(tmp_path: Path) -> None:
    full_result = full()
    console = Console(width=150, record=True, file=io.StringIO())
    for view in tables(full_result, lambda ids: "".join(map(chr, ids))):
        console.print(view)
    text = console.export_text()
    for expected in (
        "2 – 3",
        "2.0000",
        "1,024",
        "1.5000",
        "0.5000",
        "5.00",
        "→ 0.25",
        "A⏎⟦B⟧C",
        "docs/[0].md",
    ):
        assert expected in text, expected
    written = perplexity_content(full_result, lambda ids: "".join(map(chr, ids)))
    assert written["gains"][0]["token"] == "B"
    assert written["by_context"][1]["gain"] == 0.5
    for name, content in (("full", written), ("bare", perplexity_content(result(2), str))):
        draw(content, tmp_path / f"{name}.png")
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bare.png", "full.png"]


def test_device_and_batch_size_decide_nothing() -> None:
    assert decisive(EvalConfig(device="cpu", batch_size=3)) == decisive(EvalConfig())
    assert decisive(EvalConfig(documents=1)) != decisive(EvalConfig())
