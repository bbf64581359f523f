"""One case of `python -m benchmarks devices`: a run in its own processes, observed from outside and
ended as soon as it has shown what is measured.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.device_cases import FULL, Case
from benchmarks.process_group import ROOT, ProcessGroup, group
from benchmarks.words import training_run
from longctx import files
from longctx.config.data_config import DataConfig
from longctx.planner import fitting, step_time
from longctx.planner.peak_memory import predict
from longctx.runs import metrics_file, run_folder
from longctx.spec.hardware import GIB, Chip
from longctx.spec.step import Workload

DOCUMENT = 2**22  # tokens of the one document: whole rows of any length that divides them
TOKENIZER, TEXT = "tokenizer.json", "document.txt"
CLOSE = 1e-6  # of a loss, relative, in fp32


@dataclass(frozen=True)
class Place:
    """Where a case runs: its GPUs, its folder, until when, and what would end it before."""

    gpus: tuple[int, ...]
    folder: Path  # of all runs; the corpus is in it
    cuda: bool
    end: float  # of time.monotonic()
    stop: threading.Event
    overrides: tuple[str, ...]  # of every run of train.py
    chip: Chip  # predicted for
    host: float  # bytes of host memory for a GPU

    def environment(self) -> dict[str, str]:
        """Of the processes: they see their GPUs, share caches, and wait for no network."""
        shown = ",".join(map(str, self.gpus))
        return os.environ | {
            "CUDA_VISIBLE_DEVICES": shown if self.cuda else "",
            "PYTHONUNBUFFERED": "1",
        }


class Started(ProcessGroup):
    """A command whose output goes to a log."""

    def __init__(self, command: list[str], log: Path, place: Place) -> None:
        self.place, self.log = place, log
        log.parent.mkdir(parents=True, exist_ok=True)
        with open(log, "ab") as output:
            super().__init__(command, place.environment(), output)

    def wait(self, until: Callable[[], bool] = lambda: False, end: float | None = None) -> bool:
        """Whether `until` comes true before the process ends or its time is over."""
        end = self.place.end if end is None else end
        while not until():
            over = time.monotonic() > end or self.place.stop.is_set()
            if over or self.process.poll() is not None:
                return until()
            time.sleep(0.05)
        return True

    def problem(self) -> str:
        """Why it ended before what it was waited for, in a line."""
        if self.process.poll() is None:
            return f"ended after {time.monotonic() - self.started:.0f} s"
        return f"exit code {self.process.returncode}: {last_words(self.log)}"


def last_words(log: Path) -> str:
    """The last line of a log that says what went wrong, else its last line."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    launcher = "ChildFailedError"  # torchrun's own, after what a rank said
    errors = [line for line in lines if line.startswith("error: ") or "Error: " in line]
    messages = [line for line in errors if launcher not in line]
    return (messages or lines or ["it said nothing"])[-1][:400]


def make_corpus(folder: Path) -> None:
    """Write a tokenizer and one document of DOCUMENT tokens, less what could make a row more."""
    from longctx.data import load, read_documents

    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = load(DataConfig(val_fraction=0), 4096).tokenizer
    tokenizer.save(folder / TOKENIZER)
    if not (folder / TEXT).exists():
        texts = [document.text for document in read_documents(DataConfig())]
        texts_of_corpus: list[str] = []
        room = DOCUMENT - 4096  # tokens
        for text, ids in zip(texts, tokenizer.encode_documents(texts), strict=True):
            texts_of_corpus.append(text if len(ids) <= room else tokenizer.decode(ids[:room]))
            room -= len(ids)
            if room <= 0:
                break
        files.write_text(folder / TEXT, "".join(texts_of_corpus))
    config = DataConfig(
        source="text", path=str(folder / TEXT), tokenizer=str(folder / TOKENIZER), val_fraction=0
    )
    load(config, 4096)


def with_given(own: list[str], place: Place) -> list[str]:
    """`own` overrides and those of the command line, which stand where both name a key."""
    named = {word.partition("=")[0] for word in place.overrides}
    return [*(word for word in own if word.partition("=")[0] not in named), *place.overrides]


def overrides_of(case: Case, place: Place) -> list[str]:
    """Of train.py, the data's among them."""
    data = ["data.val_fraction=0"]
    if case.data == FULL:
        text, tokenizer = place.folder / TEXT, place.folder / TOKENIZER
        data += ["data=text", f"data.path={text}", f"data.tokenizer={tokenizer}"]
    else:
        data += ["data=embedded"]
    return with_given([*case.overrides.split(), *data], place)


def decided(overrides: Iterable[str], place: Place) -> Workload:
    """The step that train.py would take on these GPUs."""
    work = training_run(list(overrides), "cuda").workload
    if work.memory.policy != "auto":
        return work
    return fitting.decide(work, place.chip, place.host * work.devices)


