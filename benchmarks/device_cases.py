"""The cases of `python -m benchmarks devices`, the most important first.

A case of `train.py` is its overrides. Rows are one document each (`FULL`) or packed with the
embedded documents (`PACKED`): memory depends on the row's length, attention's time on the
documents', so that a packed row of millions of tokens is a step of a minute.
"""

from __future__ import annotations

from dataclasses import dataclass

FULL, PACKED = "full", "packed"
SECONDS_TO_START = 35.0  # until the first step: libraries, data, processes, weights, compilation


@dataclass(frozen=True)
class Case:
    """One measurement on `gpus` GPUs, of about `seconds` in all on H200s."""

    gpus: int
    seconds: float
    what: str  # train | longest | a peer of device_peers | resumed | lost
    overrides: str = ""
    data: str = FULL
    steps: int = 5  # that are waited for
    log_every: int = 1
    one: str = ""  # the case of the same rows per GPU, or of the same row, on one GPU
    ours: str = ""  # of a peer: the case of longctx on the same rows and GPUs
    checkpointing: bool = False  # of a peer
    victim: str = ""  # of what = lost
    shared: bool = False  # its speed is not measured: it runs beside others of the kind


def _train(gpus: int, seconds: float, overrides: str, **others: object) -> Case:
    overrides = f"{overrides} devices={gpus} accumulate=1"
    return Case(gpus, seconds + SECONDS_TO_START, "train", overrides, **others)  # type: ignore[arg-type]


def _row(model: str, tokens: int, gpus: int, method: str, seconds: float, **others: object) -> Case:
    """One row of `tokens`, shared by all GPUs."""
    shares = f"context={gpus} context.method={method} strategy=fsdp" if gpus > 1 else ""
    overrides = f"model={model} seq_len={tokens} batch_size=1 {shares}"
    return _train(gpus, seconds, overrides, **others)


def _rows(model: str, tokens: int, rows: int, gpus: int, strategy: str, **others: object) -> Case:
    """`rows` rows of `tokens` on each GPU."""
    shares = f"strategy={strategy}" if gpus > 1 else ""
    overrides = f"model={model} seq_len={tokens} batch_size={rows} {shares}"
    return _train(gpus, 20, overrides, **others)


SHORT = {"steps": 40, "log_every": 5}  # steps of a quarter of a second
CASES: dict[str, Case] = {
    # Whether anything runs at all
    "tiny-4": Case(
        4,
        60,
        "train",
        "model=tiny seq_len=4096 batch_size=1 accumulate=1 devices=4 context=2 strategy=fsdp",
        PACKED,
        steps=2,
        shared=True,
    ),
    "tiny-2": Case(
        2,
        60,
        "train",
        "model=tiny seq_len=4096 batch_size=1 accumulate=1 devices=2 context=2 strategy=fsdp",
        PACKED,
        steps=2,
        shared=True,
    ),
    # One row over all
    "1b-256k-4-ulysses": _row("1b", 262144, 4, "ulysses", 4 * 8, steps=4, one="1b-256k-1"),
    "1b-256k-4-allgather": _row("1b", 262144, 4, "allgather", 4 * 8, steps=4, one="1b-256k-1"),
    "1b-1m-4": _row("1b", 1048576, 4, "ulysses", 130, steps=1),
    "1b-256k-1": _row("1b", 262144, 1, "", 3 * 31, steps=3),
    "1b-256k-2-ulysses": _row("1b", 262144, 2, "ulysses", 4 * 16, steps=4, one="1b-256k-1"),
    "1b-256k-2-allgather": _row("1b", 262144, 2, "allgather", 4 * 16, steps=4, one="1b-256k-1"),
    # Rows of its own for each
    "1b-64k-4": _rows("1b", 65536, 1, 4, "fsdp", steps=7, one="1b-64k-1"),
    "1b-64k-2": _rows("1b", 65536, 1, 2, "fsdp", steps=7, one="1b-64k-1"),
    "1b-64k-1": _rows("1b", 65536, 1, 1, "", steps=7),
    "124m-16k-4": _rows("124m", 16384, 4, 4, "ddp", **SHORT, one="124m-16k-1"),
    "124m-16k-2": _rows("124m", 16384, 4, 2, "ddp", **SHORT, one="124m-16k-1"),
    "124m-16k-1": _rows("124m", 16384, 4, 1, "", **SHORT),
    "124m-16k-packed-4": _rows(
        "124m", 16384, 4, 4, "ddp", **SHORT, data=PACKED, one="124m-16k-packed-1"
    ),
    "124m-16k-packed-2": _rows(
        "124m", 16384, 4, 2, "ddp", **SHORT, data=PACKED, one="124m-16k-packed-1"
    ),
    "124m-16k-packed-1": _rows("124m", 16384, 4, 1, "", **SHORT, data=PACKED),
    # A model that no single GPU trains
    "8b-256k-4": _row("8b", 262144, 4, "ulysses", 15 + 3 * 33, steps=3),
    "8b-64k-packed-4": _train(
        4, 75, "model=8b seq_len=65536 batch_size=1 strategy=fsdp", data=PACKED, steps=5
    ),
    "8b-64k-2": _train(2, 65, "model=8b seq_len=65536 batch_size=1 strategy=fsdp", steps=4),
    "8b-64k-2-offload": _train(
        2, 85, "model=8b seq_len=65536 batch_size=1 strategy=fsdp memory=long", steps=3
    ),
    # The longest rows that fit
    "1b-longest-4": Case(4, 280, "longest", "model=1b", PACKED, steps=1),
    "1b-longest-2": Case(2, 190, "longest", "model=1b", PACKED, steps=2),
    "1b-longest-1": Case(1, 190, "longest", "model=1b", PACKED, steps=2),
    "8b-longest-4": Case(4, 300, "longest", "model=8b", PACKED, steps=1),
    # Others
    "torch-context-parallel-256k-4": Case(
        4,
        100,
        "torch-context-parallel",
        "model=1b seq_len=262144",
        steps=3,
        ours="1b-256k-4-ulysses",
    ),
    "torch-context-parallel-256k-2": Case(
        2,
        150,
        "torch-context-parallel",
        "model=1b seq_len=262144",
        steps=3,
        ours="1b-256k-2-ulysses",
        checkpointing=True,
    ),
    "accelerate-64k-4": Case(
        4, 65, "accelerate-fsdp2", "model=1b seq_len=65536", steps=6, ours="1b-64k-4"
    ),
    "accelerate-64k-2": Case(
        2, 65, "accelerate-fsdp2", "model=1b seq_len=65536", steps=6, ours="1b-64k-2"
    ),
    # What is right, and what ends
    "resumed": Case(4, 150, "resumed", shared=True),
    "killed": Case(2, 60, "lost", victim="process", shared=True),
    "stopped": Case(2, 110, "lost", victim="stopped process", shared=True),
    "worker-killed": Case(2, 60, "lost", victim="data worker", shared=True),
}
