"""context.check: before a run, compare a small step of all ranks with the same step of one rank.

It is the run's own step on the run's own sequences, cut short, with few layers and random weights.
Loss, gradient norm and every gradient of all ranks are compared with those of each rank alone. In
fp32 they agree but for the order of sums. A run in bf16 may be no further from one rank's fp32 than
one rank's bf16 is. Documents that leak between ranks change gradients: in another library they did,
without an error (trl#6843). The last sequences have few targets, so that some ranks have none, and
the length is not divisible.
"""

from __future__ import annotations

import gc
from dataclasses import replace
from itertools import islice
from typing import Any, NamedTuple

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
from longctx.training.run import Run
from longctx.training.train_step import TrainState, optimizer_step

# Limits of the small run
LENGTH = {"cuda": 2048, "cpu": 192}  # tokens of a sequence
BATCH_SIZE = 2  # sequences of a micro-batch
ACCUMULATE = 2
WORDS = 8192  # of the vocabulary, modulo which tokens are taken
WINDOW = 64  # keys: windows get shorter as sequences do, but no shorter than this

# Allowed differences, relative to the largest value of a tensor
FP32 = 1e-5
BF16 = 2.0**-6  # from fp32, and more if one rank is as far: twice the spacing of its numbers
TIMES = 2.0  # as far as one rank

Sequence = dict[str, Tensor]  # see longctx.data.sequences
Differences = dict[str, float]  # "loss", "gradient norm", "gradient of NAME" → relative difference


class CheckFailed(RuntimeError):
    """The ranks together compute something else than one of them; raised on every rank."""


class Result(NamedTuple):
    """The result of a step; of a gradient this rank holds `slices`."""

    loss: float  # mean over the target tokens of all ranks
    grad_norm: float
    gradients: dict[str, Tensor]
    slices: dict[str, slice]


def compare_with_one(run: Run, data: Data, parallel: Parallel) -> Differences:
    """Check `run` before its first step, and leave no trace; every rank calls it. Return the
    differences of the loss, and of the gradient that differs most.

    Raises CheckFailed, whose line names the difference and its size.
    """
    trial = small(run)
    groups = [sequences_of(trial, data, rank) for rank in range(trial.workload.data_ranks)]
    mine, every = groups[parallel.data_rank], [x for group in groups for x in group]
    work, alone = trial.workload, parallel.alone()
    one: dict[str, Any] = {"devices": 1, "strategy": "none", "context": 1, "compile": False}
    one |= {"graphs": "false", "accumulate": work.accumulate * work.data_ranks}
    one_rank = replace(trial, workload=replace(work, **one))
    ours = result(TrainState(trial, parallel), mine, parallel)
    theirs = result(TrainState(one_rank, alone), every, alone)
    found = differences(ours, theirs, parallel)
    # bf16 rounds differently on each layout: it is held to the distance of one rank from fp32. Then
    # all ranks are compared in fp32 too, where smaller mistakes show, if the attention has it.
    if work.precision != "fp32":
        precise: dict[str, Any] = {"precision": "fp32", "compile": False}
        config, exactly = replace(trial.config, precision="fp32"), parallel.in_fp32()
        in_fp32 = replace(trial, config=config, workload=replace(work, **precise))
        try:
            check_attention(config, work.model, work.device)
            has_fp32 = True
        except ValueError:
            has_fp32, one["attention"] = False, AttentionConfig("naive")
        alone = exactly.alone()
        one_rank = replace(in_fp32, workload=replace(in_fp32.workload, **one))
        exact = result(TrainState(one_rank, alone), every, alone)
        found = differences(ours, exact, parallel)
        of_one = differences(theirs, exact, parallel)
        require(found, {name: max(TIMES * x, BF16) for name, x in of_one.items()})
        if has_fp32:
            ours = result(TrainState(in_fp32, exactly), mine, exactly)
            found = differences(ours, exact, parallel)
            require(found, dict.fromkeys(found, FP32))
    else:
        require(found, dict.fromkeys(found, FP32))
    # Leave nothing behind that the run would notice: memory, or code compiled for short sequences
    if work.compile:
        torch._dynamo.reset()
    gc.collect()
    if work.device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    largest = max(x for name, x in found.items() if name != "loss")
    return {"loss": found["loss"], "gradients": largest}


def require(found: Differences, allowed: Differences) -> None:
    """Raise CheckFailed if a difference is more than allowed; it names a weight if it can."""
    over = {name: x / allowed[name] for name, x in found.items() if not x <= allowed[name]}
    if over:
        name = max(over, key=lambda name: (name.startswith("gradient of"), over[name]))
        raise CheckFailed(
            f"context.check=true: the {name} of a step differs by {found[name]:.1e} from one "
            f"device's in fp32, {allowed[name]:.0e} is allowed; nothing was trained: try another "
            "context.method or attention, or fewer devices; a plugin's loss from logits is divided "
            "by model.context.ranks.count"
        )


