"""What a run and a sweep print in the end."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from longctx.config.data_config import DataConfig
from longctx.config.train_config import TrainConfig
from longctx.model import GPTConfig
from longctx.parallel.mesh import Parallel
from longctx.spec.hardware import Machine
from longctx.system import typed_command
from longctx.training.run_log import RunLog, brief, closing_lines, opening, warnings
from longctx.training.sweep import Job, sweep_table
from tests.training.sample_run import sample_run


def row_of(step: int, loss: float, ms: float, speed: float, seconds: float) -> dict[str, Any]:
    row: dict[str, Any] = {"step": step, "tokens_seen": 90 * step, "loss": loss, "ms_per_step": ms}
    row |= {"tokens_per_second": speed, "seconds": seconds}
    return row | {"memory_peak_gib": step / 2, "mfu": 0.4}


ROWS: list[dict[str, Any]] = [
    {"step": 0, "tokens_seen": 0, "val_loss": 9.0, "val_perplexity": 8000.0},
    row_of(1, 9.0, 9000, 1, 9),
    row_of(5, 7.0, 900, 100, 13),
    row_of(9, 6.0, 300, 300, 17),
    {"step": 9, "tokens_seen": 810, "val_loss": 5.0, "val_perplexity": 150.0},
]
COUNTS = {"val_documents": 0, "train_efficiency": 0.9, "sources_without_end": 0}
COUNTS |= {"without_target": ""}


def run(folder: Path) -> Path:
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "checkpoints" / "step-00000009.ckpt").touch()
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return folder


def test_the_closing_table_says_what_to_type_next(tmp_path):
    folder = run(tmp_path / "r[b]")
    ended = replace(sample_run(TrainConfig()), folder=folder)
    text = "\n".join(closing_lines(ended, {"flash": "triton-portable"}, " max_steps=18", steps=9))
    parts = ["8,000.00 → 150.00", "9.0000 → 6.0000", "40.0%", "4.50 GiB", "flash: triton-portable"]
    commands = f"resume '{folder}' max_steps=18", f"eval '{folder}'"
    parts += [f"{typed_command()} {command}" for command in commands]
    assert [part for part in parts if part not in text] == []
    config = TrainConfig(data=DataConfig(chat=True), plugins=["my.py"])
    stopped = "\n".join(closing_lines(replace(ended, config=config), {}, more="", steps=12))
    assert ["steps", "12"] in [line.split() for line in stopped.splitlines()]
    assert "max_steps" not in stopped and "810" not in stopped  # tokens after step 9
    assert f"chat '{folder}'" in stopped
    assert stopped.count(f"'{folder}' 'plugins=[my.py]'") == 3


def test_a_sweep_shows_the_overrides_that_differ(tmp_path):
    good = Job(["seed=1", "attention=flash"], 0, run(tmp_path / "a"))
    killed = Job(["seed=1", "attention=naive"], -9, None)
    _, rows = sweep_table([good, killed])
    # The folder is below the overrides, or the table is too wide for a terminal
    assert rows[0][0] == f"attention=flash\n{tmp_path / 'a'}"
    assert all(part in str(rows) for part in ("attention=naive", "out of memory?", "150.0"))


def test_patience_that_cannot_act_is_a_warning():
    for patience, warns in ((None, False), (3, False), (4, True)):
        config = TrainConfig(max_steps=50, val_every=10, patience=patience)
        lines = warnings(sample_run(config), COUNTS)
        assert [f"patience={patience}" in line for line in lines] == [True] * warns


def test_the_documents_are_warned_about(tmp_path):
    for name in ("a.txt", "b.pdf", "c.pdf.gz", "d", "e.1", "e.2", "e.3", "e.4"):
        (tmp_path / name).write_text("x")
    config = TrainConfig()
    config.data.source, config.data.mix = "mix", {"a": {"path": str(tmp_path)}}
    counts = {"train_efficiency": 0.25, "sources_without_end": 1, "without_target": "3 of 4"}
    unread, untaught, endless, padding = warnings(sample_run(config), COUNTS | counts)
    assert untaught == "3 of 4"
    assert "2 .pdf, 1 without an ending, 1 .1, 1 .2, 1 .3, others; " in unread
    assert unread.endswith("data.path='FOLDER/**/*.rst'")
    assert "answers will not end" in endless
    assert "75%" in padding


def test_what_is_left_out_is_among_the_first_lines():
    counts = COUNTS | {"documents": 9, "documents_dropped": 1, "tokens": 99, "val_tokens": 0}
    counts |= {"conversations_shortened": 2, "prompts_cut": 3, "seq_len": 64}
    counts |= {"left_out": "1 without text", "far_back": "50.0% of tokens"}
    data: Any = SimpleNamespace(summary=lambda: counts, train=[0])
    run = replace(sample_run(TrainConfig(model=GPTConfig(vocab_size=9))), data=data)
    lines = "\n".join(opening(run, Machine(0, None, 0.0)))
    parts = ("(1 without text left out)", "50.0%", "data.turns=all", "3 prompts", "no document is")
    for part in parts:
        assert part in lines


@pytest.fixture
def log(tmp_path: Path) -> Callable[[int, int], RunLog]:
    """Return the log of a run of so many steps, after so many of them."""

    def log_of(max_steps: int, steps_done: int) -> RunLog:
        run = sample_run(TrainConfig(max_steps=max_steps, device="cpu", tracker=[]))
        run = replace(run, folder=tmp_path, steps_done=steps_done)
        return RunLog(run, Parallel.of(run.config, "cpu"))

    return log_of


def test_a_piped_run_has_plain_lines_with_time_left(log, capsys):
    piped = log(21, 0)
    with piped.bar:
        for row in ROWS[:3]:  # 9 s a step, then 0.9
            piped.record(row)
    printed = capsys.readouterr().out
    assert "\x1b" not in printed and "\r" not in printed
    lines = printed.splitlines()
    assert len(lines) == 3 and brief(ROWS[2]) in lines[2]
    assert "left" not in lines[0]
    assert lines[1].endswith("3 min 0 s left")
    assert lines[2].endswith("14.4 s left")


def test_a_narrow_terminal_cuts_nothing_of_the_bar(log, monkeypatch, capsys):
    for name, value in {"TTY_COMPATIBLE": "1", "TERM": "xterm", "COLUMNS": "80"}.items():
        monkeypatch.setenv(name, value)
    shown = log(20_000, 1234)
    with shown.bar:
        shown.record(row_of(1234, 9.7376, 1710.0, 2395.0, 9.0))
    printed = capsys.readouterr().out
    assert "1,234/20,000" in printed and "617.00 GiB" in printed and "-:--:--" in printed