def predicted(work: Workload, place: Place) -> dict[str, Any]:
    """Memory of a GPU, and seconds of a step of rows that are one document each."""
    expected = step_time.seconds(work, place.chip)
    return {
        "memory": str(work.memory),
        "strategy": work.strategy,
        "context": work.context,
        "tokens": work.seq_len,
        "rows": work.rows_per_step,
        "predicted_gib": predict(work).peak / GIB,
        "predicted_host_gib": fitting.on_host(work) / GIB,
        "predicted_full_seconds": expected.total if expected else None,
        "predicted_full_mfu": expected.mfu if expected else None,
    }


def train(name: str, case: Case, place: Place) -> dict[str, Any]:
    """A run of train.py until it has logged its steps."""
    overrides = overrides_of(case, place)
    row = predicted(decided(overrides, place), place) | {"data": case.data}
    folder = place.folder / "runs" / name
    shutil.rmtree(folder, ignore_errors=True)
    own = [f"name={name}", f"runs={folder.parent}", "wandb.mode=disabled", "kernel.lock=off"]
    own += ["max_steps=1000", f"log_every={case.log_every}"]
    command = [sys.executable, str(ROOT / "train.py"), *overrides, *own]
    row["command"] = f"python train.py {' '.join(command[2:])}"

    def logged() -> list[dict[str, Any]]:
        rows = metrics_file.read(folder) if folder.exists() else []
        return [one for one in rows if "ms_per_step" in one]

    with Started(command, place.folder / f"{name}.log", place) as started:
        started.wait(lambda: bool(logged()))
        row["start_seconds"] = time.monotonic() - started.started
        if not started.wait(lambda: bool(logged()) and logged()[-1]["step"] >= case.steps):
            row["note"] = started.problem()
    return row | measured(logged())


