"""One loss, every layout: random compositions of strategy, context, mask, memory, LoRA and
optimizer on gloo, each against the same step on one device.

    python -m torch.distributed.run --nproc-per-node 4 tests/training/layouts.py CASES SEED OUT

Writes OUT, a JSON list: each case with its largest differences.
"""

import json
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from longctx import system
from longctx.attention.description import AttentionConfig
from longctx.config import parallel_config
from longctx.config.experts import ExpertsConfig
from longctx.config.memory_config import MemoryConfig
from longctx.config.model_config import GPTConfig, LoraConfig
from longctx.config.objective_config import ObjectiveConfig, OptimizerConfig
from longctx.config.parallel_config import ContextConfig, StrategyConfig
from longctx.config.train_config import TrainConfig
from longctx.parallel import sharding
from longctx.parallel.mesh import Parallel
from longctx.training.batches import StepBatch, micro_batch
from longctx.training.run import Run
from longctx.training.train_step import TrainState, optimizer_step
from tests.training.sample_run import sample_run

MEMORIES = (
    MemoryConfig("fast"),
    MemoryConfig("fast", recompute="mlp", mlp_tile=7),
    MemoryConfig("balanced"),
    MemoryConfig("balanced", keep_every=2, mlp_tile=5),
    MemoryConfig("balanced", keep_every=3),
)
V = 61


def drawn(draw: random.Random, ranks: int) -> TrainConfig:
    """A configuration for `ranks` ranks, at random."""
    context = draw.choice([n for n in (1, 2, 4) if ranks % n == 0])
    method = draw.choice(["ulysses", "allgather"])
    heads = draw.choice([4, 8] if method == "ulysses" else [3, 4, 6])
    lora = draw.random() < 0.25
    optimizer = "muon" if not lora and draw.random() < 0.3 else "adamw"
    model = GPTConfig(
        vocab_size=V,
        layers=draw.choice([1, 3]),
        channels=8 * heads,
        heads=heads,
        kv_heads=draw.choice([n for n in (1, 2, 3, 4) if heads % n == 0]),
        ffn=40,
        window=draw.choice([None, None, 6]),
        tied=draw.random() < 0.5,
        qk_norm=draw.choice(["none", "head", "whole"]),
        norms=draw.choice(["pre", "post", "sandwich"]),
        activation=draw.choice(["silu", "gelu_tanh"]),
        qkv_bias=draw.random() < 0.3,
    )
    memory = draw.choice(MEMORIES)
    return TrainConfig(
        seq_len=draw.choice([16, 33, 50]),
        batch_size=draw.choice([1, 2]),
        accumulate=draw.choice([1, 4]),
        max_steps=2,
        device="cpu",
        devices=ranks,
        clip=draw.choice([None, 1.0]),
        attention=AttentionConfig(draw.choice(["naive", "flash", "sdpa"])),
        model=model,
        memory=replace(memory, loss_chunk=draw.choice([None, 11])),
        lora=LoraConfig(rank=4) if lora else LoraConfig(),
        objective=ObjectiveConfig(z_loss=0.05 if model.tied else None),
        optimizer=OptimizerConfig(optimizer),
        strategy=StrategyConfig(draw.choice(["ddp", "fsdp"])),
        context=ContextConfig(context, method),
    )


def in_eight_bits(config: TrainConfig, strategy: str) -> TrainConfig:
    """`config` with precision=fp8 and rows of one rank, since a tensor that is divided otherwise
    has other scales; sizes are multiples of 16.
    """
    model = replace(config.model, channels=32, heads=4, kv_heads=2, ffn=48)
    return replace(
        config,
        precision="fp8",
        bf16_layers=[0] if model.layers > 1 else [],
        model=model,
        batch_size=1,
        memory=replace(config.memory, mlp_tile=None),
        strategy=StrategyConfig(strategy),
        context=ContextConfig(),
    )


def with_experts(config: TrainConfig, draw: random.Random) -> TrainConfig:
    """`config` with experts and their balancing loss, which a micro-batch has for itself: it is the
    same on one device with micro-batches of one sequence, and without padding.
    """
    count, normalize = draw.choice([1, 2, 4]), draw.random() < 0.5
    experts = ExpertsConfig(6, count, 16, normalize=normalize, balance=0.2)
    return replace(
        config,
        seq_len=draw.choice([16, 48]),
        batch_size=1,
        model=replace(config.model, experts=experts, activation="silu"),
        lora=replace(config.lora, targets=["qkv", "out"]),
    )


