"""context.check: before a run, compare a small step of all ranks with the same step of one rank.

It is the run's own step on its own sequences, cut short, with few layers and random weights. In
fp32, all ranks and each rank alone agree but for the order of sums. Sums that cancel may differ by
more: by four times as much as one rank's do if its weights move by a rounding. A run in bf16 may
be no further from one rank's fp32 than one rank's bf16 is. The last sequences have few targets,
so that some ranks have none. In another library documents leaked between ranks without an error
(trl#6843).
"""

from __future__ import annotations

import gc
from dataclasses import replace
from itertools import chain, islice
from typing import Any

import torch
from torch import Tensor

from longctx.attention.context_parallel import padded
from longctx.attention.description import AttentionConfig
from longctx.config.doors import ObjectiveConfig
from longctx.data import Data
from longctx.data.sequences import IGNORED
from longctx.parallel import sharding
from longctx.parallel.devices import check_attention
from longctx.parallel.mesh import Parallel
from longctx.training.batches import micro_batch
from longctx.training.run import Run
from longctx.training.train_step import TrainState, optimizer_step

# Limits of the reduced run
LENGTH = {"cuda": 2048, "cpu": 192}  # tokens of a sequence
FEW = 2  # sequences of a micro-batch, and micro-batches
WORDS = 8192  # of the vocabulary, modulo which tokens are taken
WINDOW = 64  # keys: windows get shorter as sequences do, but no shorter than this

# Allowed differences, relative to the largest value of a tensor
FP32 = 1e-5  # of the norm of gradients ten times that: torch sums it less exactly on a CPU
BF16 = 2.0**-6  # from fp32, and more if one rank is as far: twice the spacing of its numbers
TIMES = 2.0  # as far as one rank
ROUNDED = 1 + 2.0**-23  # moves a number in fp32 to the next one, or the one after it

Sequence = dict[str, Tensor]  # see longctx.data.sequences
Result = dict[str, Tensor]  # "loss", "gradient norm", and "gradient of NAME", all its rows


class CheckFailed(RuntimeError):
    """The ranks together compute something else than one of them; raised on every rank."""


def compare_with_one(run: Run, data: Data, parallel: Parallel) -> dict[str, float]:
    """Check `run` before its first step, and leave no trace; every rank calls it. Return the
    differences of the loss, and of the gradient that differs most. Raises CheckFailed.
    """
    reduced = small(run)
    workload = reduced.workload
    groups = [sequences_of(reduced, data, rank) for rank in range(workload.data_ranks)]
    one: dict[str, Any] = {"devices": 1, "strategy": "none", "context": 1, "compile": False}
    one |= {"graphs": "false", "accumulate": workload.accumulate * workload.data_ranks}

    def step_of(reduced: Run, ranks: Parallel, moves: bool = False) -> Result:
        if ranks.ranks == 1:
            reduced = replace(reduced, workload=replace(reduced.workload, **one))
        mine = chain(*groups[ranks.data_rank :: ranks.data_ranks])
        return result(TrainState(reduced, ranks), list(mine), ranks, moves)

    exactly, ours, theirs = parallel, step_of(reduced, parallel), step_of(reduced, parallel.alone())
    # bf16 rounds differently on each layout: it is held to the distance of one rank from fp32. Then
    # all ranks are compared in fp32 too, where smaller mistakes show
    if workload.precision != "fp32":
        config = replace(reduced.config, precision="fp32")
        exactly = replace(parallel, dtype=torch.float32)
        exact = replace(workload, precision="fp32", compile=False)
        try:
            check_attention(config, workload.model, workload.device)
        except ValueError:  # such as flash_attn's
            exact = replace(exact, attention=AttentionConfig("naive"))
        reduced = replace(reduced, config=config, workload=exact)
        rounded, theirs = theirs, step_of(reduced, exactly.alone())
        of_rounding = differences(rounded, theirs, parallel)
        allowed = {name: max(TIMES * x, BF16) for name, x in of_rounding.items()}
        require(differences(ours, theirs, parallel), allowed)
        ours = step_of(reduced, exactly)
    found = differences(ours, theirs, parallel)
    allowed = dict.fromkeys(found, FP32) | {"gradient norm": 10 * FP32}
    if any(not x <= allowed[name] for name, x in found.items()):
        rounding = differences(step_of(reduced, exactly.alone(), moves=True), theirs, parallel)
        allowed = {name: max(x, 2 * TIMES * rounding[name]) for name, x in allowed.items()}
    require(found, allowed)
    # Leave nothing behind that the run would notice: memory, or code compiled for short sequences
    if workload.compile:
        torch._dynamo.reset()
    gc.collect()
    if workload.device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    return {"loss": found.pop("loss"), "gradients": max(found.values())}


def require(found: dict[str, float], allowed: dict[str, float]) -> None:
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


