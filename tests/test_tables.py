"""Tables on the terminal: nothing is cut, at any width; piped output is whole and plain."""

import io

import pytest
from rich.console import Console
from rich.table import Table

from longctx import tables

HEADINGS = ["run", "learning rate", "tokens per second", "word perplexity (val)", "ended"]
ROWS = [
    ["tiny-flash-4k-lr0.001-001", "0.001", "123,456", "8,123.25", "stopped at step 12 of 20"],
    ["tiny-naive-4k-lr0.003-002", "0.003", "98,765", "4,321.5", "finished"],
]


def table() -> Table:
    view = Table(title="what came out", title_justify="left")
    for heading in HEADINGS:
        view.add_column(heading)
    for row in ROWS:
        view.add_row(*row)
    return view


def shown(view: Table, width: int, terminal: bool = True, keys: int = 1) -> list[str]:
    file = io.StringIO()
    settings = {"force_terminal": terminal, "color_system": None, "highlight": False}
    tables.show(view, keys, Console(width=width, file=file, **settings))  # type: ignore[arg-type]
    return file.getvalue().splitlines()


@pytest.mark.parametrize("width", [20, 31, 47, 61, 80, 97, 133, 240])
def test_nothing_is_cut_at_any_width(width):
    lines = shown(table(), width)
    text = "\n".join(lines)
    assert "…" not in text and max(map(len, lines)) <= width
    if width >= 61:  # below, a name and a cell are wider than the terminal, and folded
        assert all(cell in text for row in ROWS for cell in row)
        assert all(word in text for heading in HEADINGS for word in heading.split())
    assert text.count("what came out") == 1


def test_columns_that_do_not_fit_follow_below():
    text = "\n".join(shown(table(), 80))
    assert text.count(ROWS[0][0]) == 2
    assert "\n".join(shown(table(), 240)).count(ROWS[0][0]) == 1
    assert "\n".join(shown(table(), 70, keys=2)).count("0.003 ") > 1


def test_piped_output_is_whole_and_plain():
    lines = shown(table(), 20, terminal=False)
    assert lines[0] == "what came out"
    assert lines[1].split("  ")[0] == "run" and lines[1].rstrip().endswith("ended")
    assert [line.split()[0] for line in lines[2:4]] == [row[0] for row in ROWS]
    assert not set("│┃─━") & set("".join(lines))


def test_a_text_may_be_folded_and_loses_nothing():
    view, words = Table("run", "loss"), [f"word{number}" for number in range(40)]
    view.add_column("in its text", overflow="fold")
    view.add_row(ROWS[0][0], "1.25", " ".join(words))
    lines = shown(view, 80)
    assert max(map(len, lines)) <= 80
    assert all(word in "\n".join(lines) for word in words)


def test_brackets_are_text(capsys):
    tables.grid("t", ("document", "loss"), [{"document": "a/[b].md", "loss": 1234.5}])
    assert "a/[b].md" in (out := capsys.readouterr().out) and "1,234" in out
    table = Table("job", "text")
    table.add_row("data.path=[/a,/b]", "x[:key:] [bold]")
    tables.show(table)
    assert "data.path=[/a,/b]" in (out := capsys.readouterr().out) and "x[:key:] [bold]" in out