def measured(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """What the logged rows come to: the median of those after the first, which compiles."""
    if not rows:
        return {}
    later = rows[1:] or rows
    numbers = {key for one in later for key, x in one.items() if isinstance(x, int | float)}
    left_out = {"step", "tokens_seen", "seconds", "epoch", "lr", "loss", "grad_norm"}
    medians = {
        key: median(x for one in later if (x := one.get(key)) is not None)
        for key in sorted(numbers - left_out)
    }
    peak = max(one.get("memory_peak_gib", one.get("process_peak_gib", 0.0)) for one in rows)
    return medians | {
        "memory_peak_gib": peak,
        "first_seconds": rows[0]["ms_per_step"] * rows[0]["step"] / 1000,
        "seconds": medians["ms_per_step"] / 1000,
        "loss": [one.get("loss") for one in rows],
        "metrics": rows,
    }


def longest(name: str, case: Case, place: Place) -> dict[str, Any]:
    """The longest row that is predicted to fit, tried: every token and layer, short documents."""
    shares = f"devices={case.gpus} batch_size=1 accumulate=1"
    if case.gpus > 1:
        shares += f" context={case.gpus} context.method=ulysses strategy=fsdp"
    base = decided(f"{case.overrides} {shares} memory=long seq_len=4096".split(), place)
    room, host = 0.97 * place.chip.usable, place.host * case.gpus
    most = fitting.longest([lambda tokens: replace(base, seq_len=tokens)], room, host, 2048)
    if most is None:
        return {"note": "no length is predicted to fit"}
    words = f"{case.overrides} {shares} memory=long seq_len={most.seq_len}"
    return train(name, replace(case, overrides=words), place)


def peer(name: str, case: Case, place: Place) -> dict[str, Any]:
    """Steps of another trainer on the same shape, started by torchrun."""
    work = decided(with_given(case.overrides.split(), place), place)
    request, out = place.folder / f"{name}.request.json", place.folder / f"{name}.out.json"
    out.unlink(missing_ok=True)
    settings = {
        "peer": case.what,
        "model": vars(work.model),
        "tokens": work.seq_len,
        "steps": case.steps,
        "device": "cuda" if place.cuda else "cpu",
        "checkpointing": case.checkpointing,
    }
    files.write_text(request, json.dumps(settings))
    launcher = ["torch.distributed.run", "--standalone", f"--nproc-per-node={case.gpus}"]
    command = [sys.executable, "-m", *launcher, "-m", "benchmarks.device_peers"]
    row: dict[str, Any] = {"tokens": work.seq_len, "memory": "", "data": "random tokens"}
    with Started([*command, str(request), str(out)], place.folder / f"{name}.log", place) as child:
        if not child.wait(out.exists):
            return row | {"note": child.problem()}
    return row | measured_steps(json.loads(out.read_text()))


def measured_steps(answer: dict[str, Any]) -> dict[str, Any]:
    """Speed of a peer's steps after the first."""
    seconds = median(answer["ms"][1:] or answer["ms"]) / 1000
    return answer | {"seconds": seconds, "tokens_per_second": answer["tokens_per_step"] / seconds}


def resumed(name: str, case: Case, place: Place) -> dict[str, Any]:
    """Eight steps of a small fp32 model on all GPUs; the same, resumed after each pair of them on
    half as many, on one, and on all again.
    """
    half, everything = max(1, case.gpus // 2), case.gpus
    shape = [
        *("model=tiny", "seq_len=1024", "batch_size=2", "accumulate=1", f"devices={everything}"),
        *("strategy=fsdp", "precision=fp32", "deterministic=true", "max_steps=8", "log_every=1"),
        *("checkpoint_every=2", "keep_checkpoints=9", "wandb.mode=disabled", "compile=false"),
        *("data.val_fraction=0", "lr=0.0005", "kernel.lock=off"),
    ]
    shape = with_given(shape, place)
    runs = place.folder / "runs"
    folders = [runs / f"{name}-{number}" for number in range(4)]
    log = place.folder / f"{name}.log"
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
    layouts = [[f"name={folders[0].name}", f"runs={runs}", *shape]]
    layouts += [
        [f"resume={folder}", f"devices={devices}"]
        for folder, devices in zip(folders[1:], (half, 1, everything), strict=True)
    ]
    for number, words in enumerate(layouts):
        if number:
            copied_until(folders[number - 1], folders[number], 2 * number)
        with Started([sys.executable, str(ROOT / "train.py"), *words], log, place) as started:
            started.wait()
            if started.process.poll() != 0:
                return {"note": f"{words[0]} {words[1]}: {started.problem()}"}
    rows = [metrics_file.read(folder) for folder in folders]
    first = {one["step"]: one for one in rows[0] if "loss" in one}
    last = {one["step"]: one for one in rows[-1] if "loss" in one}
    apart = max(abs(last[step]["loss"] / one["loss"] - 1) for step, one in first.items())
    same = all(last[step]["tokens_seen"] == one["tokens_seen"] for step, one in first.items())
    return {
        "devices": [everything, half, 1, everything],
        "losses": [one["loss"] for one in first.values()],
        "losses_resumed": [one["loss"] for one in last.values()],
        "largest_difference": apart,
        "note": f"losses within {apart:.1e}, {'the same' if same else 'OTHER'} tokens seen"
        + ("" if apart <= CLOSE else f": MORE than {CLOSE}"),
    }


def copied_until(run: Path, copy: Path, step: int) -> None:
    """Copy the folder of a run as it was after `step`."""
    shutil.copytree(run, copy, symlinks=True)
    for path in run_folder.checkpoints(copy):
        if int(path.name[5:].partition(".")[0]) > step:
            shutil.rmtree(path)
    (copy / "checkpoints" / "last.ckpt").unlink(missing_ok=True)


def lost(name: str, case: Case, place: Place) -> dict[str, Any]:
    """A run that loses a process: seconds until all have ended, and what it says."""
    folder = place.folder / "runs" / name
    shutil.rmtree(folder, ignore_errors=True)
    shape = ["model=tiny", "seq_len=1024", "batch_size=2", "accumulate=1", "strategy=fsdp"]
    own = [f"devices={case.gpus}", f"name={name}", f"runs={folder.parent}", "max_steps=100000"]
    own += ["log_every=1", "wandb.mode=disabled", "kernel.lock=off", "compile=false", "workers=1"]
    shape = with_given([*shape, *own, "data.val_fraction=0"], place)
    log = place.folder / f"{name}.log"
    with Started([sys.executable, str(ROOT / "train.py"), *shape], log, place) as started:
        if not started.wait(lambda: folder.exists() and len(metrics_file.read(folder)) >= 3):
            return {"note": started.problem()}
        rank = rank_of(started.process.pid, case.gpus - 1)
        victim = children(rank)[0] if case.victim == "data worker" else rank
        number = signal.SIGSTOP if case.victim == "stopped process" else signal.SIGKILL
        os.kill(victim, number)
        since = time.monotonic()
        while (alive := group(started.process.pid)) and time.monotonic() < since + 90:
            time.sleep(0.1)
        seconds = time.monotonic() - since
        started.process.poll()
    errors = [line for line in log.read_text().splitlines() if line.startswith("error: ")]
    return {
        "victim": f"{case.victim} of process {case.gpus - 1}",
        "seconds_to_end": seconds,
        "exit_code": started.process.returncode,
        "left": len(alive),
        "said": errors,
        "note": f"{'NOT ended' if alive else 'ended'} after {seconds:.0f} s: {' | '.join(errors)}",
    }


def children(pid: int) -> list[int]:
    """The processes that `pid` has started."""
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def rank_of(first: int, rank: int) -> int:
    """The process that is number `rank` of the run whose first is `first`."""
    wanted = f"LOCAL_RANK={rank}".encode()
    for pid in children(first):
        with suppress(OSError):
            if wanted in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                return pid
    raise RuntimeError(f"process {rank} of the run is not among the children of {first}")


MEASURES: dict[str, Callable[[str, Case, Place], dict[str, Any]]] = {
    "train": train,
    "longest": longest,
    "torch-context-parallel": peer,
    "accelerate-fsdp2": peer,
    "resumed": resumed,
    "lost": lost,
}
