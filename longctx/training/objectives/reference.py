"""The reference of DPO and KTO: log-probabilities of all answers by the model as training begins.

They are computed once, so no second model is in memory. The run's folder keeps them, so resuming
does not need the weights of init=. Checkpoints hold the hash of that file.
"""

from __future__ import annotations

import hashlib
from contextlib import nullcontext
from typing import Any

import numpy as np
import safetensors.numpy
import torch

from longctx import files, untrusted
from longctx.data import Data
from longctx.data.dataset import SPLITS, SourcePart
from longctx.data.preferences import SIDES
from longctx.data.store import progress
from longctx.parallel.mesh import Parallel
from longctx.runs import checkpoints
from longctx.training.batches import dealt
from longctx.training.objectives.answers import answers, collate
from longctx.training.run import Run
from longctx.training.validation import scoring

FILE = "reference.safetensors"  # in the run's folder
HEADER = 1 << 20  # bytes of a file before its numbers, at most


def prepare(run: Run, data: Data, module: Any, parallel: Parallel) -> dict[str, Any]:
    """Give every part of `data` its log-probabilities by the model as it is now, with LoRA's
    additions still zero; return the hash of the run's file, for checkpoints. A resumed run reads
    that file; ValueError if it is another.
    """
    if not run.caches_reference:
        return {}
    path = run.folder / FILE
    if run.checkpoint is None:
        content = safetensors.numpy.save(
            {name: computed(run, part, module, parallel) for name, part in data.parts.items()}
        )
        if parallel.is_first:
            with files.atomic(path) as partial:
                partial.write_bytes(content)
    else:
        limit = HEADER + sum(4 * SIDES * len(part.store) for part in data.parts.values())
        problem = "not the log-probabilities of this run ({}); put its own file back"
        with untrusted.named(path, problem, (OSError, ValueError)):
            with untrusted.open_file(path, limit) as file:
                content = file.read(limit)
            # This run has written no other file with this hash: its tables need no check
            if hash_of(content) != checkpoints.read(run.checkpoint).get("objective"):
                raise ValueError(f"{run.checkpoint.name} has another hash")
    for name, table in safetensors.numpy.load(content).items():
        data.parts[name].reference = table
    return hash_of(content)


def hash_of(content: bytes) -> dict[str, Any]:
    return {"reference": hashlib.sha256(content).hexdigest()}


def computed(run: Run, part: SourcePart, module: Any, parallel: Parallel) -> np.ndarray:
    """Return log p of all answers of `part`, (documents, SIDES) float32, the same on every rank."""
    table = torch.zeros(len(part.store), SIDES, dtype=torch.float64, device=parallel.device)
    seen = 0
    shown = progress("log-probabilities of the reference", len(part.store))
    with shown if parallel.is_first else nullcontext() as show:
        for every in map(part.sequences, SPLITS):
            for numbers, is_new in dealt(len(every), run.workload.batch_size, parallel):
                sequences = [every[number] for number in numbers]
                batch = collate(sequences).to(parallel.device)
                with scoring(module, parallel):
                    logp = answers(module.model, batch).logp  # type: ignore[arg-type]
                for sequence, row in zip(sequences, logp.double(), strict=True):
                    documents = sequence["documents"].to(parallel.device)
                    seen += len(documents) * parallel.data_ranks
                    if is_new:
                        table[documents] += parallel.counted_once(1) * row[: len(documents)]
                if show is not None:
                    show(min(seen, len(part.store)), 0)
    return parallel.all_reduce_sum(table).float().cpu().numpy()
