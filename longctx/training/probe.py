"""A few steps of the run that a configuration describes, on random tokens: what they take of memory
and time.

No corpus, no folder, no log; module, loop, optimizer and loader are those of training. As a script
it is the child process in which a configuration may run out of memory without harm:

    python -m longctx.training.probe REQUEST OUT        both files of JSON, see `in_child`
"""

from __future__ import annotations

import dataclasses
import gc
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.utils.data import Dataset, Sampler

from longctx import attention
from longctx.config.train_config import CompleteConfig
from longctx.kernels.timing import Laps
from longctx.runs import run_folder
from longctx.training.batches import StepBatch, train_loader
from longctx.training.fit import is_out_of_memory, lightning_trainer, quiet_lightning, within_memory
from longctx.training.module import TrainingModule
from longctx.training.throughput import memory

OUT_OF_MEMORY = "out of memory"


@dataclasses.dataclass
class Measured:
    """What a rehearsal took; `failed` is None, OUT_OF_MEMORY or what else went wrong."""

    ms: list[float]  # of each step
    tokens: int = 0  # of one step
    pairs: float = 0  # visible (query, key) pairs of one step and head, the mean over the layers
    memory: dict[str, float] = dataclasses.field(default_factory=dict)  # as in metrics.jsonl
    kernels: dict[str, str] = dataclasses.field(default_factory=dict)
    failed: str | None = None


class RandomRows(Dataset[dict[str, Tensor]]):
    """Rows of random tokens in documents of `document` tokens: attention takes time by the
    document, memory by the row.
    """

    def __init__(self, vocab_size: int, seq_len: int, document: int) -> None:
        self.vocab_size, self.seq_len, self.document = vocab_size, seq_len, document

    def __getitem__(self, row: int) -> dict[str, Tensor]:
        draw = torch.Generator().manual_seed(row)
        tokens = torch.randint(self.vocab_size, (self.seq_len + 1,), generator=draw)
        doc_ids = torch.arange(self.seq_len) // self.document
        return {
            "tokens": tokens[:-1],
            "targets": tokens[1:],
            "doc_ids": doc_ids,
            "padding": torch.tensor(0),
        }


class Endless(Sampler[int]):
    """0, 1, 2, ..."""

    def __iter__(self) -> Iterator[int]:
        row = 0
        while True:
            yield row
            row += 1


class Watch(pl.Callback):
    """Milliseconds of each step, between which nothing waits for the device; at the end a batch of
    validation if asked for.
    """

    def __init__(self, device: str, validate: bool, after: Callable[[int], None] | None) -> None:
        self.validate, self.after = validate, after
        self.measured = Measured([])
        self.laps = Laps(device == "cuda")

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.laps.begin()

    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: StepBatch,
        batch_idx: int,
    ) -> None:
        self.laps.end()
        self.measured.tokens = sum(micro.tokens.numel() for micro in batch.micro)
        self.measured.pairs = sum(micro.pairs for micro in batch.micro)
        if self.after is not None:
            self.after(batch_idx + 1)
        self.laps.begin()
        if self.validate and batch_idx + 1 == trainer.max_steps:
            assert isinstance(pl_module, TrainingModule)
            pl_module.eval()
            with torch.compiler.set_stance("force_eager"):
                pl_module.validation_losses(batch.micro[0])


def rehearse(
    config: CompleteConfig,
    device: str,
    steps: int,
    document: int | None = None,
    validate: bool = False,
    after: Callable[[int], None] | None = None,
) -> Measured:
    """`steps` optimizer steps of `config` on rows of random tokens, each one document or documents
    of `document` tokens.

    With `validate` also one batch as validation has it; `after` is called with the number of each
    step that the device was given. Memory is that of this call on a GPU, of the process on a CPU.
    Running out of memory is an answer, not an error.
    """
    quiet_lightning()
    config = dataclasses.replace(config, max_steps=steps)
    assert config.model.vocab_size is not None
    rows = RandomRows(config.model.vocab_size, config.seq_len, document or config.seq_len)
    watch = Watch(device, validate, after)
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    try:
        loader = train_loader(
            rows,
            Endless(),
            config.batch_size,
            config.accumulate,
            min(config.workers, 1),
            pin=device == "cuda",
            windows=config.model.windows(),
        )
        trainer = lightning_trainer(config, device, steps, [watch])
        with within_memory(device):
            trainer.fit(TrainingModule(config), loader, weights_only=True)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        watch.measured.failed = OUT_OF_MEMORY
    watch.measured.ms = watch.laps.ms()
    watch.measured.memory = memory(torch.device(device))
    watch.measured.kernels = attention.kernels_run()
    return watch.measured


def in_child(
    config: CompleteConfig,
    device: str,
    steps: int,
    document: int | None,
    validate: bool,
    seconds: float,
) -> Measured:
    """`rehearse` in a process of its own, ended after `seconds`; whatever happens to it is
    `failed`, in one line.
    """
    request = {
        "config": run_folder.plain(config),
        "device": device,
        "steps": steps,
        "document": document,
    }
    answer = child("longctx.training.probe", request | {"validate": validate}, seconds)
    return Measured([], failed=answer) if isinstance(answer, str) else Measured(**answer)


def child(module: str, request: dict[str, Any], seconds: float) -> dict[str, Any] | str:
    """What `python -m module REQUEST OUT` writes to OUT, both files of JSON; one line where it
    writes nothing in time.
    """
    with tempfile.TemporaryDirectory() as scratch:
        asked, out = Path(scratch, "request.json"), Path(scratch, "out.json")
        asked.write_text(json.dumps(request))
        command = [sys.executable, "-m", module, str(asked), str(out)]
        here = str(Path(__file__).parents[2])
        env = os.environ | {
            "PYTHONPATH": os.pathsep.join(filter(None, [here, os.environ.get("PYTHONPATH")]))
        }
        try:
            done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=seconds)
        except subprocess.TimeoutExpired:
            return f"took longer than {seconds:.0f} s"
        if out.exists():
            found: dict[str, Any] = json.loads(out.read_text())
            return found
    if done.returncode == -9:
        return f"{OUT_OF_MEMORY}: the process was killed"
    said = [line for line in done.stderr.splitlines() if line.strip()] or [
        f"exit code {done.returncode}"
    ]
    return said[-1]


def config_of(plain: dict[str, Any]) -> CompleteConfig:
    """The configuration that `run_folder.plain` made `plain` of."""
    parts = {field.name: field.default_factory for field in dataclasses.fields(CompleteConfig)}
    made = {
        key: made_by(**x) if dataclasses.is_dataclass(made_by := parts[key]) else x
        for key, x in plain.items()
    }
    return CompleteConfig(**made)


def main(argv: list[str]) -> None:
    """The child's side of `in_child`."""
    request = json.loads(Path(argv[0]).read_text())
    config = config_of(request.pop("config"))
    measured = rehearse(config, **request)
    Path(argv[1]).write_text(json.dumps(dataclasses.asdict(measured)))


if __name__ == "__main__":
    main(sys.argv[1:])
