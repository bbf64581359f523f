"""The reference of DPO and KTO: log-probabilities of all answers by the model as training begins.

They are computed once, so no second model is in memory. The run's folder keeps them, so resuming
does not need the weights of init=. Checkpoints hold the hash of that file.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy
import torch
from safetensors import SafetensorError
from torch import Tensor

from longctx import files, untrusted
from longctx.data import Data
from longctx.data.dataset import SPLITS, SourcePart
from longctx.data.preferences import SIDES
from longctx.data.store import Store, progress
from longctx.parallel.mesh import Parallel
from longctx.runs import checkpoints
from longctx.training.batches import NO_WINDOW, dealt
from longctx.training.objectives.answers import LogP, answers, collate
from longctx.training.run import Run
from longctx.training.validation import scoring

FILE = "reference.safetensors"  # in the run's folder
HEADER = 1 << 20  # bytes of a file before its numbers, at most

Tables = dict[str, np.ndarray]  # (documents, SIDES) float32 of each source


def prepare(run: Run, data: Data, module: Any, parallel: Parallel) -> dict[str, Any]:
    """Give every part of `data` its log-probabilities by the model as it is now, with LoRA's
    additions still zero; return the hash of the run's file, for checkpoints. A resumed run reads
    that file; ValueError if it is another.
    """
    if not run.caches_reference:
        return {}
    path, stores = run.folder / FILE, {name: part.store for name, part in data.parts.items()}
    if run.checkpoint is None:
        tables = {name: computed(run, part, module, parallel) for name, part in data.parts.items()}
        content = safetensors.numpy.save(tables)
        if parallel.is_first:
            with files.atomic(path) as partial:
                partial.write_bytes(content)
    else:
        saved = checkpoints.read(run.checkpoint).get("objective")
        problem = "not the log-probabilities of this run ({}); put its own file back"
        with untrusted.named(path, problem, (OSError, ValueError)):
            tables, content = read(path, stores)
            if saved != hash_of(content):
                raise ValueError(f"{run.checkpoint.name} has another hash")
    for name, part in data.parts.items():
        part.reference = tables[name]
    return hash_of(content)


def hash_of(content: bytes) -> dict[str, Any]:
    return {"reference": hashlib.sha256(content).hexdigest()}


def read(path: Path, stores: Mapping[str, Store]) -> tuple[Tables, bytes]:
    """Return the table of each of `stores` in the file at `path`, and its bytes; raise ValueError
    or OSError for any other file.
    """
    shapes = {name: (len(store), SIDES) for name, store in stores.items()}
    limit = HEADER + sum(4 * SIDES * len(store) for store in stores.values())
    with untrusted.open_file(path, limit) as file:
        content = file.read(limit)
    with untrusted.named(path, errors=(SafetensorError,)):
        tables = safetensors.numpy.load(content)
    found = {name: table.shape for name, table in tables.items() if table.dtype == np.float32}
    if found != shapes:
        raise ValueError(f"{path}: {found} instead of {shapes}")
    return tables, content


def computed(run: Run, part: SourcePart, module: Any, parallel: Parallel) -> np.ndarray:
    """Return log p of all answers of `part`, (documents, SIDES) float32, the same on every rank."""
    table = torch.zeros(len(part.store), SIDES, dtype=torch.float64, device=parallel.device)
    seen = 0
    shown = progress("log-probabilities of the reference", len(part.store))
    with shown if parallel.is_first else nullcontext() as show:
        for split in SPLITS:
            for documents, policy, is_new in log_ps(run, part, split, module, parallel):
                if is_new:
                    table[documents] += parallel.counted_once(1) * policy.logp.double()
                seen += len(documents) * parallel.data_ranks
                if show is not None:
                    show(min(seen, len(part.store)), 0)
    return parallel.all_reduce_sum(table).float().cpu().numpy()


def log_ps(
    run: Run, part: SourcePart, split: str, module: Any, parallel: Parallel
) -> Iterator[tuple[Tensor, LogP, bool]]:
    """Yield documents (n,) and their answers (n, SIDES) of this rank's sequences, and True if they
    are new, see `dealt`.
    """
    every = part.sequences(split)
    for numbers, is_new in dealt(len(every), run.workload.batch_size, parallel):
        sequences = [every[number] for number in numbers]
        batch = collate(sequences, NO_WINDOW).to(parallel.device)
        with scoring(module, parallel):
            policy = answers(module.model, batch)  # type: ignore[arg-type]
        counts = [len(sequence["documents"]) for sequence in sequences]
        filled = [
            torch.cat([row[:count] for row, count in zip(sums, counts, strict=True)])
            for sums in policy
        ]
        documents = torch.cat([sequence["documents"] for sequence in sequences])
        yield documents.to(parallel.device), LogP(*filled), is_new
