"""context.check: before a run, compare a small step of all ranks with the same step of one rank.

It is the run's own step on the run's own sequences, cut short, with few layers and random weights:

1. The leak probe changes a token. Logits of later tokens of its document may change, and no others.
   In another library packed sequences have leaked between ranks without an error (trl#6843).
2. Loss, gradient norm and every gradient of a step over all ranks are compared with the same step
   on each rank alone. In fp32 they agree but for the order of sums. A run in bf16 is compared in
   bf16 too: all ranks may be no further from one rank's fp32 than one rank's bf16 is.

A second step leaves out targets so that some ranks have none. The length is not divisible.
"""

from __future__ import annotations

import gc
import hashlib
from dataclasses import replace
from itertools import islice
from typing import NamedTuple

import torch
from torch import Tensor

from longctx.attention.context_parallel import padded
from longctx.attention.description import AttentionConfig
from longctx.config.doors import ObjectiveConfig
from longctx.data import Data
from longctx.data.sequences import IGNORED
from longctx.model import lora
from longctx.parallel import sharding
from longctx.parallel.devices import check_attention
from longctx.parallel.mesh import Parallel
from longctx.training.batches import StepBatch, micro_batch
from longctx.training.compile_ahead import with_few_layers
from longctx.training.run import Run
from longctx.training.train_step import TrainState, optimizer_step

# Limits of the small run
LENGTH = {"cuda": 2048, "cpu": 192}  # tokens of a row
BATCH_SIZE = 2  # rows of a micro-batch
ACCUMULATE = 2
WORDS = 8192  # of the vocabulary, modulo which tokens are taken
WINDOW = 64  # keys: windows get shorter as rows do, but no shorter than this

# Allowed differences, relative to the largest value of a tensor.
FP32 = 1e-5
BF16 = 2.0**-6  # from fp32, and more if one rank is as far: twice the spacing of its numbers
TIMES = 2.0  # as far as one rank

Row = dict[str, Tensor]  # see longctx.data.sequences
Differences = dict[str, float]  # "loss", "gradient norm", "gradient of NAME" → relative difference


class CheckFailed(RuntimeError):
    """The ranks together compute something else than one of them; raised on every rank."""


class Finding(NamedTuple):
    """The result of a check that passed; None for a precision that the run or its attention does
    not have.
    """

    unchanged: int  # logits that no changed token may change
    fp32: Differences | None
    bf16: Differences | None  # from fp32

    def figures(self) -> dict[str, float]:
        """For metrics.jsonl."""
        each = {"fp32": self.fp32, "bf16": self.bf16}
        return {
            f"context_check/{part}_{name}": value
            for name, differences in each.items()
            if differences is not None
            for part, value in summary(differences).items()
        }

    def __str__(self) -> str:
        parts = [f"0 of {self.unchanged:,} logits of other documents changed"]
        if self.fp32 is not None:
            loss, gradients = summary(self.fp32).values()
            parts.append(f"loss differs by {loss:.0e}, gradients by {gradients:.0e}")
        if self.bf16 is not None:
            loss, gradients = summary(self.bf16).values()
            parts.append(f"bf16 from fp32 by {loss:.0e} and {gradients:.0e}, no more than alone")
        return "; ".join(parts)


class Result(NamedTuple):
    """The result of a step; of a gradient this rank holds `rows`."""

    loss: float  # mean over the scored tokens of all ranks
    grad_norm: float
    gradients: dict[str, Tensor]
    rows: dict[str, slice]


def compare_with_one(run: Run, data: Data, parallel: Parallel) -> Finding:
    """Check `run` before its first step, and leave no trace; every rank calls it.

    Raises CheckFailed, whose line names the difference and its size.
    """
    # Two steps: of whole rows, and of rows that leave some ranks without a target
    trial = small(run)
    groups = rows_of_groups(trial, data, parallel)
    fewer = [
        [without_targets(row, all_of_it=0 < number == len(groups) - 1) for row in rows]
        for number, rows in enumerate(groups)
    ]
    mine = [rows[parallel.data_rank] for rows in (groups, fewer)]
    all_rows = [[row for rows in step for row in rows] for step in (groups, fewer)]

    # In the run's own precision: all ranks, then each rank alone
    state = begin(trial, parallel)
    unchanged = probe(state, mine[0][: trial.workload.batch_size], parallel)
    ours = results(state, mine, parallel)
    del state
    alone = parallel.alone()
    theirs = results(begin(of_one_rank(trial), alone), all_rows, alone)

    # bf16 rounds differently on each layout: it is held to the distance of one rank from fp32
    fp32: Differences | None = None
    bf16: Differences | None = None
    if trial.workload.precision == "fp32":
        fp32 = differences(ours, theirs, parallel)
    else:
        precise, exactly = in_fp32(trial), parallel.in_fp32()
        alone = exactly.alone()
        takes_fp32 = has_fp32(precise)
        one_rank = of_one_rank(precise)
        if not takes_fp32:
            naive = replace(one_rank.workload, attention=AttentionConfig("naive"))
            one_rank = replace(one_rank, workload=naive)
        exact = results(begin(one_rank, alone), all_rows, alone)
        bf16 = differences(ours, exact, parallel)
        allowed = differences(theirs, exact, parallel)
        require(run, bf16, {name: max(TIMES * x, BF16) for name, x in allowed.items()}, " in bf16")
        if takes_fp32:
            ours = results(begin(precise, exactly), mine, exactly)
            fp32 = differences(ours, exact, parallel)
    if fp32 is not None:
        require(run, fp32, dict.fromkeys(fp32, FP32), "")
    forget(trial)
    return Finding(unchanged, fp32, bf16)


