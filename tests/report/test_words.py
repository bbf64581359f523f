"""The words of the command line `python -m longctx.report`."""

import json

import pytest
from longctx.report.words import main

from tests.report.run_files import make


@pytest.mark.parametrize(
    "words",
    [["--project", "p", "--dry-run"], ["--dry-run", "--project=p"], ["project=p", "dry_run=true"]],
)
def test_options_of_dashboard(capsys, words):
    assert main(["dashboard", *words]) == 0
    assert json.loads(capsys.readouterr().out)["project"] == "p"


def test_mistakes_are_one_line(tmp_path, refused):
    run = make(tmp_path / "a")
    for words, part in [
        (["dashboard"], "give the project"),
        (["dashboard", "--project"], "needs a value"),
        (["dashboard", "--project", "--dry-run"], "needs a value"),
        (["dashboard", "--project", "p", "project=q"], "given twice"),
        (["dashboard", "--projekt", "p"], "not an option of dashboard"),
        (["dashboard", "project"], "not an option of dashboard"),
        (["dashboard", "--project", "p", "dry_run=maybe"], "dry_run=maybe"),
        (["compare", run, "outt=x"], "outt=x"),
        (["compare"], "no runs given"),
        (["compare", run, "--fast"], "--fast"),
        (["watch"], "watch: "),
        (["watch", tmp_path / "none"], "none: no such folder"),
        (["look", run], "look: "),
    ]:
        refused(main([str(word) for word in words]), part)


def test_what_is_compared_is_written_to_out(tmp_path):
    assert main(["compare", str(make(tmp_path / "a")), f"out={tmp_path}/x.html"]) == 0
    assert (tmp_path / "x.html").is_file()
