"""How long a run lets its user wait: for its start, with empty caches and with full ones; for the
step beside which a save begins; for its end, from the last step to the prompt, beside the time that
the disk itself needs to write and to delete the same number of bytes.

All is observed from outside: when `train.py` prints its lines, when its process is gone, and what
it logs of its steps. The caches are this benchmark's own, and begin empty.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.process_group import ROOT, ProcessGroup
from benchmarks.report import machine, write_json
from benchmarks.words import check_unused
from longctx.config.fields import key
from longctx.runs import metrics_file, run_folder
from longctx.tables import grid

TAKES_TRAINING_KEYS = True
TAKEN = dict.fromkeys(("max_steps", "checkpoint_every"), "use steps=") | dict.fromkeys(
    ("name", "runs", "keep_checkpoints", "log_every"), "it is the benchmark's"
)
CACHES = ("LONGCTX_CACHE", "XDG_CACHE_HOME", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")
WRITERS = (1, 4)
CHUNK = 1 << 24  # bytes


@dataclass(frozen=True)
class Options:
    """What to measure; keys of train.py may follow, such as model=1b seq_len=16384."""

    steps: int = key(40, "of the run that ends; it saves after half of them and after the last")
    starts: int = key(3, "starts with full caches, of which the median is told")
    seconds: float = key(300.0, "a run is ended after that")
    folder: str = key("runs/waits", "of runs and caches, new or empty; removed after")
    out: str = key("results/waits", "writes .json")


class Spoken(ProcessGroup):
    """A run of train.py and its lines, each with the seconds since the command was given."""

    def __init__(self, words: list[str], caches: Path) -> None:
        self.lines: list[tuple[float, str]] = []
        environment = os.environ | dict.fromkeys(CACHES, str(caches)) | {"PYTHONUNBUFFERED": "1"}
        super().__init__(
            [sys.executable, str(ROOT / "train.py"), *words], environment, subprocess.PIPE
        )
        self.reading = threading.Thread(target=self._read)
        self.reading.start()

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        self.reading.join()

    def at(self, pattern: str) -> float | None:
        """When the first line that begins so was printed."""
        return next((at for at, line in list(self.lines) if re.match(pattern, line)), None)

    def until(self, pattern: str, seconds: float) -> float:
        """When a line that begins so is printed; ValueError where none is within `seconds`."""
        while (at := self.at(pattern)) is None:
            if self.process.poll() is not None or time.monotonic() - self.started > seconds:
                self.reading.join(1)
                last = self.lines[-1][1] if self.lines else "nothing"
                raise ValueError(f"train.py did not come to its steps; it said: {last}")
            time.sleep(0.005)
        return at

    def gone(self, seconds: float) -> float:
        """When the process was gone; ValueError where it failed or is not gone by `seconds`."""
        try:
            code = self.process.wait(seconds - (time.monotonic() - self.started))
        except subprocess.TimeoutExpired:
            raise ValueError(f"train.py did not end within {seconds:g} s; give seconds=") from None
        at = time.monotonic() - self.started
        self.reading.join()
        if code:
            raise ValueError(f"train.py ended with exit code {code}: {self.lines[-1][1]}")
        return at

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append((time.monotonic() - self.started, line.rstrip()))


def run(options: Options, command: str, overrides: list[str]) -> None:
    """Measure, print, write `out`.json; ValueError for keys that the benchmark sets itself."""
    check_unused(overrides, TAKEN)
    if options.steps < 6 or options.starts < 1:
        raise ValueError(f"steps={options.steps} starts={options.starts}: at least 6, and 1")
    folder = Path(options.folder).resolve()
    if folder.exists() and any(folder.iterdir()):
        raise ValueError(f"folder={options.folder}: not empty; remove it, or name a new one")
    try:
        cold = started(options, overrides, folder, "cold")
        warm = [started(options, overrides, folder, f"warm-{n}") for n in range(options.starts)]
        ended = end(options, overrides, folder)
        disk = {str(n): disk_seconds(folder, int(ended["bytes"]), n) for n in WRITERS}
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    result = {"command": command, **machine(), "options": asdict(options), "cold": cold}
    result |= {"warm": warm, "end": ended, "disk": disk}
    write_json(Path(f"{options.out}.json"), result)
    grid("What a run has its user wait for", ["what", "seconds"], table(result))
    print(f"wrote {options.out}.json")


def words(overrides: list[str], folder: Path, name: str, *own: str) -> list[str]:
    """The arguments of train.py: the benchmark's own first, which `overrides` may change."""
    mine = [f"name={name}", f"runs={folder / 'runs'}", "log_every=1", "data.val_fraction=0"]
    return [*mine, "wandb.mode=disabled", *own, *overrides]


