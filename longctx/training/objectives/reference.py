"""The reference's log-probabilities of all answers, computed once: no second model is kept.

They are cached beside the tokens by a fingerprint of weights and data, and a run that finds them
computes its first sequences again to compare. The run's folder has a copy, so resuming needs
neither the cache nor the weights of init=.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from longctx import files
from longctx.data import Data
from longctx.data.cache import cached, contents, fingerprint, is_whole
from longctx.data.dataset import SPLITS, Part
from longctx.data.preferences import SIDES
from longctx.data.store import progress
from longctx.model import huggingface
from longctx.parallel.mesh import Parallel
from longctx.training.batches import NO_WINDOW, dealt
from longctx.training.objectives.preferences import answers, collate
from longctx.training.run import Run
from longctx.training.validation import scoring

COPY = "reference.npz"  # in the run's folder
TABLE = "log_p.npy"  # in the cache
LARGEST = 0.05  # nats of a token by which a cached value may differ


def prepare(run: Run, data: Data, module: Any, parallel: Parallel) -> None:
    """Give every part of `data` its log-probabilities by the model as it is now, with LoRA's
    additions still zero; a resumed run reads its copy.

    Raises ValueError, on every rank, if cached ones are not those of the model.
    """
    if not run.caches_reference:
        return
    copy = run.folder / COPY
    if run.checkpoint is not None:
        with np.load(copy) as arrays:
            for name, part in data.parts.items():
                part.reference = arrays[name or "data"]
        return
    weights = contents(huggingface.with_weights(run.config.init or "", "init"))
    for part in data.parts.values():
        key = fingerprint([part.fingerprint, part.seq_len, run.workload.precision, weights])
        folder = part.config.cache_folder() / "references" / key
        # Rank 0 reads the cache for all: other machines may have none, or another one
        is_cached = parallel.is_first and is_whole(folder)
        table, *_ = parallel.all_gather_objects(np.load(folder / TABLE) if is_cached else None)
        if table is not None:
            compare(run, part, folder, table, module, parallel)
        else:
            table = computed(run, part, module, parallel)
            if parallel.is_first:
                cached(folder, lambda at, table=table: np.save(at / TABLE, table))  # type: ignore[misc]
        part.reference = table
    if parallel.is_first:
        tables: dict[str, Any] = {
            name or "data": part.reference for name, part in data.parts.items()
        }
        with files.atomic(copy) as file, file.open("wb") as opened:
            np.savez(opened, **tables)


def computed(run: Run, part: Part, module: Any, parallel: Parallel) -> np.ndarray:
    """Return log p of all answers of `part`, (documents, SIDES) float32, the same on every rank."""
    table = torch.zeros(len(part.store), SIDES, dtype=torch.float64, device=parallel.device)
    seen = 0
    shown = progress("log-probabilities of the reference", len(part.store))
    with shown if parallel.is_first else nullcontext() as show:
        for split in SPLITS:
            for documents, log_p, is_new in log_ps(run, part, split, module, parallel):
                if is_new:
                    table[documents] += parallel.counted_once(1) * log_p
                seen += len(documents) * parallel.data_ranks
                if show is not None:
                    show(min(seen, len(part.store)), 0)
    return parallel.all_reduce_sum(table).float().cpu().numpy()


def log_ps(
    run: Run, part: Part, split: str, module: Any, parallel: Parallel
) -> Iterator[tuple[Tensor, Tensor, bool]]:
    """Yield documents (n,) and their log p (n, SIDES) of this rank's sequences, and True if they
    are new, see `dealt`.
    """
    rows = part.rows(split)
    for numbers, is_new in dealt(len(rows), run.workload.batch_size, parallel):
        sequences = [rows[number] for number in numbers]
        batch = collate(sequences, NO_WINDOW).to(parallel.device)
        with scoring(module, parallel):
            policy = answers(module.model, batch)  # type: ignore[arg-type]
        counts = [len(sequence["documents"]) for sequence in sequences]
        log_p = torch.cat([row[:count] for row, count in zip(policy.logp, counts, strict=True)])
        documents = torch.cat([sequence["documents"] for sequence in sequences])
        yield documents.to(parallel.device), log_p.double(), is_new


def compare(
    run: Run, part: Part, folder: Path, table: np.ndarray, module: Any, parallel: Parallel
) -> None:
    """Raise ValueError, on every rank, if the first values of the cached `table` are not those of
    the model.
    """
    documents, log_p, _ = next(log_ps(run, part, "train", module, parallel))
    cached_log_p = torch.from_numpy(table).to(parallel.device)[documents]
    off = (cached_log_p - log_p).abs().max() / part.seq_len
    differs = f"{folder}: not the log-probabilities of this model by {off:.2g} nats a token"
    problem = parallel.first_problem(None if off < LARGEST else differs)
    if problem is not None:
        raise ValueError(f"{problem}; remove it")