def has_fp32(run: Run) -> bool:
    """Return True if the run's attention can compute in fp32."""
    try:
        check_attention(run.config, run.workload.model, run.workload.device)
    except ValueError:
        return False
    return True


def rows_of_groups(run: Run, data: Data, parallel: Parallel) -> list[list[Row]]:
    """Return the first rows of each data rank, cut short; raise CheckFailed if ranks that share
    rows see different ones.
    """
    workload = run.workload
    assert workload.model.vocab_size is not None
    order = data.order(run.config.seed, parallel.data_rank, workload.data_ranks, 0)
    rows = [
        data.train[number] for number in islice(order, workload.batch_size * workload.accumulate)
    ]
    cuts = [cut(row, workload.seq_len, workload.model.vocab_size) for row in rows]
    every = parallel.all_gather_objects(([hash_of(row) for row in rows], cuts))
    for rank, (hashes, _) in enumerate(every):
        first = rank - rank % workload.context
        if hashes != every[first][0]:
            raise failed(run, f"ranks {first} and {rank} share rows, and have different tokens")
    return [rows for _, rows in every[:: workload.context]]


def begin(run: Run, parallel: Parallel) -> TrainState:
    """Return a model with its optimizer; LoRA adds something, unlike at the start of a run."""
    # B of LoRA begins with zeros, with which A has no gradient; with large numbers rounding grows
    state, r = TrainState(run, parallel), 0.05
    with torch.no_grad():
        for layer in lora.layers(state.module.model):
            sharding.draw(
                layer.lora_b, lambda x: x.copy_(torch.linspace(-r, r, x.numel()).view(x.shape))
            )
    return state


def probe(state: TrainState, rows: list[Row], parallel: Parallel) -> int:
    """Change a token of the first document of each row, then of its last; return the number of
    logits that must not change, and have not.
    """
    unchanged, problem = 0, None
    before = logits(state, rows, parallel)
    for which in (0, -1):
        changed, reached, later = [], [], []
        for row in rows:
            start, count = documents(row["doc_ids"], int(row["padding"]))[which]
            changed_at = start + (count - 2) // 2
            tokens = row["tokens"].clone()
            tokens[changed_at] = (tokens[changed_at] + 1) % before.shape[2]
            changed.append(row | {"tokens": tokens})
            positions = torch.arange(len(tokens))
            same = row["doc_ids"] == row["doc_ids"][changed_at]
            reached.append(same & (positions >= changed_at))
            later.append(same & (positions > changed_at))
        # (B, T): logits that differ at each token; NaN differs from itself
        differ = (logits(state, changed, parallel) != before).sum(2).cpu()
        words = before.shape[2]
        may, must = torch.stack(reached), torch.stack(later)
        unchanged += int((~may).sum()) * words
        leaks = differ.masked_fill(may, 0)
        if leaks.any():
            b, t = leaks.nonzero()[0].tolist()
            problem = problem or (
                f"a changed token changes {int(leaks.sum()):,} of {int((~may).sum()) * words:,} "
                f"logits of other documents or before it, first at token {t} of row {b}"
            )
        if not differ[must].any():
            problem = problem or "a changed token changes no logit after it in its own document"
    problem = parallel.first_problem(problem)
    if problem is not None:
        raise failed(state.run, problem)
    total = torch.tensor(parallel.counted_once(unchanged), device=parallel.device)
    return int(parallel.all_reduce_sum(total))


def logits(state: TrainState, rows: list[Row], parallel: Parallel) -> Tensor:
    """Return the logits (B, T, V) of `rows`, by the forward of training."""
    batch = micro_batch(rows).to(parallel.device)
    with parallel.autocast():
        scores: Tensor = state.module.model(batch.tokens, None, batch.mask)
    return scores.detach()


