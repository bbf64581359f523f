"""Tables on the terminal: nothing is cut, at any width; piped output is whole and plain."""

import io

import pytest

from longctx import tables

HEADINGS = ["run", "learning rate", "tokens per second", "word perplexity (val)", "ended"]
ROWS = [
    ["tiny-flash-4k-lr0.001-001", "0.001", "123,456", "8,123.25", "stopped at step 12 of 20"],
    ["tiny-naive-4k-lr0.003-002", "0.003", "98,765", "4,321.5", "finished"],
]


@pytest.mark.parametrize(("width", "is_terminal"), [(20, True), (240, True), (20, False)])
def test_nothing_is_cut_at_any_width(width, is_terminal, monkeypatch):
    file = io.StringIO()
    settings = {"force_terminal": is_terminal, "color_system": None, "highlight": False}
    console = tables._Console(width=width, file=file, **settings)
    monkeypatch.setattr(tables, "console", lambda: console)
    tables.show("what came out", HEADINGS, ROWS)
    lines = file.getvalue().splitlines()
    assert lines[0] == "what came out" and "…" not in file.getvalue()
    assert all(cell in file.getvalue() for row in [HEADINGS, *ROWS] for cell in row)
    assert lines[1].startswith("run  ") and lines[1].rstrip().endswith("ended")
    assert [line.split()[0] for line in lines[2:4]] == [row[0] for row in ROWS]


def test_brackets_are_text(capsys):
    tables.grid("[b]", ("document", "loss"), [{"document": "a/[b].md", "loss": 1234.5}])
    out = capsys.readouterr().out
    assert "[b]\n" in out and "a/[b].md" in out and "1,234" in out
    tables.show("", ["job", "text"], [["path=[/a,/b]", "x[:key:] [bold]"]])
    assert "path=[/a,/b]  x[:key:] [bold]" in capsys.readouterr().out


def test_blanks_stay_blanks(capsys):
    tables.show("", ["note"], [["12\N{NO-BREAK SPACE}GiB \x9b2J"]])
    assert "12 GiB" in (out := capsys.readouterr().out) and "\x9b" not in out