def rows_of(config: TrainConfig, draw: random.Random, count: int) -> list[dict[str, Tensor]]:
    """Packed rows with targets left out at random: a few, those of half a row, or all of a row."""
    T = config.seq_len
    assert isinstance(T, int)
    generator = torch.Generator().manual_seed(draw.randrange(2**31))
    rows = []
    for _ in range(count):
        targets = torch.randint(V, (T,), generator=generator)
        left_out = draw.choice([slice(0, 0), slice(0, 3), slice(0, T // 2), slice(T // 2, T)])
        targets[left_out] = -100
        if draw.random() < 0.15:
            targets[:] = -100
        documents = torch.rand(T, generator=generator) < draw.choice([0.0, 0.1, 0.4])
        rows.append(
            {
                "tokens": torch.randint(V, (T,), generator=generator),
                "targets": targets,
                "doc_ids": documents.cumsum(0),
                "padding": torch.zeros(1, dtype=torch.int64),
            }
        )
    if all((row["targets"] == -100).all() for row in rows):
        rows[0]["targets"][5:9] = 1
    return rows


def step_of(run: Run, parallel: Parallel, rows: list[dict[str, Tensor]]) -> dict[str, Any]:
    """Losses of the first row, then loss and gradients of an optimizer step over `rows`."""
    work = run.workload
    mine = rows[parallel.data_rank :: parallel.data_ranks]
    groups = [mine[i : i + work.batch_size] for i in range(0, len(mine), work.batch_size)]
    batch = StepBatch([micro_batch(group) for group in groups])
    state = TrainState(run, parallel)
    # LoRA begins with zeros, whose gradients would be zero; with large numbers, rounding grows.
    r = 0.05
    with torch.no_grad():
        for name, p in state.module.named_parameters():
            if name.endswith("lora_b"):
                sharding.draw(p, lambda x: x.copy_(torch.linspace(-r, r, x.numel()).view(x.shape)))
            if work.precision == "fp8":  # which FSDP2 rounds to bf16 before it gathers them
                sharding.local(p).copy_(sharding.local(p).bfloat16())
    gradients: dict[str, Tensor] = {}
    clip = state.module.configure_gradient_clipping

    def captured(*arguments: Any) -> None:
        for name, p in state.module.named_parameters():
            if p.grad is not None:
                gradients[name] = sharding.full(p.grad).clone()
        clip(*arguments)

    state.module.configure_gradient_clipping = captured  # type: ignore[method-assign]
    losses = state.module.validation_step(micro_batch(rows[:1]))
    total = optimizer_step(state, batch, parallel)
    scored = parallel.all_reduce_sum(torch.tensor(float(parallel.counted_once(batch.scored))))
    return {
        "loss": parallel.all_reduce_sum(total) / scored,
        "grad_norm": state.module.grad_norm,
        "validation": losses,
        "gradients": gradients,
    }


class Case(NamedTuple):
    """A step that all ranks have done."""

    run: Run
    parallel: Parallel
    rows: list[dict[str, Tensor]]
    step: dict[str, Any]


def difference(x: Tensor, y: Tensor) -> float:
    """The largest difference, relative to the largest value."""
    return float((x - y).abs().max() / y.abs().max().clamp(min=1e-3))


def largest(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    """The largest difference of any gradient, relative to the largest value of its tensor."""
    assert ours.keys() == theirs.keys(), ours.keys() ^ theirs.keys()
    return max(difference(ours[name], theirs[name]) for name in theirs)


def spread(config: TrainConfig, draw: random.Random) -> Case:
    """The step of `config` on all ranks."""
    parallel = Parallel(config, "cpu")
    parallel.launch()
    run = sample_run(replace(config, devices=parallel.ranks))
    parallel.init_mesh(run.workload)
    work = run.workload
    rows = rows_of(config, draw, work.batch_size * work.accumulate * work.data_ranks)
    ours = step_of(run, parallel, rows)
    return Case(run, parallel, rows, ours)


def compared(case: Case) -> dict[str, float]:
    """The differences from the same step on one device, this one."""
    config, work, ours = case.run.config, case.run.workload, case.step
    single = replace(
        config,
        devices=1,
        accumulate=work.accumulate * work.data_ranks,
        strategy=StrategyConfig(),
        context=ContextConfig(),
    )
    theirs = step_of(sample_run(single), case.parallel.alone(), case.rows)
    return {
        "loss": abs(float(ours["loss"] / theirs["loss"]) - 1),
        "grad_norm": abs(float(ours["grad_norm"] / theirs["grad_norm"]) - 1),
        "validation": difference(ours["validation"], theirs["validation"]),
        "gradients": largest(ours["gradients"], theirs["gradients"]),
    }


def main(cases: int, seed: int, out: Path) -> None:
    """The ranks step together through as many cases as there are ranks, then each compares one."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    results: list[dict[str, Any]] = []
    for first in range(seed, seed + cases, ranks):
        numbers = range(first, min(first + ranks, seed + cases))
        for number in numbers:
            draw = random.Random(number)
            config = drawn(draw, ranks)
            if number % 4 == 1:
                config = with_experts(config, draw)
            if number % 4 == 3:
                config = in_eight_bits(config, "ddp" if number % 8 == 3 else "fsdp")
            parallel_config.MANY_TOKENS = draw.choice([1, 10**9])  # in parts, or all heads at once
            with named(number, config):
                case = spread(config, draw)
            if number - first == rank:
                mine = case
        if rank < len(numbers):
            config = mine.run.config
            with named(first + rank, config):
                result = compared(mine)
            in_bf16 = config.precision == "fp8" and config.strategy.name == "fsdp"
            limit = 1e-2 if in_bf16 else 1e-5  # FSDP2 gathers in bf16, gradients too
            known = {"case": first + rank, "config": shown(config), "limit": limit}
            results.append({**known, **result})
    everyone: list[Any] = [None] * ranks
    dist.gather_object(results, everyone if rank == 0 else None)
    if rank == 0:
        out.write_text(json.dumps([result for one in everyone for result in one]))
    dist.barrier()
    dist.destroy_process_group()


def shown(config: TrainConfig) -> str:
    """`config` as a line, what spreads it first."""
    return f"{config.strategy.name} context={config.context.degree} {config}"


@contextmanager
def named(number: int, config: TrainConfig) -> Iterator[None]:
    """Name the case in any error."""
    try:
        yield
    except Exception as error:
        raise RuntimeError(f"case {number}: {shown(config)}") from error


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
    system.exit_with(0)
