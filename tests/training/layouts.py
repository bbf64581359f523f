"""One loss, every layout: random compositions of strategy, context, mask, memory, LoRA and
optimizer on gloo, each against the same step on one device, as context.check compares them.

    python -m torch.distributed.run --nproc-per-node 4 tests/training/layouts.py CASES SEED OUT

Writes OUT, JSON: each case with its differences.
"""

import random
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from longctx import system
from longctx.attention.description import AttentionConfig
from longctx.config import layout_config
from longctx.config.doors import ObjectiveConfig, OptimizerConfig
from longctx.config.layout_config import ContextConfig, MemoryConfig, StrategyConfig
from longctx.config.train_config import TrainConfig
from longctx.data.sequences import IGNORED
from longctx.parallel import sharding
from longctx.parallel.mesh import Parallel
from longctx.spec.experts import ExpertsConfig
from longctx.spec.model_config import GPTConfig, LoraConfig
from longctx.training import context_check
from longctx.training.batches import micro_batch
from longctx.training.context_check import Result, Sequence
from longctx.training.run import Run
from longctx.training.train_step import TrainState
from tests.training.sample_run import on_all_ranks, sample_run

MEMORIES = (
    MemoryConfig("fast"),
    MemoryConfig("balanced", recompute_share=0.5),
    MemoryConfig("balanced", keep_every=2, mlp_tile=5),
    MemoryConfig("balanced", keep_every=2, attention_again=0.7),
)
V = 61


def drawn(draw: random.Random, ranks: int) -> TrainConfig:
    """A configuration for `ranks` ranks, at random."""
    context = draw.choice([n for n in (1, 2, 4) if ranks % n == 0])
    method = draw.choice(["ulysses", "allgather"])
    heads = draw.choice([4, 8] if method == "ulysses" else [3, 4, 6])
    lora = draw.random() < 0.25
    optimizer = "muon" if not lora and draw.random() < 0.3 else "adamw"
    sizes = {"vocab_size": V, "channels": 8 * heads, "heads": heads, "ffn": 40}
    model = GPTConfig(
        **sizes,
        layers=draw.choice([1, 3]),
        kv_heads=draw.choice([n for n in (1, 2, 3, 4) if heads % n == 0]),
        window=draw.choice([None, None, 6]),
        tied=draw.random() < 0.5,
        qk_norm=draw.choice(["none", "head", "whole"]),
        norms=draw.choice(["pre", "post", "sandwich"]),
        activation=draw.choice(["silu", "gelu_tanh"]),
        qkv_bias=draw.random() < 0.3,
    )
    memory = draw.choice(MEMORIES)
    if context == 1 and memory.keep_every and draw.random() < 0.5:
        memory = replace(memory, heads_at_once=1)
    return TrainConfig(
        seq_len=draw.choice([16, 33, 50]),
        batch_size=draw.choice([1, 2]),
        accumulate=draw.choice([1, 4]),
        **{"max_steps": 2, "device": "cpu", "devices": ranks},
        clip=draw.choice([None, 1.0]),
        attention=AttentionConfig(draw.choice(["naive", "flash", "sdpa"])),
        model=model,
        memory=replace(memory, loss_chunk=draw.choice([None, 11])),
        lora=LoraConfig(rank=4) if lora else LoraConfig(),
        objective=ObjectiveConfig.of("cross_entropy", z_loss=0.05 if model.tied else 0.0),
        optimizer=OptimizerConfig.of(optimizer),
        strategy=StrategyConfig(draw.choice(["ddp", "fsdp"])),
        context=ContextConfig(context, method),
    )


def in_eight_bits(config: TrainConfig, strategy: str) -> TrainConfig:
    """`config` in FP8: rows of one rank, since other parts of a tensor have other scales."""
    model = replace(config.model, channels=32, heads=4, kv_heads=2, ffn=48)
    bf16_layers = [0] if model.layers > 1 else []
    config = replace(config, precision="fp8", bf16_layers=bf16_layers, model=model, batch_size=1)
    memory, layout = replace(config.memory, mlp_tile=None), StrategyConfig(strategy)
    return replace(config, memory=memory, strategy=layout, context=ContextConfig())


