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


def shown(view: Table, width: int, terminal: bool = True) -> list[str]:
    file = io.StringIO()
    settings = {"force_terminal": terminal, "color_system": None, "highlight": False}
    tables.show(view, Console(width=width, file=file, **settings))  # type: ignore[arg-type]
    return file.getvalue().splitlines()


@pytest.mark.parametrize("width", [20, 240])
def test_nothing_is_cut_at_any_width(width):
    text = "\n".join(shown(table(), width))
    assert "…" not in text and text.count("what came out") == 1
    assert all(cell in text for row in [HEADINGS, *ROWS] for cell in row)


def test_piped_output_is_whole_and_plain():
    lines = shown(table(), 20, terminal=False)
    assert lines[0] == "what came out"
    assert lines[1].split("  ")[0] == "run" and lines[1].rstrip().endswith("ended")
    assert [line.split()[0] for line in lines[2:4]] == [row[0] for row in ROWS]
    assert not set("│┃─━") & set("".join(lines))


def test_brackets_are_text(capsys):
    tables.grid("t", ("document", "loss"), [{"document": "a/[b].md", "loss": 1234.5}])
    assert "a/[b].md" in (out := capsys.readouterr().out) and "1,234" in out
    table = Table("job", "text")
    table.add_row("data.path=[/a,/b]", "x[:key:] [bold]")
    tables.show(table)
    assert "data.path=[/a,/b]" in (out := capsys.readouterr().out) and "x[:key:] [bold]" in out