def started(options: Options, overrides: list[str], folder: Path, name: str) -> dict[str, float]:
    """Seconds to the first line and to the end of step 1, of a run that is killed then."""
    arguments = words(overrides, folder, name, f"max_steps={options.steps}")
    with Spoken(arguments, folder / "caches") as spoken:
        return {
            "step_1": spoken.until(r"step 1/", options.seconds),
            "first_line": spoken.until("", options.seconds),
        }


def end(options: Options, overrides: list[str], folder: Path) -> dict[str, float]:
    """Seconds from the last step to the checkpoint on disk and to the end of the process; those by
    which a save holds a step up; bytes of the checkpoint.
    """
    steps, half = options.steps, options.steps // 2
    own = f"max_steps={steps}", f"checkpoint_every={half}", "keep_checkpoints=1"
    with Spoken(words(overrides, folder, "end", *own), folder / "caches") as spoken:
        prompt = spoken.gone(options.seconds)
        last = spoken.until(rf"step {steps:,}/", options.seconds)
        saved = spoken.until(rf"saved +after step {steps:,},", options.seconds)
    run_path = folder / "runs" / "end"
    took = step_seconds(metrics_file.read(run_path))
    usual = median(seconds for step, seconds in took.items() if step < half)
    (checkpoint,) = run_folder.checkpoints(run_path)
    return {
        "checkpoint": saved - last,
        "prompt": prompt - last,
        "held_up": took[half + 1] - usual,
        "step": usual,
        "bytes": sum(file.stat().st_size for file in checkpoint.iterdir()),
    }


def step_seconds(rows: list[Any]) -> dict[int, float]:
    """Seconds from the row of the step before to that of each step, so with the save between them,
    which `ms_per_step` leaves out.
    """
    at = {row["step"]: row["seconds"] for row in rows if "seconds" in row}
    return {step: seconds - at[step - 1] for step, seconds in at.items() if step - 1 in at}


def disk_seconds(folder: Path, size: int, writers: int) -> dict[str, float]:
    """Seconds in which so many writers have `size` bytes on the disk, and delete them again."""
    block = memoryview(os.urandom(CHUNK))  # no disk can make it smaller
    share = size // writers

    def write(number: int) -> None:
        with open(folder / f"disk-{number}", "wb", buffering=0) as file:
            for start in range(0, share, CHUNK):
                file.write(block[: share - start])
            os.fsync(file.fileno())

    def delete(number: int) -> None:
        (folder / f"disk-{number}").unlink()

    seconds = {}
    with ThreadPoolExecutor(writers) as pool:
        for name, work in (("write", write), ("delete", delete)):
            begun = time.monotonic()
            list(pool.map(work, range(writers)))
            seconds[name] = time.monotonic() - begun
    return seconds


def table(result: dict[str, Any]) -> list[dict[str, str]]:
    """The rows that are printed."""
    cold, warm, ended, disk = (result[name] for name in ("cold", "warm", "end", "disk"))
    rows = [
        ("start to the first line, empty caches", cold["first_line"]),
        ("start to the first line", median(one["first_line"] for one in warm)),
        ("start to the end of step 1, empty caches", cold["step_1"]),
        ("start to the end of step 1", median(one["step_1"] for one in warm)),
        ("a save holds a step up", ended["held_up"]),
        ("last step to the checkpoint on disk", ended["checkpoint"]),
        ("last step to the prompt", ended["prompt"]),
    ]
    size = f"{ended['bytes'] / 1e9:.1f} GB"
    for n, seconds in disk.items():
        by = f"the disk, {size}, {n} thread{'s' if n != '1' else ''}"
        rows += [(f"{by}: to write", seconds["write"]), (f"{by}: to delete", seconds["delete"])]
    return [{"what": what, "seconds": f"{seconds:.2f}"} for what, seconds in rows]