def results(state: TrainState, steps: list[list[Row]], parallel: Parallel) -> list[Result]:
    """Return the result of each step; `steps` are the rows of this rank."""
    size, step_results = state.run.workload.batch_size, []
    for rows in steps:
        groups = [rows[i : i + size] for i in range(0, len(rows), size)]
        batch = StepBatch([micro_batch(group) for group in groups]).to(parallel.device)
        gradients: dict[str, Tensor] = {}

        def keep(part: str, kept: dict[str, Tensor] = gradients) -> None:
            if part == "backward":  # the last micro-batch's has the sum
                for name, p in state.module.model.named_parameters():
                    if p.grad is not None:
                        kept[name] = sharding.local(p.grad).clone()

        total = optimizer_step(state, batch, parallel, keep)
        weights = dict(state.module.model.named_parameters())
        scored = torch.tensor(float(parallel.counted_once(batch.scored)), device=parallel.device)
        loss = float(parallel.all_reduce_sum(total) / parallel.all_reduce_sum(scored).clamp(min=1))
        rows_here = {name: sharding.rows(weights[name]) for name in gradients}
        step_results.append(Result(loss, float(state.module.grad_norm), gradients, rows_here))
    return step_results


def differences(ours: list[Result], theirs: list[Result], parallel: Parallel) -> Differences:
    """Return the largest difference of any step and rank, by name; `theirs` are of one rank."""
    of_step: list[Differences] = []
    for mine, expected in zip(ours, theirs, strict=True):
        norms = mine.grad_norm, expected.grad_norm
        pairs = {"loss": (mine.loss, expected.loss), "gradient norm": norms}
        step = {name: relative(torch.tensor(x), torch.tensor(y)) for name, (x, y) in pairs.items()}
        for name, exact in expected.gradients.items():
            there = mine.gradients.get(name)
            part = exact[mine.rows[name]] if there is not None else exact
            step[f"gradient of {name}"] = relative(
                torch.zeros_like(exact) if there is None else there, part, exact
            )
        of_step.append(step)
    values = torch.tensor([list(step.values()) for step in of_step]).amax(0).to(parallel.device)
    return dict(zip(of_step[0], parallel.all_reduce_max(values).tolist(), strict=True))


def relative(x: Tensor, y: Tensor, reference: Tensor | None = None) -> float:
    """Return the largest difference of x and y, relative to the largest value of y, or of the
    `reference` that y is a part of; infinite if a value is NaN.
    """
    if not x.numel():
        return 0.0
    tiny = torch.finfo(y.dtype).tiny
    largest = (y if reference is None else reference).abs().max().clamp(min=tiny)
    return float(((x - y).abs().max() / largest).nan_to_num(nan=torch.inf))


def summary(differences: Differences) -> Differences:
    """Return the difference of the loss, and the largest of the gradients and their norm."""
    gradients = max(x for name, x in differences.items() if name != "loss")
    return {"loss": differences["loss"], "gradients": gradients}


def require(run: Run, differences: Differences, allowed: Differences, where: str) -> None:
    """Raise CheckFailed if a difference is more than allowed; it names a weight if it can."""
    over = {name: x / allowed[name] for name, x in differences.items() if not x <= allowed[name]}
    if over:
        name = max(over, key=lambda name: (name.startswith("gradient of"), over[name]))
        raise failed(
            run,
            f"the {name} of a step{where} differs by {differences[name]:.1e} from one device's in "
            f"fp32, where {allowed[name]:.0e} is allowed",
        )


def failed(run: Run, problem: str) -> CheckFailed:
    """Return the error, with the layout of the run and a remedy."""
    workload = run.workload
    shared = f" context.method={workload.context_method}" if workload.context > 1 else ""
    of_plugin = ""
    if run.config.plugins:
        of_plugin = "; a plugin's loss from logits is divided by model.context.ranks.count"
    return CheckFailed(
        f"context.check=true: {problem} (strategy={workload.strategy} context={workload.context}"
        f"{shared} attention={workload.attention.backend} memory={workload.memory.policy}); "
        "nothing was trained: try another context.method or attention, or fewer devices"
        f"{of_plugin}"
    )


