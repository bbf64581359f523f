"""The reference of DPO and KTO: log-probabilities of all answers by the model as training begins.

They are computed once, so no second model is in memory. They are cached beside the tokens by a
fingerprint of model, weights and data, and a run that finds them computes its first sequences again
to compare. The run's folder has a copy, so resuming needs neither the cache nor the weights of
init=. Checkpoints hold the hash of that copy.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy
import torch
from safetensors import SafetensorError
from torch import Tensor

from longctx import files, untrusted
from longctx.data import Data
from longctx.data.cache import cached, contents, fingerprint, is_whole
from longctx.data.dataset import SPLITS, SourcePart
from longctx.data.preferences import SIDES
from longctx.data.store import Store, progress
from longctx.parallel.mesh import Parallel
from longctx.runs import checkpoints
from longctx.spec.model_config import weights_reader
from longctx.training.batches import NO_WINDOW, dealt
from longctx.training.objectives.answers import LogP, answers, collate
from longctx.training.run import Run
from longctx.training.validation import scoring

FILE = "reference.safetensors"  # in the run's folder, and in the cache
HEADER = 1 << 20  # bytes of a file before its numbers, at most
TOLERANCE = 0.05  # nats of an answer's token by which cached values may differ

Tables = dict[str, np.ndarray]  # (documents, SIDES) float32 of each source


def prepare(run: Run, data: Data, module: Any, parallel: Parallel) -> dict[str, Any]:
    """Give every part of `data` its log-probabilities by the model as it is now, with LoRA's
    additions still zero; return the hash of the run's copy, for checkpoints. A resumed run reads
    that copy.

    Raises ValueError if values of the cache are not those of the model, or a copy is not the run's.
    """
    if not run.caches_reference:
        return {}
    path, stores = run.folder / FILE, {name: part.store for name, part in data.parts.items()}
    if run.checkpoint is None:
        tables = {name: table_of(run, part, module, parallel) for name, part in data.parts.items()}
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


def table_of(run: Run, part: SourcePart, module: Any, parallel: Parallel) -> np.ndarray:
    """Return log p of all answers of `part` from the cache, or compute and cache it."""
    key = fingerprint([FILE, part.fingerprint, part.seq_len, described(run)])
    folder = part.config.cache_folder() / "references" / key
    # Rank 0 reads the cache for all: other machines may have none, or another one
    found: Tables = {}
    if parallel.is_first and is_whole(folder):
        found, _ = read(folder / FILE, {"": part.store})
    table, *_ = parallel.all_gather_objects(found.get(""))
    if table is not None:
        compare(run, part, folder, table, module, parallel)
        return table
    table = computed(run, part, module, parallel)
    if parallel.is_first:
        cached(folder, lambda at: safetensors.numpy.save_file({"": table}, at / FILE))
    return table


def described(run: Run) -> list[Any]:
    """Return the values that decide the reference's log-probabilities of an answer."""
    workload = run.workload
    return [
        contents(weights_reader().with_weights(run.config.init or "", "init")),
        # The same weights compute otherwise with rope=, or with an edited config.json
        asdict(workload.model),
        workload.lora.base,
        workload.precision,
        workload.bf16_layers,
    ]


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


def compare(
    run: Run, part: SourcePart, folder: Path, table: np.ndarray, module: Any, parallel: Parallel
) -> None:
    """Raise ValueError, on every rank, if the first values of the cached `table` are not those of
    the model.
    """
    documents, policy, _ = next(log_ps(run, part, "train", module, parallel))
    cached_log_p = torch.from_numpy(table).to(parallel.device)[documents]
    # Of all answers together: in bf16 a single token may differ by more
    off = (cached_log_p - policy.logp).abs().sum() / policy.tokens.sum()
    differs = f"{folder}: not the log-probabilities of this model by {off:.2g} nats a token"
    problem = parallel.first_problem(None if off < TOLERANCE else differs)
    if problem is not None:
        raise ValueError(f"{problem}; remove it")