def result(state: TrainState, sequences: list[Sequence], parallel: Parallel) -> Result:
    """Return the result of a step on the `sequences` of this rank."""
    # B of LoRA begins with zeros, with which A has no gradient; with large numbers rounding grows
    with torch.no_grad():
        for layer in lora.layers(state.module.model):
            n = layer.lora_b.numel()
            values = torch.linspace(-0.05, 0.05, n).view(layer.lora_b.shape)
            sharding.write_rows_of(values, layer.lora_b)
    size, gradients = state.run.workload.batch_size, dict[str, Tensor]()
    groups = [sequences[i : i + size] for i in range(0, len(sequences), size)]
    batch = StepBatch([micro_batch(group) for group in groups]).to(parallel.device)

    def keep(part: str) -> None:
        if part == "backward":  # the last micro-batch's has the sum
            # Before a backward fsdp may show whole weights, which have no gradient
            for name, p in state.module.model.named_parameters():
                if p.grad is not None:
                    gradients[name] = sharding.local(p.grad).clone()

    total = optimizer_step(state, batch, parallel, keep)
    scored = torch.tensor(float(parallel.counted_once(batch.scored)), device=parallel.device)
    loss = float(parallel.all_reduce_sum(total) / parallel.all_reduce_sum(scored).clamp(min=1))
    weights = dict(state.module.model.named_parameters())
    slices = {name: sharding.rows(weights[name]) for name in gradients}
    return Result(loss, float(state.module.grad_norm), gradients, slices)


def differences(ours: Result, theirs: Result, parallel: Parallel) -> Differences:
    """Return the largest difference of any rank, by name; `theirs` is of one rank."""
    norms = ours.grad_norm, theirs.grad_norm
    numbers = {"loss": (ours.loss, theirs.loss), "gradient norm": norms}
    found = {name: relative(torch.tensor(x), torch.tensor(y)) for name, (x, y) in numbers.items()}
    for name, exact in theirs.gradients.items():
        there = ours.gradients.get(name, torch.zeros_like(exact))
        part = exact[ours.slices[name]] if name in ours.slices else exact
        found[f"gradient of {name}"] = relative(there, part, exact)
    values = parallel.all_reduce_max(torch.tensor(list(found.values()), device=parallel.device))
    return dict(zip(found, values.tolist(), strict=True))


def relative(x: Tensor, y: Tensor, reference: Tensor | None = None) -> float:
    """Return the largest difference of x and y, relative to the largest value of y, or of the
    `reference` that y is a part of; infinite if a value is NaN.
    """
    if not x.numel():
        return 0.0
    tiny = torch.finfo(y.dtype).tiny
    largest = (y if reference is None else reference).abs().max().clamp(min=tiny)
    return float(((x - y).abs().max() / largest).nan_to_num(nan=torch.inf))


def small(run: Run) -> Run:
    """Return `run` with short sequences and few layers, and a learning rate of 0.

    Everything stays that decides how ranks share a step: heads and their size, hidden size,
    attention, memory policy, LoRA, the layout, the precision. fp8 becomes bf16: with one scale per
    tensor, the rounding of every token depends on all others. Weights are random, so none are
    packed. Objectives that read more than documents are checked with cross entropy.
    """
    workload, memory = run.workload, run.workload.memory
    length = min(workload.seq_len, LENGTH[workload.device])
    # Padding needs a check too: take a length of which the ranks are no divisor
    if workload.context > 1 and length % workload.context == 0:
        length -= 1
    # The balance of experts counts padding, so training refuses it
    while workload.model.experts.balance and length != padded(
        length, workload.context, workload.context_method
    ):
        length -= 1
    # The first layer of each sort, the blocks that are recomputed together, and one more
    kinds, together = workload.model.blocks(), (memory.keep_every or 1) + 1
    first = {kinds.index(kind) for kind in kinds} | set(range(min(len(kinds), together)))
    model = workload.model.with_layers(sorted(first))
    model = replace(model, vocab_size=min(model.vocab_size or WORDS, WORDS))
    if model.window is not None:
        scaled = max(WINDOW, model.window * length // workload.seq_len)
        model = replace(model, window=min(model.window, scaled))
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
    if config.objective.traits.collate is not None:
        config = replace(config, objective=ObjectiveConfig.usual())
    return replace(run, config=config, workload=workload, lr=0.0, checkpoint=None, steps_done=0)


def sequences_of(run: Run, data: Data, data_rank: int) -> list[Sequence]:
    """Return the first sequences of a data rank, cut short. The last have few targets: none in
    their second half, and none at all on the last of several data ranks.
    """
    workload = run.workload
    order = data.order(run.config.seed, data_rank, workload.data_ranks, 0)
    numbers = list(islice(order, workload.batch_size * workload.accumulate))
    cuts = [cut(data.train[n], workload.seq_len, workload.model.vocab_size or 1) for n in numbers]
    has_none = 0 < data_rank == workload.data_ranks - 1
    for sequence in cuts[-workload.batch_size :]:
        sequence["targets"][0 if has_none else workload.seq_len // 2 :] = IGNORED
    return cuts


def cut(sequence: Sequence, length: int, words: int) -> Sequence:
    """Return the first `length` tokens of `sequence`, of two documents at least."""
    tokens, targets, doc_ids = (sequence[x][:length] for x in ("tokens", "targets", "doc_ids"))
    padding = max(0, length - len(sequence["tokens"]) + int(sequence["padding"]))
    tokens, targets = tokens % words, torch.where(targets == IGNORED, targets, targets % words)
    if len(doc_ids[: length - padding].unique()) < 2:
        doc_ids, padding = (torch.arange(length) >= length // 2).long(), 0
        targets[length // 2 - 1] = IGNORED
    if bool((targets == IGNORED).all()):  # such as a long question of a conversation
        targets[:-1] = torch.where(doc_ids[1:] == doc_ids[:-1], tokens[1:], IGNORED)
    values = {"tokens": tokens, "targets": targets, "doc_ids": doc_ids}
    return values | {"padding": torch.tensor(padding)}