def forget(run: Run) -> None:
    """Leave nothing behind that the run would notice: memory, or compiled code for short rows."""
    if run.workload.compile:
        torch._dynamo.reset()
    gc.collect()
    if run.workload.device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def small(run: Run) -> Run:
    """Return `run` with short rows and few layers, and a learning rate of 0.

    Everything stays that decides how ranks share a step: heads and their size, hidden size,
    attention, memory policy, LoRA, the layout, the precision. fp8 becomes bf16: with one scale per
    tensor, the rounding of every token depends on all others. Weights are random, so none are
    packed. Objectives that read more than documents are checked with cross entropy.
    """
    workload = run.workload
    length = min(workload.seq_len, LENGTH[workload.device])
    # Padding needs a check too: take a length of which the ranks are no divisor
    if workload.context > 1 and length % workload.context == 0:
        length -= 1
    # The balance of experts counts padding, so training refuses it
    while workload.model.experts.balance and length != padded(
        length, workload.context, workload.context_method
    ):
        length -= 1
    model = with_few_layers(workload.model, workload.memory.keep_every or 1)
    model = replace(model, vocab_size=min(model.vocab_size or WORDS, WORDS))
    if model.window is not None:
        scaled = max(WINDOW, model.window * length // workload.seq_len)
        model = replace(model, window=min(model.window, scaled))
    memory = workload.memory
    if memory.mlp_tile:
        tile = max(1, length // (3 * workload.context))
        memory = replace(memory, mlp_tile=min(memory.mlp_tile, tile))
    workload = replace(
        workload,
        seq_len=length,
        batch_size=min(workload.batch_size, BATCH_SIZE),
        accumulate=ACCUMULATE,
        model=model,
        memory=memory,
        precision="bf16" if workload.precision == "fp8" else workload.precision,
        bf16_layers=(),
        lora=replace(workload.lora, base=None),
    )
    config = replace(run.config, init=None, seq_len_schedule=None)
    # Its sequences would need more than tokens, targets and documents
    if config.objective.traits.collate is not None:
        config = replace(config, objective=ObjectiveConfig())
    return replace(run, config=config, workload=workload, lr=0.0, checkpoint=None, steps_done=0)


def of_one_rank(run: Run) -> Run:
    """Return `run` with the steps of all ranks on one, without torch.compile."""
    workload = run.workload
    alone = replace(
        workload,
        devices=1,
        strategy="none",
        context=1,
        accumulate=workload.accumulate * workload.data_ranks,
        compile=False,
        graphs="false",
    )
    return replace(run, workload=alone)


def in_fp32(run: Run) -> Run:
    """Return `run` in fp32, without torch.compile, which was tried in bf16."""
    workload = replace(run.workload, precision="fp32", compile=False)
    return replace(run, workload=workload, config=replace(run.config, precision="fp32"))


def hash_of(row: Row) -> str:
    """Return a hash of all tensors of `row`: its tokens, targets, documents and padding."""
    return hashlib.sha256(b"".join(row[key].numpy().tobytes() for key in sorted(row))).hexdigest()


def cut(row: Row, length: int, words: int) -> Row:
    """Return `length` tokens of `row` around a border of documents; a row without one gets one."""
    tokens, targets, doc_ids = (row[key] for key in ("tokens", "targets", "doc_ids"))
    real = len(tokens) - int(row["padding"])
    borders = (doc_ids[1:real] != doc_ids[: max(real - 1, 0)]).nonzero().flatten() + 1
    middle = int(borders[len(borders) // 2]) if len(borders) else 0
    start = max(0, min(middle - length // 2, len(tokens) - length))
    part = slice(start, start + length)
    tokens, targets, doc_ids = tokens[part] % words, targets[part].clone(), doc_ids[part].clone()
    padding = max(0, start + length - max(real, start))

    two = len(doc_ids[: length - padding].unique()) > 1
    if not (two and documents(doc_ids, padding)):
        doc_ids, padding = (torch.arange(length) >= length // 2).long(), 0
        targets[length // 2 - 1] = IGNORED
    if bool((targets == IGNORED).all()):  # such as a long question of a conversation
        targets[:-1] = torch.where(doc_ids[1:] == doc_ids[:-1], tokens[1:], IGNORED)
    targets = torch.where(targets == IGNORED, targets, targets % words)
    values = {"tokens": tokens, "targets": targets, "doc_ids": doc_ids}
    return values | {"padding": torch.tensor(padding)}


def documents(doc_ids: Tensor, padding: int) -> list[tuple[int, int]]:
    """Return first token and number of tokens of each document of at least two tokens."""
    _, counts = doc_ids[: len(doc_ids) - padding].unique_consecutive(return_counts=True)
    ends = counts.cumsum(0)
    spans = zip((ends - counts).tolist(), counts.tolist(), strict=True)
    return [(start, count) for start, count in spans if count > 1]


def without_targets(row: Row, all_of_it: bool) -> Row:
    """Return `row` without targets in its second half, or in all of it."""
    targets = row["targets"].clone()
    targets[0 if all_of_it else len(targets) // 2 :] = IGNORED
    return row | {"targets": targets}