def result(state: TrainState, sequences: list[Sequence], parallel: Parallel, moves: bool) -> Result:
    """Return the result of a step on the `sequences` of this rank; `moves`: of rounded weights."""
    model, found = state.module.model, Result()
    # They begin with zeros: A of LoRA would have no gradient, and a head could take the sink of
    # another unnoticed. With large numbers rounding grows
    for name, own in model.named_parameters():
        if name.endswith((".lora_b", ".sinks", ".bias")):
            values = torch.linspace(-0.05, 0.05, own.numel())
            sharding.write(own, values.view(own.shape))
        if moves:
            own.data.mul_(ROUNDED)
    size = state.run.workload.batch_size
    batch = [micro_batch(sequences[i : i + size]) for i in range(0, len(sequences), size)]

    def keep(part: str) -> None:
        if part == "backward":  # the last micro-batch's has the sum
            # Before a backward fsdp may show whole weights, which have no gradient
            for name, p in model.named_parameters():
                if p.grad is not None:
                    found[f"gradient of {name}"] = sharding.full(p.grad).clone()

    total = parallel.all_reduce_sum(optimizer_step(state, batch, parallel, keep))
    weight = parallel.loss_weight(sum(micro.scored for micro in batch)) / parallel.ranks
    return found | {"loss": total * weight, "gradient norm": state.module.grad_norm}


def differences(ours: Result, theirs: Result, parallel: Parallel) -> dict[str, float]:
    """Return any rank's largest difference from `theirs`, by name, relative; infinite for NaN."""
    values = []
    for name, y in theirs.items():
        largest = y.abs().max().clamp(min=torch.finfo(y.dtype).tiny)
        difference = (ours.get(name, torch.zeros_like(y)) - y).abs().max() / largest
        values.append(difference.float().nan_to_num(nan=torch.inf))
    return dict(zip(theirs, parallel.all_reduce_max(torch.stack(values)).tolist(), strict=True))


def small(run: Run) -> Run:
    """Return `run` with short sequences and few layers, and a learning rate of 0."""
    # Everything stays that decides how ranks share a step: heads and their size, hidden size,
    # attention, memory policy, LoRA, the layout, the precision. fp8 becomes bf16: with one scale
    # per tensor, the rounding of every token depends on all others. Weights are random, so none are
    # packed. Objectives that read more than documents are checked with cross entropy.
    workload, model = run.workload, run.workload.model
    length = min(workload.seq_len, LENGTH[workload.device])
    # The balance of experts counts padding, so training refuses it. Otherwise it needs a check too:
    # take a length of which the ranks are no divisor
    if model.experts.balance:
        while length != padded(length, workload.context, workload.context_method):
            length -= 1
    elif workload.context > 1 and length % workload.context == 0:
        length -= 1
    # The first layer of each sort, the blocks that are recomputed together, and one more
    kinds, together = model.blocks, (workload.memory.keep_every or 1) + 1
    first = {kinds.index(kind) for kind in kinds} | set(range(min(len(kinds), together)))
    words = min(model.vocab_size or WORDS, WORDS)
    model = replace(model.with_layers(sorted(first)), vocab_size=words)
    if model.window is not None:
        scaled = max(WINDOW, model.window * length // workload.seq_len)
        model = replace(model, window=min(model.window, scaled))
    size, unpacked = min(workload.batch_size, FEW), replace(workload.lora, base=None)
    precision = "bf16" if workload.precision == "fp8" else workload.precision
    workload = replace(workload, seq_len=length, batch_size=size, accumulate=FEW, model=model)
    memory, most = workload.memory, max(1, length // (3 * workload.context))
    memory = replace(memory, mlp_tile=min(memory.mlp_tile or 0, most))  # several, as in the run
    workload = replace(workload, precision=precision, bf16_layers=(), lora=unpacked, memory=memory)
    config = replace(run.config, init=None, seq_len_schedule=None)
    if config.objective.traits.collate is not None:
        config = replace(config, objective=ObjectiveConfig.of())
    return replace(run, config=config, workload=workload, lr=0.0, checkpoint=None, steps_done=0)


def sequences_of(run: Run, data: Data, data_rank: int) -> list[Sequence]:
    """Return the first sequences of a data rank, cut short, of two documents at least. The last
    have few targets: none in their second half, and none at all on the last of several data ranks.
    """
    workload = run.workload
    length, words = workload.seq_len, workload.model.vocab_size or 1
    order = data.order(run.config.seed, data_rank, workload.data_ranks, 0)
    cuts: list[Sequence] = []
    for number in islice(order, workload.batch_size * workload.accumulate):
        whole = data.train[number]
        tokens, targets, doc_ids = (whole[x][:length] for x in ("tokens", "targets", "doc_ids"))
        tokens, targets = tokens % words, torch.where(targets == IGNORED, targets, targets % words)
        if len(doc_ids[: len(whole["tokens"]) - int(whole["padding"])].unique()) < 2:
            doc_ids = (torch.arange(length) >= length // 2).long()
            targets[length // 2 - 1] = IGNORED
        if bool((targets == IGNORED).all()):  # such as a long question of a conversation
            targets[:-1] = torch.where(doc_ids[1:] == doc_ids[:-1], tokens[1:], IGNORED)
        cut = {"tokens": tokens, "targets": targets, "doc_ids": doc_ids}
        cuts.append(cut | {"padding": torch.tensor(0)})  # nobody asks for its share
    has_none = 0 < data_rank == workload.data_ranks - 1
    for sequence in cuts[-workload.batch_size :]:
        sequence["targets"][0 if has_none else length // 2 :] = IGNORED
    return cuts
