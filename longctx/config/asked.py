"""From the keys of a configuration to the step that they ask for. Free of torch."""

from __future__ import annotations

from dataclasses import replace

from longctx.config.fields import refuse
from longctx.config.layout_config import STRATEGIES
from longctx.config.train_config import TrainConfig
from longctx.model.mixers.description import of_model, shared_heads
from longctx.spec.model_config import GPTConfig
from longctx.spec.step import Division, Workload, precision_of


def workload_of(
    config: TrainConfig, device: str, seq_len: int, model: GPTConfig | None = None
) -> Workload:
    """Return the step of `config` on `device` ("cuda" or "cpu") with sequences of `seq_len` tokens,
    in the plainest division that it leaves open.
    """
    # Nulls get their defaults; the memory policy stays as requested.
    model, memory, compiles = model or config.model, config.memory, config.compile.lower()
    auto = device == "cuda" and model.has_kernels
    step = Workload(
        device=device,
        devices=config.devices,
        # These five are the division's
        strategy="none",
        context=1,
        context_method="",
        batch_size=0,
        accumulate=0,
        seq_len=seq_len,
        precision=precision_of(config.precision, device),
        compile=auto if compiles == "auto" else compiles == "true",
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
    )
    return step.divided(divisions(config, model)[0], seq_len)


def divisions(config: TrainConfig, model: GPTConfig) -> list[Division]:
    """Return every division that `config` leaves open for `model`, the plainest first."""
    name, devices = config.strategy.name, config.devices
    names = [name]
    if name == "auto":
        names = [name for name in STRATEGIES if name != "none"] if devices > 1 else ["none"]
    takes_intervals = all(x.description.takes_intervals for x in config.attention.each)
    takes_intervals = takes_intervals and not of_model(model)
    contexts = config.context.layouts(devices, shared_heads(model), takes_intervals)
    if heads := config.memory.heads_at_once:
        contexts = [context for context in contexts if context.degree == 1]
        setting = f"memory.heads_at_once={heads} with context={config.context.degree}"
        refuse((not contexts, f"{setting}: ranks share the heads already; leave one out"))
    sizes = config.batch_size, config.accumulate
    return [
        Division(name, int(context.degree), context.method_for(model.heads), *sizes)
        for context in contexts
        for name in names
    ]


def with_vocabulary(workload: Workload, tokens: int) -> Workload:
    """Return `workload` for a tokenizer of `tokens` tokens; an open size is a multiple of 64."""
    size = workload.model.vocab_size or -(-tokens // 64) * 64
    return replace(workload, model=replace(workload.model, vocab_size=size))
