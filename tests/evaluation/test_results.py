"""Results: the numbers of each kind of evaluation, and the report that reads them."""

import itertools
import math
from typing import Any

from longctx.config.eval_config import KINDS, EvalConfig
from longctx.evaluation import passkey, ruler
from longctx.evaluation.evaluate import decisive
from longctx.evaluation.passkey import Cell
from longctx.evaluation.perplexity import Score
from longctx.report import run_view
from longctx.report.compare import rulers
from longctx.runs import evaluations


def of_ruler() -> dict[str, Any]:
    answers = [
        {"task": task, "length": length, "score": score}
        for task, score in (("niah_single_2", 1.0), ("qa_1", 0.5))
        for length in (512, 2048)
        for _ in range(2)
    ]
    return {"made": ["qa_1"], **ruler.content(answers)}


def test_contents_have_the_numbers_of_each_cell():
    cells = itertools.product(KINDS, (256, 1024), (0.0, 0.5, 1.0))
    recalled = passkey.content([Cell(*cell, 4, int(4 * cell[2]), -2.0) for cell in cells])
    assert recalled["samples"] == 4
    assert recalled["kinds"]["needle"]["accuracy"] == [[0.0, 0.5, 1.0]] * 2
    assert recalled["kinds"]["passkey"]["logprob"][0] == [-0.5] * 3
    assert of_ruler()["ruler"]["scores"] == {"niah_single_2": [1.0, 1.0], "qa_1": [0.5, 0.5]}


def test_perplexity_that_overflows_is_infinite():
    assert Score("x", tokens=1, n_bytes=1, nats=1e4).perplexity == math.inf
    assert math.isnan(Score("x", tokens=1, n_bytes=1, nats=math.nan).perplexity)


def test_device_and_batch_size_decide_nothing():
    assert decisive(EvalConfig(device="cpu", batch_size=3)) == decisive(EvalConfig())
    assert decisive(EvalConfig(documents=1)) != decisive(EvalConfig())


def test_compare_shows_the_scores_of_ruler(tmp_path):
    evaluations.write(of_ruler(), tmp_path / "eval" / "ruler-x.json")
    (tmp_path / "config.yaml").write_text("seq_len: 512\n")
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "tokens_seen": 64, "elapsed_s": 1.0}\n')
    table = rulers([run_view.read(tmp_path, 100)])
    assert table.headings[-2:] == ["512", "2,048"]
    assert [row[2:] for row in table.rows] == [
        ["niah_single_2", "100.0", "100.0"],
        ["qa_1 (own text)", "50.0", "50.0"],
        ["mean", "75.0", "75.0"],
    ]
