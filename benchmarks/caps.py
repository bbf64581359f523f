"""Steps with no more memory than a card has: every cell of docs/cards.md, and random models.

    python -m benchmarks caps caps=24,80 hosts=64,128 models=8b
    python -m benchmarks caps 'models=[]' random=20

Under a cap torch's allocator gets the memory of a card, less what CUDA itself takes. A point is a
step on packed documents, of a random model two, and a batch of validation, in a process of its own.
As many run at a time as are predicted to fit together: unlike time, memory does not change with
company. Most of a point's time is starting Python, compiling, and the step itself.
"""

from __future__ import annotations

import itertools
import os
import random
import threading
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from benchmarks.cards import CARDS, CASES, HOSTS, MODELS, SHOWN, Case, longest_step, run_of
from benchmarks.points import Row, off, point, this_gpu, training_run
from benchmarks.processes import in_child
from benchmarks.report import machine, write_json
from longctx.config.fields import Group, key
from longctx.planner import fitting
from longctx.planner.peak_memory import predict
from longctx.spec import hardware
from longctx.spec.hardware import GIB
from longctx.spec.step import Workload

if TYPE_CHECKING:
    from longctx.training.run import Run

DOCUMENT = 2048  # tokens
CONTEXT = 1.5 * GIB  # that a process takes besides its tensors
OF_CUDA = 0.8  # GiB of a card that torch's allocator never gets: context and libraries
MOST = 400_000  # tokens: more would only take longer
# Of random steps under caps: what all have, and choices of which each has one
USUAL = ("model=124m", "workers=0", "graphs=false", "attention=flash")
RANDOM = (
    (
        "model.channels=1024 model.heads=16 model.kv_heads=4 model.ffn=2816",
        "model.channels=2048 model.heads=32 model.kv_heads=8 model.ffn=8192",
        "model.channels=4096 model.heads=32 model.kv_heads=8 model.ffn=14336",
    ),
    ("model.layers=2", "model.layers=3", "model.layers=4"),
    ("model.vocab_size=32000 model.tied=true", "model.vocab_size=128256 model.tied=false"),
    ("", "model.window=512 model.window_layers=[0]", "model.norms=sandwich", "model.qk_norm=head"),
    ("", "optimizer=muon", "lora.rank=16", "lora.rank=16 lora.base=nf4"),
    ("batch_size=1 accumulate=1", "batch_size=2 accumulate=1", "batch_size=1 accumulate=2"),
    ("memory=fast", "memory=balanced", "memory.recompute=block", "memory.heads_at_once=1"),
    ("", "memory.mlp_tile=2048", "memory.mlp_tile=24576"),
    ("", "memory.keep_every=3", "memory.attention_again=0.5", "memory.offload_weights=0.5"),
    ("", "memory.offload=0.3", "memory.offload=1"),
)


@dataclass(frozen=True)
class Options(Group):
    """The cells to step, and how many random models."""

    caps: tuple[int, ...] = key(SHOWN, "GB of cards")
    hosts: tuple[int, ...] = key(HOSTS, "GiB of host memory")
    models: tuple[str, ...] = key(tuple(MODELS), "of the page", choices=MODELS)
    layers: int = key(0, "of them, with that much less memory; 0: all", between=(0, 1000))
    random: int = key(0, "small models with random settings", between=(0, 1000))
    parallel: int = key(8, "processes at a time, as far as they fit together", between=(1, 64))
    minutes: float = key(600.0, "points not begun by then are left out")
    out: str = key("results/caps", "writes .json")


class Point(NamedTuple):
    """A step after `warm` ones, within `gib` GiB of the GPU; its row has what is `about` it."""

    name: str
    run: Run
    about: Row
    gib: float
    warm: int = 0


def run(options: Options, command: str) -> None:
    """Measure, print predicted and measured of every point, write `out`.json."""
    if unknown := [cap for cap in options.caps if cap not in CARDS]:
        raise ValueError(f"caps={unknown[0]}: choose from {', '.join(map(str, CARDS))}")
    if (gpu := this_gpu()) is None:
        raise ValueError("caps: measures a GPU's memory, and there is no CUDA GPU here")
    # By a child: torch would take memory of the GPU for this process
    result: Row = {"command": command, **in_child(machine), "options": asdict(options)}
    points = itertools.chain(cells(options), random_steps(options.random))
    room = Room(gpu.memory), Room(hardware.host_memory() - fitting.HOST_LEFT)
    together(points, result | {"rows": []}, Path(f"{options.out}.json"), options, *room)


