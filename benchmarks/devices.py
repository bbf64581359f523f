"""Training on several GPUs: whole steps on 1, 2 and 4 of them beside what plan predicts and beside
other trainers, rows that no single GPU holds, runs resumed on other numbers of GPUs, and runs that
lose a process.

Cases begin in their order, each on its own GPUs as soon as enough are free; those that measure no
speed run beside one another. Each result is written at once, and a case that takes too long is
ended. Steps are those of `python train.py`; the first one, which compiles, is not counted.
"""

from __future__ import annotations

import json
import signal
import sys
import threading
import time
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.device_cases import CASES, Case
from benchmarks.device_runs import MEASURES, Place, make_corpus
from benchmarks.report import machine, write_json
from benchmarks.words import check_unused
from longctx.config.fields import key
from longctx.spec import hardware
from longctx.spec.hardware import GIB
from longctx.tables import grid

TAKES_TRAINING_KEYS = True
TAKEN = {name: "it is the case's" for name in ("devices", "context", "strategy", "name", "runs")}
NEEDS_CORPUS = ("train", "longest", "resumed", "lost")
SHOWN = (
    "case",
    "gpus",
    "tokens",
    "rows",
    "memory",
    "tokens_per_second",
    "over_one",
    "longctx_over_it",
    "mfu",
    "seconds",
    "predicted_full_seconds",
    "memory_peak_gib",
    "predicted_gib",
    "note",
)


@dataclass(frozen=True)
class Options:
    """What to measure, and where; keys of train.py may follow, and hold for every run of it."""

    cases: tuple[str, ...] = key(tuple(CASES), "in this order", choices=CASES)
    gpus: tuple[str, ...] = key(("all",), "their numbers, such as 0,1; all: every one that is here")
    host_memory: float = key(110.0, "GiB of host memory that a GPU may take for longest rows")
    minutes: float = key(60.0, "cases that would end after that are left out")
    slack: float = key(1.5, "a case is ended after so many times the seconds it is thought to take")
    folder: str = key("runs/devices", "of runs, logs and documents")
    out: str = key("results/devices.json", "file of the result; other cases that it has stay")


def run(options: Options, command: str, overrides: list[str]) -> None:
    """Measure every case, print each, write `out`."""
    check_unused(overrides, TAKEN)
    numbers, cuda = slots(options.gpus)
    for name in options.cases:
        if CASES[name].gpus > len(numbers):
            raise ValueError(
                f"cases={name}: needs {CASES[name].gpus} GPUs, and gpus= has {len(numbers)}"
            )
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    chip = hardware.here() or hardware.chip(hardware.ASSUMED[0], hardware.ASSUMED[1] * GIB)
    earlier = json.loads(Path(options.out).read_text()) if Path(options.out).exists() else {}
    rows = [row for row in earlier.get("rows", []) if row["case"] not in options.cases]
    result: dict[str, Any] = {
        "commands": [*earlier.get("commands", []), command],
        **machine(),
        "predicted_for": chip.name,
        "options": asdict(options),
        "rows": rows,
    }
    begun = time.monotonic()
    folder, end = Path(options.folder).resolve(), begun + 60 * options.minutes
    stop, writing = threading.Event(), threading.Lock()

    def report(row: dict[str, Any]) -> None:
        with writing:
            rows.append(row)
            compare(rows)
            write_json(Path(options.out), result)
            print(f"{time.monotonic() - begun:5.0f} s  {outcome(row)}", flush=True)

    def measure(name: str, gpus: tuple[int, ...], corpus: Future[None]) -> None:
        case = CASES[name]
        row: dict[str, Any] = {"case": name, "gpus": case.gpus, "on": gpus}
        (folder / f"{name}.log").unlink(missing_ok=True)
        try:
            if case.what in NEEDS_CORPUS:
                corpus.result()
            row["begun"] = time.monotonic() - begun
            limit = min(end, time.monotonic() + options.slack * case.seconds + 20)
            words, host = tuple(overrides), options.host_memory * GIB
            place = Place(gpus, folder, cuda, limit, stop, words, chip, host)
            row |= MEASURES[case.what](name, case, place)
        except Exception as error:  # one case, whatever is wrong with it, costs no other
            row["note"] = f"{type(error).__name__}: {error}".partition("\n")[0]
        report(row | {"took": time.monotonic() - begun - row.get("begun", 0.0)})

    with ThreadPoolExecutor(len(numbers) + len(CASES)) as pool:
        corpus = pool.submit(make_corpus, folder)
        running: dict[Future[None], tuple[Case, tuple[int, ...]]] = {}
        try:
            for name in options.cases:
                case = CASES[name]
                while (gpus := free_for(case, list(running.values()), numbers)) is None:
                    for ended in wait(running, return_when=FIRST_COMPLETED).done:
                        del running[ended]
                if time.monotonic() + case.seconds > end:
                    note = f"left out: it would take {case.seconds:.0f} s"
                    report({"case": name, "gpus": case.gpus, "took": 0.0, "note": note})
                else:
                    running[pool.submit(measure, name, gpus, corpus)] = case, gpus
            wait(running)
        finally:
            stop.set()
    grid("Several GPUs", SHOWN, rows)
    print(f"wrote {options.out}")


