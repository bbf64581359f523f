"""Files of evaluations: named once, replaced by the same evaluation only."""

from longctx.runs.evaluations import path_for, scores, task_scores, write


def test_a_path_is_numbered_beside_another_result(tmp_path):
    first = path_for(tmp_path, "val-a", {"seq_len": 64})
    assert first.name == "val-a.json"
    write({"asked": {"seq_len": 64}}, first)
    assert path_for(tmp_path, "val-a", {"seq_len": 64}) == first
    second = path_for(tmp_path, "val-a", {"seq_len": 32})
    assert second.name == "val-a-2.json"
    second.write_text("not ours")
    assert path_for(tmp_path, "val-a", {"seq_len": 32}).name == "val-a-3.json"


def test_task_scores_are_the_metrics_with_their_errors():
    values = {"alias": "x", "sample_len": 9, "acc,none": 0.25, "acc_stderr,none": 0.125}
    values |= {"em,strict": 1, "em_stderr,strict": "N/A", "4096,none": -1, "2048,none": 0.5}
    assert [tuple(score.values()) for score in task_scores({"arc": values})] == [
        ("arc", "acc", 0.25, 0.125),
        ("arc", "em (strict)", 1.0, None),
        ("arc", "2048", 0.5, None),
    ]


def test_every_evaluation_has_scores():
    grid = {"lengths": [64, 128], "depths": [0, 1], "accuracy": [[1.0, 1.0], [0.5, 0.0]]}
    assert scores({"kinds": {"needle": grid}}) == {"needle/64": 1.0, "needle/128": 0.25}
    assert scores({"results": {"arc": {"acc,none": 0.5, "alias": "x"}}}) == {"arc/acc": 0.5}
    assert scores({"total": {"perplexity": 7.5, "name": "all"}}) == {"perplexity": 7.5}
