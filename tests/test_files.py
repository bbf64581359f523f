"""Files are replaced whole, and a failure leaves what was there; nothing in a table is cut."""

import errno
import io
import os
from pathlib import Path
from unittest.mock import Mock

import pytest

from longctx import files, tables, untrusted
from longctx.data import Tokenizer
from longctx.generation import say
from longctx.runs import checkpoints


def test_a_file_is_replaced_whole(tmp_path):
    path, usual = tmp_path / "a.json", tmp_path / "usual"
    usual.write_text("")
    path.write_text("old")
    with files.atomic(path) as partial:
        partial.write_text("new")
        assert (partial.parent.parent, partial.name) == (tmp_path, "a.json")
        assert path.read_text() == "old"
    files.write_text(tmp_path / "ü", "→")
    assert path.read_text() == "new" and (tmp_path / "ü").read_bytes() == "→".encode()
    assert path.stat().st_mode == usual.stat().st_mode
    assert {p.name for p in tmp_path.iterdir()} == {"a.json", "usual", "ü"}


def fail(path: Path, failure: BaseException) -> None:
    with files.atomic(path) as partial:
        partial.write_text("ne")
        raise failure


def test_a_failure_leaves_the_old_file_and_no_part(tmp_path):
    path = tmp_path / "a.json"
    path.write_text("old")
    for failure in (OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()):
        with pytest.raises(type(failure)):
            fail(path, failure)
    with pytest.raises(OSError, match=r"No space left on device: '.*a\.json'"):
        fail(path, OSError(errno.ENOSPC, "No space left on device"))
    with pytest.raises(OSError, match=r"^said already$"):
        fail(path, OSError("said already"))
    with pytest.raises(FileNotFoundError):
        files.write_text(tmp_path / "nowhere" / "a.json", "x")
    assert path.read_text() == "old" and [p.name for p in tmp_path.iterdir()] == ["a.json"]


def test_parts_of_killed_processes_go_after_a_day(tmp_path):
    old, new, other = (tmp_path / f".out.{end}" for end in ("a.partial", "b.partial", "a"))
    for path in (old, new, other):
        path.mkdir()
    for path in (old, other):
        os.utime(path, (0, 0))
    with files.atomic(tmp_path / "out") as partial:
        partial.mkdir()
    assert {p.name for p in tmp_path.iterdir()} == {"out", ".out.b.partial", ".out.a"}


def test_folders_and_links_are_replaced_too(tmp_path):
    with files.atomic(tmp_path / "out") as partial:
        partial.mkdir()
        (partial / "x").write_text("whole")
    for name in ("one", "two"):
        with files.atomic(tmp_path / "last") as partial:
            partial.symlink_to(name)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["x"]
    assert os.readlink(tmp_path / "last") == "two"
    assert {p.name for p in tmp_path.iterdir()} == {"out", "last"}


def test_leftovers_of_killed_processes_go(tmp_path):
    names = ("config.yaml.a1.partial", "step-00000002.ckpt.partial", "step-00000002.ckpt.removed")
    hidden = tuple(f".{name}" for name in names)
    stays = (".git", ".config.yaml.swp", "a.77.yaml", "step-00000001.ckpt", ".env.local")
    for name in (*hidden, *stays):
        (tmp_path / name).touch()
    (tmp_path / ".step-00000003.ckpt.partial").mkdir()
    (tmp_path / ".step-00000003.ckpt.partial" / "shard").touch()
    files.remove_partial(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == set(stays)


def test_a_full_disk_is_known_behind_other_errors():
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    outer = RuntimeError("a writer failed")
    outer.__context__ = full
    last = OSError("the checkpoint could not be written")
    last.__cause__ = outer
    assert files.is_full(full) and files.is_full(last)
    assert files.is_full(OSError("on rank 1: No space left on device (os error 28)"))
    assert not files.is_full(OSError(errno.EACCES, "Permission denied"))
    codes = [files.exit_code(error) for error in (full, OSError("x"), ValueError(), RuntimeError())]
    assert codes == [files.FULL_DISK, 2, 2, 1]


@pytest.mark.parametrize(
    ("name", "limit", "read"),
    [
        ("a.yaml", 1, untrusted.load_yaml),
        ("config.json", 16, untrusted.read_settings),
        ("chat_template.jinja", 16, untrusted.read_text),
        ("tokenizer.json", 40, Tokenizer.load),
        ("checkpoint.json", 128, lambda path: checkpoints.read(path.parent)),
    ],
)
def test_a_file_beyond_its_limit_is_refused(name, limit, read, tmp_path):
    """The limits are those of SECURITY.md; the file is a hole, since nothing reads it."""
    path = tmp_path / name
    path.touch()
    os.truncate(path, (limit << 20) + 1)
    with pytest.raises(ValueError, match=rf"{name}: .* at most {limit << 20:,}"):
        read(path)


def test_what_is_no_regular_file_is_refused_and_closed(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    before = os.listdir("/dev/fd")
    for path in (tmp_path, tmp_path / "fifo"):
        with pytest.raises(ValueError, match="not a regular file; take it out"):
            untrusted.open_file(path)
    assert len(os.listdir("/dev/fd")) == len(before)


def test_a_folder_is_probed_and_left_as_it_was(tmp_path, monkeypatch):
    files.check_writable(tmp_path)
    assert not any(tmp_path.iterdir())
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    monkeypatch.setattr(os, "mkdir", Mock(side_effect=full))
    with pytest.raises(OSError, match="no file can be made there: No space left") as raised:
        files.check_writable(tmp_path)
    assert files.exit_code(raised.value) == files.FULL_DISK


def test_a_line_of_chat_drives_no_terminal(capsys):
    say("error: the chat template of a\x1b[31m does not take it (\x9b2J)")
    assert not {"\x1b", "\x9b"} & set(capsys.readouterr().err)


# Tables on the terminal

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