def together(
    points: Iterable[Point], result: Row, path: Path, options: Options, gpu: Room, host: Room
) -> None:
    """Add a row for each of `points` to the `result`, and write it: an interruption loses none."""
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "2")  # of each process
    end, rows = time.monotonic() + 60 * options.minutes, result["rows"]

    def measured(x: Point) -> Row | None:
        predicted = predict(x.run.workload)
        away = sum(predicted.host.values())
        with gpu.reserved(1.05 * predicted.peak + CONTEXT), host.reserved(1.05 * away):
            if (left := end - time.monotonic()) < 0:
                print(f"left out: {x.name}; give more minutes=", flush=True)
                return None
            seconds = max(left, 60.0)
            row = point(x.run, x.warm, 1, DOCUMENT, validate=True, gib=x.gib, seconds=seconds)
        row |= {"name": x.name, "moment": predicted.phase, "cap_gib": x.gib, **x.about}
        outcome = row["failed"] or f"{row['measured_gib']:.2f} GiB, predicted {off(row['error'])}"
        print(f"{x.name}: {outcome}", flush=True)
        return row

    with ThreadPoolExecutor(options.parallel) as threads:
        for done in as_completed([threads.submit(measured, x) for x in points]):
            rows += [row] if (row := done.result()) else []
            write_json(path, result)
    print(f"wrote {path}")


def cells(options: Options) -> Iterator[Point]:
    """Yield the step of every cell of the page; models that take longest come first."""
    cases = [case for case in reversed(CASES) if case.model in options.models]
    for case, cap, host in itertools.product(cases, options.caps, options.hosts):
        if step := longest_step(run_of(case).workload, cap, host):
            yield of_cell(case, cap, host, step, options.layers)


def of_cell(case: Case, cap: int, host: float, step: Workload, layers: int) -> Point:
    """Return `step` of a cell, or its first `layers`, in whole tiles: one graph serves them all."""
    tile, run = step.memory.mlp_tile or 1, run_of(case, layers)
    tokens = step.seq_len if step.seq_len < tile else step.seq_len // tile * tile
    work = replace(run.workload, seq_len=tokens, memory=step.memory, batch_size=1, accumulate=1)
    gib = hardware.cards()[CARDS[cap]].memory / GIB - OF_CUDA
    about = {"model": case.model, "way": case.way, "cap": cap, "host": host, "layers": layers}
    if layers:  # of all layers, the rest of what the cap and the search leave free
        gib -= (predict(replace(step, seq_len=tokens)).peak - predict(work).peak) / GIB
    name = f"{case.name}, {tokens:,} tokens under {cap} GB"
    # Of all weights, the first step has no optimizer's state yet
    return Point(name, replace(run, workload=work, val_rows=1), about, gib, int(not work.added))


def random_steps(count: int) -> Iterator[Point]:
    """Yield as many steps of small models, with random parts and settings, each the longest that is
    predicted to fit a random number of GiB.
    """
    rng, found = random.Random(64), 0
    while found < count:
        given = [*USUAL, *itertools.chain(*(rng.choice(each).split() for each in RANDOM))]
        gib, host = rng.choice((3, 4, 6, 8, 11)), rng.choice((14, 16, 20))
        try:
            work = (run := training_run(given, "cuda")).workload
        except ValueError:  # these settings contradict one another
            continue
        room, at = min(0.95 * gib, gib - 0.4) * GIB, lambda n, work=work: replace(work, seq_len=n)
        if step := fitting.longest([at], room, host * GIB, limit=MOST):
            found, run = found + 1, replace(run, workload=step, val_rows=1)
            yield Point(f"random {found}", run, {"overrides": given, "host": host}, gib, warm=1)


class Room:
    """A number of bytes that processes share: each waits until its own are free."""

    def __init__(self, size: float) -> None:
        self.size, self.free, self.changed = size, size, threading.Condition()

    @contextmanager
    def reserved(self, size: float) -> Iterator[None]:
        """Keep `size` bytes, or all of them if it is more, from others."""
        mine = min(size, self.size)
        with self.changed:
            self.changed.wait_for(lambda: self.free >= mine)
            self.free -= mine
        try:
            yield
        finally:
            with self.changed:
                self.free += mine
                self.changed.notify_all()