def free_for(
    case: Case, running: list[tuple[Case, tuple[int, ...]]], numbers: tuple[int, ...]
) -> tuple[int, ...] | None:
    """GPUs on which `case` may begin beside those that run, or None until one of these has ended.

    Cases that measure no speed share all GPUs with one another, and with no other.
    """
    if any(other.shared != case.shared for other, _ in running):
        return None
    busy = set() if case.shared else {n for _, gpus in running for n in gpus}
    free = tuple(n for n in numbers if n not in busy)
    return free[: case.gpus] if len(free) >= case.gpus else None


def slots(names: tuple[str, ...]) -> tuple[tuple[int, ...], bool]:
    """The GPUs to use, and that they are; on a machine without, four places for processes."""
    import torch

    there = torch.cuda.device_count() if torch.cuda.is_available() else 0
    known = [str(n) for n in range(there or 4)]
    wrong = [n for n in names if n not in known]
    if wrong and names != ("all",):
        raise ValueError(f"gpus={','.join(names)}: of {','.join(known)}, or all")
    numbers = known if names == ("all",) else names
    return tuple(map(int, numbers)), there > 0


def compare(rows: list[dict[str, Any]]) -> None:
    """Set `over_one`, how many times as fast a case is as the same work on one GPU, and of a peer
    `longctx_over_it`, where both were measured.
    """
    speeds = {row["case"]: row.get("tokens_per_second") for row in rows}
    for row in rows:
        case, mine = CASES[row["case"]], speeds[row["case"]]
        one, ours = speeds.get(case.one), speeds.get(case.ours)
        if mine and one:
            row["over_one"] = mine / one
        if mine and ours:
            row["longctx_over_it"] = ours / mine


def outcome(row: dict[str, Any]) -> str:
    """A case in a line."""
    text = f"{row['case']} ({row['took']:.0f} s):"
    if "tokens_per_second" in row:
        text += f" {row['tokens_per_second']:,.0f} tokens/s, {row['seconds']:.2f} s a step"
        expected = row.get("predicted_full_seconds")
        text += f" ({expected:.2f} predicted)" if expected and row.get("data") == "full" else ""
        text += f", {row.get('memory_peak_gib', 0):.1f} GiB"
        text += f" ({row['predicted_gib']:.1f} predicted)" if "predicted_gib" in row else ""
        text += f", MFU {row['mfu']:.1%}" if row.get("mfu") else ""
        text += f", {row['over_one']:.2f} × one" if "over_one" in row else ""
        ratio = row.get("longctx_over_it")
        text += f", longctx {ratio:.2f} × as fast" if ratio else ""
    return f"{text} {row.get('note', '')}"
