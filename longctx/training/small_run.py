"""A run made small, for context.check: short rows of its own data, few layers, random weights.

What decides how ranks share the work stays: heads and their size, channels, attention, memory
policy, LoRA, the layout; and the precision, but bf16 for fp8, where one scale per tensor lets the
rounding of every token depend on all others.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace
from itertools import islice

import torch
from torch import Tensor

from longctx.config.model_config import GPTConfig
from longctx.data import Data, Mixture
from longctx.data.rows import IGNORED
from longctx.training.run import Run

LENGTH = {"cuda": 2048, "cpu": 192}  # tokens of a row, at most
BATCH_SIZE = 2  # rows of a micro-batch, at most
ACCUMULATE = 2
WORDS = 8192  # of the vocabulary, at most; the others stand for one of these
WINDOW = 64  # keys: windows get shorter as rows do, but no shorter than this

Row = dict[str, Tensor]  # see longctx.data.rows


def small(run: Run) -> Run:
    """`run` with short rows and few layers, which its steps never change."""
    work = run.workload
    length = min(work.seq_len, LENGTH[work.device])
    if work.context > 1 and length % work.context == 0:
        length -= 1
    model = with_few_layers(work.model, work.memory.keep_every or 1)
    model = replace(model, vocab_size=min(model.vocab_size or WORDS, WORDS))
    if model.window is not None:
        scaled = max(WINDOW, model.window * length // work.seq_len)
        model = replace(model, window=min(model.window, scaled))
    memory = work.memory
    if memory.mlp_tile:
        tile = max(1, length // (3 * work.context))
        memory = replace(memory, mlp_tile=min(memory.mlp_tile, tile))
    work = replace(
        work,
        seq_len=length,
        batch_size=min(work.batch_size, BATCH_SIZE),
        accumulate=ACCUMULATE,
        model=model,
        memory=memory,
        precision="bf16" if work.precision == "fp8" else work.precision,
        bf16_layers=(),
    )
    config = replace(run.config, init=None, seq_len_schedule=None)
    return replace(run, config=config, workload=work, lr=0.0, checkpoint=None, steps_done=0)


def with_few_layers(model: GPTConfig, keep_every: int) -> GPTConfig:
    """`model` with the first layer of each kind, and the first few: blocks that are recomputed
    together, and one more.
    """
    kinds = [(model.window_of(n), n in model.nope_layers) for n in range(model.layers)]
    first = {kinds.index(kind) for kind in kinds}
    chosen = sorted(first | set(range(min(model.layers, keep_every + 1))))
    windows = model.window_layers
    return replace(
        model,
        layers=len(chosen),
        nope_layers=[n for n, layer in enumerate(chosen) if layer in model.nope_layers],
        window_layers=None
        if windows is None
        else [n for n, layer in enumerate(chosen) if layer in windows],
    )


def of_one_rank(run: Run) -> Run:
    """The steps of all ranks of `run` on one, without torch.compile."""
    work = run.workload
    alone = replace(
        work,
        devices=1,
        strategy="none",
        context=1,
        accumulate=work.accumulate * work.data_ranks,
        compile=False,
        graphs="false",
    )
    return replace(run, workload=alone)


def in_fp32(run: Run) -> Run:
    """`run` in fp32, without torch.compile, which has been tried in bf16."""
    work = replace(run.workload, precision="fp32", compile=False)
    return replace(run, workload=work, config=replace(run.config, precision="fp32"))


def cut_rows(run: Run, data: Data | Mixture, data_rank: int) -> tuple[list[str], list[Row], int]:
    """Return the first rows of this data rank: their hashes, the rows cut short, and how many of
    them were given a border.
    """
    work = run.workload
    assert work.model.vocab_size is not None
    order = data.order(run.config.seed, data_rank, work.data_ranks, 0)
    rows = [data.train[number] for number in islice(order, work.batch_size * work.accumulate)]
    cuts = [cut(row, work.seq_len, work.model.vocab_size) for row in rows]
    hashes = [hash_of(row) for row in rows]
    return hashes, [row for row, _ in cuts], sum(has_new_border for _, has_new_border in cuts)


def hash_of(row: Row) -> str:
    """Return a hash of all tensors of `row`: its tokens, targets, documents and padding."""
    return hashlib.sha256(b"".join(row[key].numpy().tobytes() for key in sorted(row))).hexdigest()


def cut(row: Row, length: int, words: int) -> tuple[Row, bool]:
    """`length` tokens of `row` around a border of two documents, and whether it had to be made."""
    tokens, targets, doc_ids = (row[key] for key in ("tokens", "targets", "doc_ids"))
    real = len(tokens) - int(row["padding"])
    borders = (doc_ids[1:real] != doc_ids[: max(real - 1, 0)]).nonzero().flatten() + 1
    middle = int(borders[len(borders) // 2]) if len(borders) else 0
    start = max(0, min(middle - length // 2, len(tokens) - length))
    part = slice(start, start + length)
    tokens, targets, doc_ids = tokens[part] % words, targets[part].clone(), doc_ids[part].clone()
    padding = max(0, start + length - max(real, start))

    two = len(doc_ids[: length - padding].unique()) > 1
    needs_border = not (two and documents(doc_ids, padding))
    if needs_border:
        doc_ids, padding = (torch.arange(length) >= length // 2).long(), 0
        targets[length // 2 - 1] = IGNORED
    if bool((targets == IGNORED).all()):  # such as a long question of a conversation
        targets[:-1] = torch.where(doc_ids[1:] == doc_ids[:-1], tokens[1:], IGNORED)
    targets = torch.where(targets == IGNORED, targets, targets % words)
    values = {"tokens": tokens, "targets": targets, "doc_ids": doc_ids}
    return values | {"padding": torch.tensor(padding)}, needs_border


def documents(doc_ids: Tensor, padding: int) -> list[tuple[int, int]]:
    """First token and number of tokens of each document of at least two tokens."""
    _, counts = doc_ids[: len(doc_ids) - padding].unique_consecutive(return_counts=True)
    ends = counts.cumsum(0)
    spans = zip((ends - counts).tolist(), counts.tolist(), strict=True)
    return [(start, count) for start, count in spans if count > 1]


def without_targets(row: Row, all_of_it: bool) -> Row:
    """`row` whose second half, or all of it, is not scored."""
    targets = row["targets"].clone()
    targets[0 if all_of_it else len(targets) // 2 :] = IGNORED
    return row | {"targets": targets}