def with_experts(config: TrainConfig, draw: random.Random) -> TrainConfig:
    """`config` with experts; their loss is of a micro-batch, so those are single sequences."""
    flags = {flag: draw.random() < 0.5 for flag in ("normalize", "beside")}
    experts = ExpertsConfig(6, draw.choice([1, 2, 4]), 16, balance=0.2, **flags)
    model = replace(config.model, experts=experts)
    lora, seq_len = replace(config.lora, targets=["qkv", "out"]), draw.choice([16, 48])
    return replace(config, seq_len=seq_len, batch_size=1, model=model, lora=lora)


def rows_of(config: TrainConfig, draw: random.Random, count: int) -> list[Sequence]:
    """Packed rows with targets left out at random: a few, those of half a row, or all of a row."""
    T: Any = config.seq_len
    generator = torch.Generator().manual_seed(draw.randrange(2**31))
    rows: list[Sequence] = []
    for _ in range(count):
        targets = torch.randint(V, (T,), generator=generator)
        left_out = draw.choice([slice(0, 0), slice(0, 3), slice(0, T // 2), slice(T // 2, T)])
        targets[slice(0, T) if draw.random() < 0.15 else left_out] = IGNORED
        begins = torch.rand(T, generator=generator) < draw.choice([0.0, 0.1, 0.4])
        row = {"targets": targets, "doc_ids": begins.cumsum(0), "padding": torch.tensor(0)}
        rows.append(row | {"tokens": torch.randint(V, (T,), generator=generator)})
    if all((row["targets"] == IGNORED).all() for row in rows):
        rows[0]["targets"][5:9] = 1
    return rows


def step_of(run: Run, parallel: Parallel, rows: list[Sequence]) -> Result:
    """Loss and gradients of an optimizer step over `rows`, and the losses of the first of them."""
    state = TrainState(run, parallel)
    if run.workload.precision == "fp8":  # FSDP2 rounds weights to bf16 before it gathers them
        with torch.no_grad():
            for p in state.module.parameters():
                sharding.local(p).copy_(sharding.local(p).bfloat16())
    with torch.no_grad():
        losses = state.module.validation_step(micro_batch(rows[:1]))
    mine = rows[parallel.data_rank :: parallel.data_ranks]
    return context_check.result(state, mine, parallel, False) | {"validation": losses}


def compared(config: TrainConfig, draw: random.Random) -> dict[str, float]:
    """The differences of the step on all ranks from the same step on one of them."""
    parallel = Parallel.of(config, "cpu")
    parallel.launch()
    run = sample_run(replace(config, devices=parallel.ranks))
    work = run.workload
    parallel = parallel.with_mesh(work, work.attention)
    accumulate = work.accumulate * work.data_ranks
    rows = rows_of(config, draw, work.batch_size * accumulate)
    layout = {"strategy": StrategyConfig(), "context": ContextConfig()}
    single = sample_run(replace(config, devices=1, accumulate=accumulate, **layout))
    ours, theirs = step_of(run, parallel, rows), step_of(single, parallel.alone(), rows)
    return context_check.differences(ours, theirs, parallel)


def main(cases: int, seed: int, out: Path) -> None:
    """The ranks step together through all cases, and each alone."""
    with on_all_ranks(out) as results:
        for number in range(seed, seed + cases):
            draw = random.Random(number)
            config = drawn(draw, dist.get_world_size())
            if number % 4 == 1:
                config = with_experts(config, draw)
            if number % 4 == 3:
                config = in_eight_bits(config, "ddp" if number % 8 == 3 else "fsdp")
            layout_config.MANY_TOKENS = draw.choice([1, 10**9])  # in parts, or all heads at once
            in_bf16 = config.precision == "fp8" and config.strategy.name == "fsdp"
            limit = 1e-2 if in_bf16 else 1e-5  # FSDP2 gathers in bf16, gradients too
            known = {"case": number, "config": str(config), "limit": limit}
            print(known, file=sys.stderr)  # shown only after an error
            results[str(number)] = known | {"differences": compared(config, draw)}


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
    system.exit_with(0)
