"""From the keys of a configuration to the step that they ask for. Free of torch."""

from __future__ import annotations

from dataclasses import replace

from longctx.config.layout_config import STRATEGIES
from longctx.config.train_config import TrainConfig
from longctx.spec.model_config import GPTConfig
from longctx.spec.step import Division, Workload, precision_of


def workload_of(
    config: TrainConfig, device: str, seq_len: int, model: GPTConfig | None = None
) -> Workload:
    """Return the step of `config` on `device` ("cuda" or "cpu") with sequences of `seq_len` tokens,
    in the plainest division that it leaves open.
    """
    step = open_step(config, device, seq_len, model or config.model)
    return step.divided(step.divisions[0], seq_len)


def open_step(config: TrainConfig, device: str, seq_len: int, model: GPTConfig) -> Workload:
    """Return the step of `config` with every division that it leaves open.

    Nulls get their defaults; the memory policy stays as requested. On a GPU the planner may make
    fewer, larger micro-batches of the same step.
    """
    memory, compiles = config.memory, config.compile.lower()
    possible = divisions(config, model)
    return Workload(
        device=device,
        devices=config.devices,
        strategy=possible[0].strategy,
        context=possible[0].context,
        context_method=possible[0].context_method,
        seq_len=seq_len,
        batch_size=0,
        accumulate=0,
        precision=precision_of(config.precision, device),
        compile=device == "cuda" and model.has_kernels
        if compiles == "auto"
        else compiles == "true",
        model=model,
        # a CPU has memory for the fastest policy
        memory=memory if device == "cuda" else memory.filled(memory.policies()[0]),
        attention=config.attention,
        lora=config.lora,
        optimizer=config.optimizer,
        validates=config.data.val_fraction != 0,
        # Sums over answers are no graph
        graphs=config.graphs.lower() if config.objective.traits.data is None else "false",
        bf16_layers=tuple(config.bf16_layers),
        passkey_length=max(config.passkey.lengths or [0]) if config.passkey.enabled else 0,
        divisions=tuple(possible),
    )


def divisions(config: TrainConfig, model: GPTConfig) -> list[Division]:
    """Return every division that `config` leaves open for `model`, the plainest first."""
    name, devices = config.strategy.name, config.devices
    names = [name]
    if name == "auto":
        names = [name for name in STRATEGIES if name != "none"] if devices > 1 else ["none"]
    takes_intervals = config.attention.description.takes_intervals
    return [
        Division(
            name,
            int(context.degree),
            context.method_for(model.heads),
            config.batch_size,
            config.accumulate,
        )
        for context in config.context.layouts(devices, model.heads, takes_intervals)
        for name in names
    ]


def with_vocabulary(workload: Workload, tokens: int) -> Workload:
    """Return `workload` for a tokenizer of `tokens` tokens; an open size is a multiple of 64."""
    size = workload.model.vocab_size or -(-tokens // 64) * 64
    return replace(workload, model=replace(workload.model, vocab_size=size))
